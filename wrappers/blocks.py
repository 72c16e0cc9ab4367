"""The blocks of a model: how to find, checkpoint and compile them."""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
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
    """Return the modules that ``spec`` names, by path and in module order.

    Args:
        spec: a class or its name (subclasses match too), the path of a module, an ``fnmatch``
            pattern for paths, or a list of these. A pattern selects only the outermost of its
            matches: ``net.blocks.*`` does not include modules inside the blocks. Or a mapping with
            ``classes`` (such a list), ``min_params`` (a number) or both. ``min_params`` selects the
            smallest modules with at least this number of parameters, not counting the parameters of
            modules in ``classes``.

    Raises:
        ValueError: a name matches nothing, or matches a container without a ``forward``.
        TypeError: ``spec`` has another type.
    """
    modules = dict(model.named_modules())
    names, min_params = _parse_blocks(spec)
    chosen = {path for name in names for path in _matches(modules, name)}
    for path in chosen:
        if not _can_run(modules[path]):
            raise ValueError(
                f"{path!r} is a {type(modules[path]).__name__}, and a block must have a forward; "
                f"name its children instead: {path}.*"
            )
    if min_params is not None:
        chosen.update(_find_by_size(modules, chosen, min_params))
    return {path: module for path, module in modules.items() if path in chosen}


def _parse_blocks(spec: Any) -> tuple[list[str | type[nn.Module]], float | None]:
    """Return the names in ``spec``, and ``min_params``."""
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
    blocks = list(names)
    for block in blocks:
        if not isinstance(block, str) and not (
            isinstance(block, type) and issubclass(block, nn.Module)
        ):
            raise TypeError(f"a block must be named by a string or a module class, got {block!r}")
    return blocks, size


def _matches(modules: Mapping[str, nn.Module], name: str | type[nn.Module]) -> list[str]:
    if isinstance(name, type):
        paths = [path for path, module in modules.items() if isinstance(module, name)]
    elif name and name in modules:
        paths = [name]
    else:
        paths = [path for path, module in modules.items() if name in _class_names(module)]
        if not paths:
            fitting = [path for path in modules if path and fnmatchcase(path, name)]
            inside = tuple(f"{path}." for path in fitting)
            paths = [path for path in fitting if not path.startswith(inside)]
    if not paths:
        classes = list(dict.fromkeys(type(module).__name__ for module in modules.values()))
        block_name = name if isinstance(name, str) else name.__name__
        hint = did_you_mean(block_name, [*classes, *filter(None, modules)])
        hint = hint or f"; its classes: {', '.join(classes)}"
        raise ValueError(f"no module of the model has the class or path {block_name!r}{hint}")
    return paths


def _class_names(module: nn.Module) -> set[str]:
    kinds = type(module).__mro__
    kinds = kinds[: kinds.index(nn.Module)]
    return {kind.__name__ for kind in kinds} | {
        f"{kind.__module__}.{kind.__name__}" for kind in kinds
    }


def _find_by_size(modules: dict[str, nn.Module], chosen: set[str], min_params: float) -> list[str]:
    """Return the smallest modules with enough parameters, not counting ``chosen`` modules."""
    counted = {id(param) for path in chosen for param in modules[path].parameters()}
    paths: list[str] = []
    largest = 0
    # In reverse module order, children come before their parents.
    for path, module in reversed(modules.items()):
        if not path or not _can_run(module) or path in chosen:
            continue
        free = [param for param in module.parameters() if id(param) not in counted]
        count = sum(param.numel() for param in free)
        largest = max(largest, count)
        if count >= min_params:
            paths.append(path)
            counted.update(id(param) for param in free)
    if not paths and not chosen:
        raise ValueError(
            f"no module of the model has at least min_params={min_params:g} parameters; the "
            f"largest has {largest}"
        )
    return paths


