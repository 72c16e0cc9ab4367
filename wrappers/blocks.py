"""Which modules of a model are its blocks, and what is done to them: checkpointing, compiling."""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ..registry import did_you_mean
from .batchnorm.sync_batchnorm import SynchronizedBatchNorm
from .torch_functions import check_options, uncompiled

BlockSpec: TypeAlias = str | type[nn.Module] | Iterable["str | type[nn.Module]"] | Mapping[str, Any]
CheckpointingSpec: TypeAlias = BlockSpec | Mapping[str, Any]
CompileSpec: TypeAlias = bool | str | Mapping[str, Any]

_COMPILE_OPTIONS = ("blocks", "backend", "mode", "dynamic", "fullgraph", "options")
_STEP_OPTIONS = ("step", "max_programs", "min_steps", "custom_optimizer", "backend")


def find_blocks(model: nn.Module, spec: BlockSpec | None) -> dict[str, nn.Module]:
    """Modules that ``spec`` names, by path and in module order.

    Args:
        spec: a class or its name (subclasses count), the path of a module, or a pattern of
            ``fnmatch`` for paths, of whose matches the outermost count (``net.blocks.*`` are not
            what is in the blocks); or a list of these. Or a mapping with ``classes`` (such a
            list) and ``min_params``: then also the smallest modules that have at least so many
            parameters outside of those already taken.

    Raises:
        ValueError: something matches nothing, or is a container without a ``forward``.
        TypeError: ``spec`` is of another kind.
    """
    modules = dict(model.named_modules())
    names, min_params = _read(spec)
    chosen = {path for name in names for path in _matches(modules, name)}
    for path in chosen:
        if not _can_run(modules[path]):
            raise ValueError(
                f"{path!r} is a {type(modules[path]).__name__}, which has no forward of its own "
                f"and can be no block; its children are {path}.*"
            )
    if min_params is not None:
        chosen.update(_by_size(modules, chosen, min_params))
    return {path: module for path, module in modules.items() if path in chosen}


def _read(spec: Any) -> tuple[list[str | type[nn.Module]], float | None]:
    """What is named, and the size threshold."""
    size = None
    if isinstance(spec, Mapping):
        check_options("a choice of blocks", spec, ["classes", "min_params"])
        size, spec = spec.get("min_params"), spec.get("classes")
        is_number = isinstance(size, (int, float)) and not isinstance(size, bool)
        if size is not None and not (is_number and size > 0):
            raise TypeError(f"min_params must be a positive number of parameters, got {size!r}")
    names = [spec] if isinstance(spec, (str, type)) else () if spec is None else spec
    if not isinstance(names, Iterable) or isinstance(names, nn.Module):
        raise TypeError(
            "blocks must be class names, module paths or patterns, or a mapping with classes "
            f"or min_params; got {names!r}"
        )
    found = list(names)
    for one in found:
        if not isinstance(one, str) and not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise TypeError(f"a block must be named by a string or a module class, got {one!r}")
    return found, size


def _matches(modules: Mapping[str, nn.Module], name: str | type[nn.Module]) -> list[str]:
    if isinstance(name, type):
        found = [path for path, module in modules.items() if isinstance(module, name)]
    elif name and name in modules:
        found = [name]
    else:
        found = [path for path, module in modules.items() if name in _class_names(module)]
        if not found:
            fitting = [path for path in modules if path and fnmatchcase(path, name)]
            inside = tuple(f"{path}." for path in fitting)
            found = [path for path in fitting if not path.startswith(inside)]
    if not found:
        classes = list(dict.fromkeys(type(module).__name__ for module in modules.values()))
        wanted = name if isinstance(name, str) else name.__name__
        hint = did_you_mean(wanted, [*classes, *filter(None, modules)])
        hint = hint or f"; its classes: {', '.join(classes)}"
        raise ValueError(f"no module of the model has the class or path {wanted!r}{hint}")
    return found


def _class_names(module: nn.Module) -> set[str]:
    kinds = type(module).__mro__
    kinds = kinds[: kinds.index(nn.Module)]
    return {one.__name__ for one in kinds} | {f"{one.__module__}.{one.__name__}" for one in kinds}