def _can_run(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def find_parameters(
    model: nn.Module, patterns: str | Iterable[str], setting: str
) -> dict[str, nn.Parameter]:
    """Return, by name, the parameters whose name or whose module's path matches a pattern.

    Raises:
        ValueError: a pattern matches nothing; the message begins with ``setting``.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    chosen: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        inside = tuple(f"{path}." for path in modules if fnmatchcase(path, pattern))
        matches = [
            name for name in parameters if fnmatchcase(name, pattern) or name.startswith(inside)
        ]
        if not matches:
            hint = did_you_mean(pattern, [*parameters, *modules])
            raise ValueError(
                f"{setting}: no parameter of the model has the name or path {pattern!r}{hint}"
            )
        chosen += matches
    return {name: parameters[name] for name in chosen}


def find_modules(
    model: nn.Module, patterns: str | Iterable[str], setting: str
) -> dict[str, nn.Module]:
    """Return, by path, the modules whose path matches a pattern.

    Raises:
        ValueError: a pattern matches no module; the message begins with ``setting``.
    """
    named = model.named_modules(remove_duplicate=False)
    modules = {path: module for path, module in named if path}
    chosen: dict[str, nn.Module] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = {path: modules[path] for path in modules if fnmatchcase(path, pattern)}
        if not matches:
            hint = did_you_mean(pattern, [*modules])
            raise ValueError(f"{setting}: no module of the model has the path {pattern!r}{hint}")
        chosen |= matches
    return chosen


def compile_model(model: nn.Module, spec: CompileSpec = True) -> nn.Module:
    """Compile ``model`` by ``torch.compile``, in place, and return it.

    The names of parameters do not change. Compilation starts in the first forward.

    Args:
        spec: True, or a mapping with ``blocks`` (as for ``find_blocks``; default: the whole
            model) and arguments of ``torch.compile``: ``backend``, ``mode``, ``dynamic``,
            ``fullgraph``, ``options``. False compiles nothing, and neither does "step", which is
            a setting for ``compile_step``.

    Raises:
        ValueError: a name matches no module, or the backend or mode is unknown.
        TypeError: an option is unknown or has another type.
    """
    options = {k: value for k, value in (read_compile(spec) or {}).items() if k != "blocks"}
    for module in find_compiled(model, spec).values():
        module.compile(**options)
    return model


def find_compiled(model: nn.Module, spec: CompileSpec) -> dict[str, nn.Module]:
    """Return the modules to compile, by path; arguments and errors as for ``compile_model``."""
    options = read_compile(spec)
    if options is None or "step" in options:
        return {}
    backend, mode = options.get("backend", "inductor"), options.get("mode")
    if isinstance(backend, str):
        backends = torch.compiler.list_backends(exclude_tags=())
        if backend not in backends:
            hint = did_you_mean(backend, backends)
            raise ValueError(
                f"compile: backend must be one of {', '.join(backends)}, got {backend!r}{hint}"
            )
    if mode is not None:
        if backend != "inductor":
            raise ValueError(f"compile: mode is an option of inductor, not of {backend!r}")
        modes = list(torch._inductor.list_mode_options())
        if mode not in modes:
            hint = did_you_mean(mode, modes)
            raise ValueError(f"compile: mode must be one of {', '.join(modes)}, got {mode!r}{hint}")
    return find_blocks(model, options["blocks"]) if "blocks" in options else {"": model}


def read_compile(spec: Any) -> dict[str, Any] | None:
    """Return the options of ``compile``, including "step"; None if nothing is to be compiled.

    Raises:
        TypeError: an option is unknown or has another type.
    """
    if spec is None or isinstance(spec, bool):
        return {} if spec else None
    spec = {"step": True} if spec == "step" else spec
    if not isinstance(spec, Mapping):
        raise TypeError(f"compile must be true, false, step or options, got {spec!r}")
    options = {name: value for name, value in spec.items() if value is not None}
    of_step = any(name in _STEP_OPTIONS and name != "backend" for name in options)
    if of_step:
        check_options("compile: step", spec, _STEP_OPTIONS)
    else:
        check_options("compile", spec, _COMPILE_OPTIONS)
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
    """Checkpoint the activations of blocks, in place: recompute them in the backward.

    Only the inputs of each block are kept. Losses and gradients do not change; each block costs one
    more forward. A block becomes an instance of a subclass of its class, so names, attributes,
    ``isinstance``, copies and pickles work as before. Buffers, such as running statistics, change
    only in the first forward; the second one gets copies with the values that the first one saw.

    Args:
        spec: as for ``find_blocks``; or a mapping with such ``blocks`` and
            ``preserve_rng_state``: whether the second forward draws the same random numbers
            (default: True). False saves a little time; use it only without dropout.

    Raises:
        ValueError: a name matches no module, or ``forward`` of a block was replaced.
        TypeError: an option is unknown or has another type.
    """
    _, preserve = read_checkpointing(spec)
    for block in find_checkpointed(model, spec).values():
        kind: Any = type(block)
        if not issubclass(kind, _Checkpointed):
            block.__class__ = _checkpointed(kind, preserve)
    return model


def find_checkpointed(model: nn.Module, spec: CheckpointingSpec) -> dict[str, nn.Module]:
    """Return the chosen blocks, by path; arguments and errors as for ``checkpoint_activations``."""
    blocks = find_blocks(model, read_checkpointing(spec)[0])
    for path, block in blocks.items():
        if "forward" in vars(block):
            raise ValueError(
                f"activation checkpointing needs the forward of the class {type(block).__name__}, "
                f"but the forward of {path!r} was replaced by an attribute"
            )
    return blocks


def read_checkpointing(spec: Any) -> tuple[Any, bool]:
    """Return the blocks that ``spec`` names, as for ``find_blocks``, and ``preserve_rng_state``."""
    options = dict(spec) if isinstance(spec, Mapping) else {"blocks": spec}
    allowed = ["blocks", "preserve_rng_state", "classes", "min_params"]
    check_options("activation_checkpointing", options, allowed)
    preserve = options.pop("preserve_rng_state", True)
    if not isinstance(preserve, bool):
        raise TypeError(f"preserve_rng_state must be true or false, got {preserve!r}")
    blocks = options.pop("blocks", None)
    if blocks is not None and options:
        raise TypeError(
            f"activation_checkpointing must have blocks or {', '.join(options)}, got both"
        )
    if blocks is None and not options:
        raise TypeError("activation_checkpointing must name blocks, got none")
    return (options or blocks), preserve


class _Checkpointed(nn.Module):
    """The base class of all checkpointed blocks."""

    _made_from: tuple[type[nn.Module], bool]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        _, (_, *arguments), *state = reduced
        return (_new, (*self._made_from, *arguments), *state)


# Cached, so that all blocks of one class get the same subclass.
@functools.cache
def _checkpointed(kind: Any, preserve: bool) -> type[nn.Module]:
    """Return a subclass of ``kind`` whose forward runs again in the backward."""

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        # Bound here, because a keyword of the block may have the same name as one of checkpoint().
        call = functools.partial(run, **kwargs)
        owners = [module for module in self.modules() if module._buffers]
        norms = [module for module in owners if isinstance(module, _NormBase)]
        norms = [norm for norm in norms if norm.training and norm.track_running_stats]
        if norms:
            return _checkpoint_norms(self, norms, call, args, preserve)
        if owners:
            if not torch.compiler.is_compiling():
                return _checkpoint_with_buffers(self, call, args, preserve)
            if _recomputes():
                return _checkpoint_in_program(self, call, args, preserve)
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=preserve)

    namespace = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace |= {"_made_from": (kind, preserve), "forward": forward}
    bases = (_Checkpointed, kind)
    return types.new_class(kind.__name__, bases, exec_body=lambda body: body.update(namespace))


def _new(kind: Any, preserve: bool, *arguments: Any) -> Any:
    subclass: Any = _checkpointed(kind, preserve)
    return subclass.__new__(subclass, *arguments)


@uncompiled("a checkpointed block with running statistics runs outside of graphs")
def _checkpoint_norms(
    block: nn.Module,
    norms: Sequence[_NormBase],
    call: Callable[..., Any],
    args: Sequence[Any],
    preserve: bool,
) -> Any:
    for norm in norms:
        if isinstance(norm, SynchronizedBatchNorm) and norm._place is not None:
            raise RuntimeError(
                "a block with synchronised BatchNorm cannot be checkpointed under dp, whose "
                "copies do not communicate in the backward; choose smaller blocks, or ddp"
            )
    return _checkpoint_with_buffers(block, call, args, preserve)


def _checkpoint_with_buffers(
    block: nn.Module, call: Callable[..., Any], args: Sequence[Any], preserve: bool
) -> Any:
    """Checkpoint a call whose second forward must not change the buffers of ``block``."""
    buffers = _FirstBuffers(block)
    return checkpoint(
        call,
        *args,
        use_reentrant=False,
        preserve_rng_state=preserve,
        context_fn=lambda: (nullcontext(), buffers),
    )


def _checkpoint_in_program(
    block: nn.Module, call: Callable[..., Any], args: Sequence[Any], preserve: bool
) -> Any:
    """Checkpoint a call that is compiled.

    The compiled backward starts from the inputs of the program, among them buffers that the forward
    has changed. Therefore the call gets copies, and the buffers their values after it.
    """
    stores = [module._buffers for module in block.modules() if module._buffers]
    originals = [dict(store) for store in stores]
    for store in stores:
        for name, buffer in store.items():
            if type(buffer) is Tensor and not buffer.requires_grad:
                store[name] = _copy_buffer(buffer)
    output = checkpoint(call, *args, use_reentrant=False, preserve_rng_state=preserve)
    with torch.no_grad():
        for store, original in zip(stores, originals, strict=True):
            for name, buffer in original.items():
                changed = store[name]
                if type(buffer) is Tensor and not buffer.requires_grad and changed is not None:
                    store[name] = buffer.copy_(changed)
    return output


@contextmanager
def keeping_activations() -> Iterator[None]:
    """While a program is traced that keeps the activations of checkpointed blocks."""
    # Without it, Dynamo would guard the result, which is another one later.
    torch.compiler.assume_constant_result(_recomputes)  # type: ignore[no-untyped-call]
    _programs["recompute"] = False
    try:
        yield
    finally:
        _programs["recompute"] = True


# Whether the programs that are now traced recompute the activations of checkpointed blocks.
_programs = {"recompute": True}


def _recomputes() -> bool:
    return _programs["recompute"]


@torch.library.custom_op("stepwrap::copy_buffer", mutates_args=())
def _copy_buffer(buffer: Tensor) -> Tensor:
    """Copy a buffer; unlike a clone, the copy is not computed again in a compiled backward."""
    return buffer.clone()


@_copy_buffer.register_fake
def _(buffer: Tensor) -> Tensor:
    return torch.empty_like(buffer)


class _FirstBuffers:
    """A context in which a block has the buffers that it had when this object was created.

    They are replaced by copies, since the backward may need tensors that share their memory. The
    current buffers come back at the end.
    """

    def __init__(self, block: nn.Module) -> None:
        stores = [module._buffers for module in block.modules() if module._buffers]
        self._saved = [(store, _copy_buffers(store)) for store in stores]
        self._current: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._current = [dict(store) for store, _ in self._saved]
        for store, saved in self._saved:
            _replace_entries(store, _copy_buffers(saved))

    def __exit__(self, *error: object) -> None:
        for (store, _), current in zip(self._saved, self._current, strict=True):
            _replace_entries(store, current)


def _copy_buffers(buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    # A buffer with a gradient is a result of this forward; a copy would end its graph.
    return {
        name: buffer if buffer is None or buffer.requires_grad else buffer.clone()
        for name, buffer in buffers.items()
    }


def _replace_entries(store: dict[str, Tensor | None], entries: Mapping[str, Tensor | None]) -> None:
    store.clear()
    store.update(entries)