def _by_size(modules: dict[str, nn.Module], chosen: set[str], min_params: float) -> list[str]:
    """Paths of the smallest modules with enough parameters outside of those in ``chosen``."""
    taken = {id(one) for path in chosen for one in modules[path].parameters()}
    found: list[str] = []
    largest = 0
    # Children come after their parents in module order, so backwards they come first.
    for path, module in reversed(modules.items()):
        if not path or not _can_run(module) or path in chosen:
            continue
        free = [one for one in module.parameters() if id(one) not in taken]
        count = sum(one.numel() for one in free)
        largest = max(largest, count)
        if count >= min_params:
            found.append(path)
            taken.update(id(one) for one in free)
    if not found and not chosen:
        raise ValueError(
            f"no module of the model has min_params={min_params:g} parameters; the largest has "
            f"{largest}"
        )
    return found


def _can_run(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def find_parameters(
    model: nn.Module, patterns: str | Iterable[str], setting: str
) -> dict[str, nn.Parameter]:
    """Parameters by name: those that ``patterns`` fit, and those of modules whose paths they fit.

    ``setting`` is what the patterns belong to, for the ValueError where one fits nothing.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    chosen: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        inside = tuple(f"{path}." for path in modules if fnmatchcase(path, pattern))
        found = [
            name for name in parameters if fnmatchcase(name, pattern) or name.startswith(inside)
        ]
        if not found:
            hint = did_you_mean(pattern, [*parameters, *modules])
            raise ValueError(
                f"{setting}: no parameter of the model has the name or path {pattern!r}{hint}"
            )
        chosen += found
    return {name: parameters[name] for name in chosen}


def compile_model(model: nn.Module, spec: CompileSpec = True) -> nn.Module:
    """Compile ``model`` by ``torch.compile``, in place; returns it.

    The names of parameters stay what they were. Nothing is compiled before the first forward.

    Args:
        spec: True, or a mapping with ``blocks`` (as for ``find_blocks``; default: the whole
            model) and what ``torch.compile`` takes: ``backend``, ``mode``, ``dynamic``,
            ``fullgraph``, ``options``. False compiles nothing, as "step", for ``compile_step``.

    Raises:
        ValueError: something matches no module, or there is no such backend or mode.
        TypeError: there is no such option.
    """
    options = {k: value for k, value in (read_compile(spec) or {}).items() if k != "blocks"}
    for module in find_compiled(model, spec).values():
        module.compile(**options)
    return model


def find_compiled(model: nn.Module, spec: CompileSpec) -> dict[str, nn.Module]:
    """The modules to be compiled, by path; arguments and errors as for ``compile_model``."""
    options = read_compile(spec)
    if options is None or "step" in options:
        return {}
    backend, mode = options.get("backend", "inductor"), options.get("mode")
    if isinstance(backend, str):
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            hint = did_you_mean(backend, known)
            raise ValueError(f"compile: there is no backend {backend!r}{hint}")
    if mode is not None:
        if backend != "inductor":
            raise ValueError(f"compile: mode is an option of inductor, not of {backend!r}")
        modes = list(torch._inductor.list_mode_options())
        if mode not in modes:
            hint = did_you_mean(mode, modes)
            raise ValueError(f"compile: there is no mode {mode!r}, only {', '.join(modes)}{hint}")
    return find_blocks(model, options["blocks"]) if "blocks" in options else {"": model}


def read_compile(spec: Any) -> dict[str, Any] | None:
    """Return the options, None when nothing is to be compiled; "step" is an option as well.

    Raises:
        TypeError: there is no such option, or it is of another type.
    """
    if spec is None or isinstance(spec, bool):
        return {} if spec else None
    spec = {"step": True} if spec == "step" else spec
    if not isinstance(spec, Mapping):
        raise TypeError(f"compile must be true, false, step or options, got {spec!r}")
    options = {name: value for name, value in spec.items() if value is not None}
    of_step = any(name in _STEP_OPTIONS and name != "backend" for name in options)
    check_options(
        "compile: step" if of_step else "compile",
        spec,
        _STEP_OPTIONS if of_step else _COMPILE_OPTIONS,
    )
    for name in ("step", "dynamic", "fullgraph", "custom_optimizer"):
        if not isinstance(options.get(name, True), bool):
            raise TypeError(f"compile: {name} must be true or false, got {options[name]!r}")
    for name, least in (("max_programs", 1), ("min_steps", 0)):
        count = options.get(name, least)
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise TypeError(
                f"compile: {name} must be an integer of at least {least}, got {count!r}"
            )
    if of_step and options.get("backend", "eager") not in ("inductor", "eager"):
        raise TypeError(
            f"compile: backend of a step must be inductor or eager, got {options['backend']!r}"
        )
    return None if of_step and not options.get("step", True) else options


def checkpoint_activations(model: nn.Module, spec: CheckpointingSpec) -> nn.Module:
    """Have blocks keep only their inputs and run again in the backward; changes them in place.

    Losses and gradients stay the same, with one more forward of the blocks as the price. Each
    block gets a subclass of its class, so that names, attributes, ``isinstance``, copies and
    pickles are what they were. Running statistics are moved once per step, as without.

    Args:
        spec: as for ``find_blocks``; or a mapping with such ``blocks`` and
            ``preserve_rng_state``: whether the second forward draws the same random numbers
            (default: True; without dropout False saves a little time).

    Raises:
        ValueError: something matches no module, or a block has a forward beside its class's.
        TypeError: there is no such option.
    """
    _, preserve = read_checkpointing(spec)
    for block in find_checkpointed(model, spec).values():
        kind: Any = type(block)
        if not issubclass(kind, _Checkpointed):
            block.__class__ = _checkpointed(kind, preserve)
    return model


def find_checkpointed(model: nn.Module, spec: CheckpointingSpec) -> dict[str, nn.Module]:
    """The blocks that are meant, by path; arguments and errors as ``checkpoint_activations``."""
    found = find_blocks(model, read_checkpointing(spec)[0])
    for path, block in found.items():
        if "forward" in vars(block):
            raise ValueError(
                f"{path!r} has a forward of its own beside that of {type(block).__name__}, "
                "which activation checkpointing cannot stand around"
            )
    return found


def read_checkpointing(spec: Any) -> tuple[Any, bool]:
    """Return which blocks are meant, and whether to preserve the state of the random numbers."""
    options = dict(spec) if isinstance(spec, Mapping) else {"blocks": spec}
    allowed = ["blocks", "preserve_rng_state", "classes", "min_params"]
    check_options("activation_checkpointing", options, allowed)
    preserve = options.pop("preserve_rng_state", True)
    if not isinstance(preserve, bool):
        raise TypeError(f"preserve_rng_state must be true or false, got {preserve!r}")
    blocks = options.pop("blocks", None)
    if blocks is not None and options:
        raise TypeError(f"activation_checkpointing has blocks or {', '.join(options)}, not both")
    if blocks is None and not options:
        raise TypeError("activation_checkpointing needs blocks")
    return (options or blocks), preserve


class _Checkpointed(nn.Module):
    """What the classes of checkpointed blocks have in common."""

    _made_from: tuple[type[nn.Module], bool]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        _, (_, *arguments), *state = reduced
        return (_new, (*self._made_from, *arguments), *state)


# Cached, so that two blocks alike stay of one class.
@functools.cache
def _checkpointed(kind: Any, preserve: bool) -> type[nn.Module]:
    """The subclass of ``kind`` whose forward is run again in the backward."""

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        # The arguments' names are the block's own and may be those of torch's options.
        call = functools.partial(run, **kwargs) if kwargs else run
        norms = [one for one in self.modules() if isinstance(one, _NormBase)]
        norms = [one for one in norms if one.training and one.track_running_stats]
        if norms:
            return _without_moving_twice(norms, call, args, preserve)
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=preserve)

    namespace = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace |= {"_made_from": (kind, preserve), "forward": forward}
    bases = (_Checkpointed, kind)
    return types.new_class(kind.__name__, bases, exec_body=lambda body: body.update(namespace))


def _new(kind: Any, preserve: bool, *arguments: Any) -> Any:
    made: Any = _checkpointed(kind, preserve)
    return made.__new__(made, *arguments)


@uncompiled("a checkpointed block with running statistics runs outside of graphs")
def _without_moving_twice(
    norms: Sequence[_NormBase], call: Callable[..., Any], args: Sequence[Any], preserve: bool
) -> Any:
    for one in norms:
        if isinstance(one, SynchronizedBatchNorm) and one._place is not None:
            raise RuntimeError(
                "a block with synchronised BatchNorm cannot be checkpointed under dp, whose "
                "copies do not meet again in the backward; choose smaller blocks, or ddp"
            )

    return checkpoint(
        call,
        *args,
        use_reentrant=False,
        preserve_rng_state=preserve,
        context_fn=lambda: (nullcontext(), _still(norms)),
    )


@contextmanager
def _still(norms: Iterable[_NormBase]) -> Iterator[None]:
    """Leave running statistics where they are; the same tensors are saved for the backward."""
    before = [(one, one.momentum, one._buffers.get("num_batches_tracked")) for one in norms]
    try:
        for one, _, _ in before:
            one.momentum = 0.0
            one._buffers["num_batches_tracked"] = None
        yield
    finally:
        for one, momentum, count in before:
            one.momentum = momentum
            one._buffers["num_batches_tracked"] = count
