"""Split layers over a tensor group, in which each rank holds a part of every split layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ...registry import did_you_mean
from ..layout import get_layout, is_dtensor_or_localised, local_part, split_models
from ..torch_functions import check_options, refuse_double_backward
from .mesh import Mesh
from .split_random import as_whole, mark_split, prepare_dtensors, split_kind

Style: TypeAlias = str | Mapping[str, Any] | ParallelStyle

# "colwise": split the layer by its output features.
# "rowwise": split the layer by its input features.
# "sequence": do not split the layer; split its inputs along the sequence.
# "colwise_replicate_output": like "colwise", but gather the outputs afterwards.
STYLES = ("colwise", "rowwise", "sequence", "colwise_replicate_output")
# The id of the hook that restores local parts; torch's own ids start at 0.
_RESTORE_HOOK_ID = -1
_DOUBLE = (
    "would be wrong for layers that are split over a tensor axis, because torch's collectives "
    "have only a first derivative; use ddp, or a mesh without a tensor axis"
)
# The dimension of the weight that is split, and the argument of the layer with its size.
_SPLITS = {
    (ColwiseParallel, nn.Linear): (0, "out_features"),
    (ColwiseParallel, nn.Embedding): (1, "embedding_dim"),
    (RowwiseParallel, nn.Linear): (1, "in_features"),
    (RowwiseParallel, nn.Embedding): (0, "num_embeddings"),
}


def parallelize(
    model: nn.Module, mesh: Mesh | DeviceMesh, plan: Mapping[str, Style], *, localise: bool = True
) -> nn.Module:
    """Split layers of ``model`` over the tensor axis of ``mesh``, in place.

    Every rank must call this, with the same weights in the layers that are not in the plan. The
    layers are split with torch's ``parallelize_module``; losses, gradients and updates stay the
    same. Random functions on split activations draw other numbers on each rank; on whole
    activations, ranks with the same random state draw the same. Only the ``forward`` of a split
    layer may use its parameters. docs/wrappers.md has an example of attention.

    Before the first update of an ``OptimWrapper``, the ranks compare the gradients of parameters
    that are not split, and raise if they differ. This happens, for example, if the plan lacks a
    norm.

    Args:
        model: the model, which is changed in place and returned.
        mesh: a mesh with a tensor axis, or torch's mesh of this axis.
        plan: a style for each path of a module, or ``fnmatch`` pattern for paths. A style is
            "colwise", "rowwise", "sequence", "colwise_replicate_output", a ``ParallelStyle`` of
            torch, or a mapping whose ``type`` is one of these names. The mapping can have the
            options ``input`` and ``output``, each "replicate" or "shard(dimension)", and
            ``local_output``; for "sequence" it can have ``dim`` and ``local_output``.
        localise: whether to keep this rank's part as an ordinary parameter with an attribute
            ``tensor_layout``, which ``DistributedDataParallel`` and all optimizers support. False
            keeps torch's DTensors, for ``fully_shard``.

    Raises:
        ValueError: the plan does not fit the model or the mesh; the model is then unchanged.
        TypeError: a style or an option has the wrong type.
    """
    axis, size = _tensor_axis(mesh)
    styles = check_plan(model, plan, size)
    if axis is not None:
        _split(model, axis, styles, localise)
        if size > 1:
            split_models[model] = axis.get_group(), isinstance(mesh, Mesh)
    return model


def _split(
    model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle], localise: bool
) -> None:
    before = [
        (module, name, value) for module in model.modules() for name, value in _parameters(module)
    ]
    for path, style in styles.items():
        layer = model.get_submodule(path)
        # Before the hooks of torch, which would return results of split inputs as split.
        layer.register_forward_pre_hook(_take_whole)
        parallelize_module(layer, mesh, style)
        layer.register_forward_hook(_finish)
        if mesh.size() > 1:
            _separate_draws(layer, mesh, style)
    _keep_attributes(before)
    if localise:
        _localise_parts(model)
    present = {id(param) for param in model.parameters()}
    for _, _, previous in before:
        if id(previous) not in present:
            # Marked, so that an optimizer that was given the old parameter can raise an error.
            previous.is_replaced = True  # type: ignore[attr-defined]


def check_plan(
    model: nn.Module, plan: Mapping[str, Style], tensor_size: int
) -> dict[str, ParallelStyle]:
    """Return the style of every split layer, by path.

    Raises:
        ValueError: the plan does not fit the model; the message lists all problems.
        TypeError: a style or an option has the wrong type.
    """
    problems: list[str] = []
    styles = _planned(model, plan, problems)
    for path, style in styles.items():
        problems += _layer_problems(path, model.get_submodule(path), style, tensor_size)
    problems += _tie_problems(model, styles)
    if problems:
        raise ValueError("; ".join(problems))
    return styles


def planned_layers(
    model: nn.Module, plan: Mapping[str, Style], kind: type[ParallelStyle] = ParallelStyle
) -> dict[str, nn.Module]:
    """Return the modules with a style of class ``kind``, by path, without checking the plan."""
    styles = _planned(model, plan, [])
    return {k: model.get_submodule(k) for k, style in styles.items() if isinstance(style, kind)}


def _tensor_axis(mesh: Mesh | DeviceMesh) -> tuple[DeviceMesh | None, int]:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"the mesh of the tensor axis must have one axis, got {mesh}")
        return mesh, mesh.size()
    if "tensor" not in mesh.axes:
        raise ValueError(
            f"tensor parallelism needs a mesh with a tensor axis, got {', '.join(mesh.axes)}"
        )
    return mesh.tensor, mesh.tensor_size


def _planned(
    model: nn.Module, plan: Mapping[str, Style], problems: list[str]
) -> dict[str, ParallelStyle]:
    """Return the style of every planned module, by path, in module order."""
    modules = dict(model.named_modules())
    chosen: dict[str, tuple[str, ParallelStyle]] = {}
    for name, spec in plan.items():
        style = read_style(name, spec)
        paths = [path for path in modules if path and fnmatchcase(path, name)]
        paths = [name] if name in modules else paths
        if not paths:
            hint = did_you_mean(name, filter(None, modules))
            problems.append(f"no module of the model has the path {name!r}{hint}")
        for path in paths:
            if path in chosen:
                problems.append(f"{path!r} is matched by {chosen[path][0]!r} and by {name!r}")
            fixed = isinstance(spec, ParallelStyle) or "input" in spec
            if isinstance(modules[path], nn.Embedding) and not fixed:
                # torch's default for rowwise layers is split inputs, but token ids are not split.
                style = read_style(name, {**_options(name, spec), "input": "replicate"})
            chosen[path] = name, style
    return {path: chosen[path][1] for path in modules if path in chosen}


def read_style(name: str, spec: Any) -> ParallelStyle:
    """Return torch's style for the entry ``name`` of a plan; errors as in ``parallelize``."""
    if isinstance(spec, ParallelStyle):
        return spec
    options = _options(name, spec)
    kind = options.pop("type", None)
    if kind not in STYLES:
        hint = did_you_mean(str(kind), STYLES)
        raise ValueError(f"{name}: a style must be one of {', '.join(STYLES)}, got {kind!r}{hint}")
    local = options.get("local_output")
    if local is not None and not isinstance(local, bool):
        raise TypeError(f"{name}: local_output must be true or false, got {local!r}")
    if kind == "sequence":
        check_options(f"{name}: sequence", options, ["dim", "local_output"])
        return SequenceParallel(sequence_dim=options.get("dim", 1), use_local_output=bool(local))
    if kind == "colwise_replicate_output":
        options.setdefault("output", "replicate")
    check_options(f"{name}: {kind}", options, ["input", "output", "local_output"])
    layouts = {f"{key}_layouts": _placement(name, options.get(key)) for key in ("input", "output")}
    style = RowwiseParallel if kind == "rowwise" else ColwiseParallel
    return style(**layouts, use_local_output=local is not False)


def _options(name: str, spec: Any) -> dict[str, Any]:
    if not isinstance(spec, (str, Mapping)):
        raise TypeError(f"{name}: a style must be a name or a mapping with a type, got {spec!r}")
    return {"type": spec} if isinstance(spec, str) else dict(spec)


def _placement(name: str, text: Any) -> Placement | None:
    if text is None or isinstance(text, Placement):
        return text
    if text == "replicate":
        return Replicate()
    if match := re.fullmatch(r"shard\((-?\d+)\)", str(text)):
        return Shard(int(match[1]))
    raise ValueError(f"{name}: a layout must be replicate or shard(dimension), got {text!r}")


def _layer_problems(path: str, module: nn.Module, style: ParallelStyle, size: int) -> Iterator[str]:
    """Yield the reasons why a layer cannot be split in this style."""
    layer_text = f"{path!r} is a {type(module).__name__}"
    if any(map(is_dtensor_or_localised, module.parameters())):
        yield f"{path!r} is split already"
    elif isinstance(style, SequenceParallel):
        if any(True for child in module.children() for _ in child.parameters()):
            yield f"{layer_text} that contains layers; sequence needs a single layer"
    elif isinstance(style, (ColwiseParallel, RowwiseParallel)):
        named = "colwise" if isinstance(style, ColwiseParallel) else "rowwise"
        dim, argument = _find_split(module, style)
        if dim is None:
            yield f"{layer_text}; {named} can split only Linear and Embedding"
        elif (length := module.weight.shape[dim]) % size:  # type: ignore[index]
            yield f"{layer_text} with {argument}={length}, which {size} ranks cannot split evenly"


def _find_split(module: nn.Module, style: ParallelStyle | None) -> tuple[int | None, str]:
    """Return the entry of ``_SPLITS`` for a layer; (None, "") if there is none."""
    for (styles, kind), split in _SPLITS.items():
        if isinstance(style, styles) and isinstance(module, kind):
            return split
    return None, ""


def _tie_problems(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> Iterator[str]:
    """Yield the tied parameters that would no longer be shared."""
    owners: dict[int, list[tuple[str, int | None]]] = {}
    for path, module in model.named_modules():
        dim, _ = _find_split(module, styles.get(path))
        for name, value in _parameters(module):
            owners.setdefault(id(value), []).append((f"{path}.{name}", dim))
    for shared in owners.values():
        dims = {dim for _, dim in shared}
        planned = any(name.rpartition(".")[0] in styles for name, _ in shared)
        if len(shared) > 1 and planned and (len(dims) > 1 or dims == {None}):
            names = " and ".join(name for name, _ in shared)
            yield f"{names} are one parameter and must be split over the same dimension"


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False, remove_duplicate=False)


def _keep_attributes(before: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Copy attributes of old parameters to the new ones; tie new parameters like the old ones."""
    replaced: dict[int, nn.Parameter] = {}
    for module, name, previous in before:
        current = module._parameters[name]
        assert current is not None
        if current is not previous:
            current.requires_grad_(previous.requires_grad)
            current.__dict__.update(previous.__dict__)
            module._parameters[name] = replaced.setdefault(id(previous), current)


class _DTensorsInForward:
    """Replace the local parts of a layer by DTensors during its forward, through two hooks.

    Args:
        specs: for each name of a parameter or buffer, the mesh, placements, shape and stride of the
            whole tensor.
        localised: the parts that have a ``tensor_layout``.
    """

    def __init__(self, specs: dict[str, tuple[Any, ...]], localised: list[Tensor]) -> None:
        self._specs = specs
        self._localised = localised
        self._parts: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _DTensorsInForward:
        """Return hooks for a copy of the layer."""
        localised: list[Any] = deepcopy(self._localised, memo)
        for original, copied in zip(self._localised, localised, strict=True):
            # deepcopy does not copy attributes of parameters.
            copied.tensor_layout = get_layout(original)
        return _DTensorsInForward(self._specs, localised)

    def replace(self, layer: nn.Module, inputs: Any) -> None:
        """Replace the parts before the forward."""
        for name, (mesh, placements, shape, stride) in self._specs.items():
            store = _store(layer, name)
            local_param = store[name]
            if not isinstance(local_param, DTensor):
                self._parts[name] = local_param
                # torch 2.11 fails for parts that require gradients if grad mode is off.
                local = local_param if torch.is_grad_enabled() else local_param.detach()
                store[name] = DTensor.from_local(
                    local, mesh, placements, run_check=False, shape=shape, stride=stride
                )

    def restore(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        """Restore the parts after the forward, even after an error."""
        for name, local_param in self._parts.items():
            _store(layer, name)[name] = local_param
        self._parts = {}


class _Waited(torch.autograd.Function):
    """Wait for a tensor whose collective has not completed, as an autograd node."""

    @staticmethod
    def forward(ctx: Any, output: AsyncCollectiveTensor) -> Any:
        return output.trigger_wait()  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _finish(layer: nn.Module, inputs: Any, output: Any) -> Any:
    # Waits here. A compiled block after this layer returns its gradient as a plain tensor, and the
    # backward of an unfinished tensor does not accept plain tensors.
    if type(output) is AsyncCollectiveTensor:
        output = _Waited.apply(output)  # type: ignore[no-untyped-call]
    refuse_double_backward(output, _DOUBLE)
    return output


def _take_whole(layer: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return tuple(map(as_whole, inputs))


def _separate_draws(layer: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Let each rank draw other random numbers for its part of the layer's output."""
    if not getattr(style, "use_local_output", True):
        prepare_dtensors(mesh)
        return
    layouts: Any = getattr(style, "output_layouts", getattr(style, "sequence_sharding", ()))
    layouts = layouts if isinstance(layouts, tuple) else (layouts,)
    if any(isinstance(layout, Shard) for layout in layouts):
        layer.register_forward_hook(_marker(mesh.get_local_rank(), mesh.size()))


# Cached, because torch.compile would compile equal layers with different hooks again.
@cache
def _marker(rank: int, size: int) -> Callable[[nn.Module, Any, Any], None]:
    kind = split_kind(rank, size)

    def mark(layer: nn.Module, inputs: Any, output: Any) -> None:
        # The compiler cannot pass tensors of this class from one graph to the next.
        if not torch.compiler.is_compiling():
            mark_split(output, kind)

    return mark


def _store(layer: nn.Module, name: str) -> MutableMapping[str, Any]:
    return layer._parameters if name in layer._parameters else layer._buffers


def _localise_parts(model: nn.Module) -> None:
    """Replace all DTensors in the model by this rank's parts."""
    locals_: dict[int, Tensor] = {}
    for layer in list(model.modules()):
        specs: dict[str, tuple[Any, ...]] = {}
        for store in (layer._parameters, layer._buffers):
            for name, value in store.items():
                if isinstance(value, DTensor):
                    mesh, placements = value.device_mesh, value.placements
                    specs[name] = mesh, placements, value.shape, value.stride()
                    store[name] = locals_.setdefault(id(value), _local(value))  # type: ignore[assignment]
        if specs:
            local_params = [_store(layer, name)[name] for name in specs]
            hooks_of = _DTensorsInForward(
                specs, [param for param in local_params if hasattr(param, "tensor_layout")]
            )
            layer.register_forward_pre_hook(hooks_of.replace, prepend=True)
            handle = layer.register_forward_hook(hooks_of.restore, always_call=True)
            # All layers get the same hook id, because torch.compile guards on it: with different
            # ids it would compile each of several equal blocks again, up to its limit.
            for hooks in (layer._forward_hooks, layer._forward_hooks_always_called):
                hooks[_RESTORE_HOOK_ID] = hooks.pop(handle.id)  # type: ignore[assignment]


def _local(placed: DTensor) -> Tensor:
    local: Any = local_part(placed.detach())
    if isinstance(placed, nn.Parameter):
        attributes = {name: value for name, value in vars(placed).items() if name != "_is_param"}
        local = nn.Parameter(local, requires_grad=placed.requires_grad)
        local.__dict__.update(attributes)
    if (layout := get_layout(placed)).sharded_over:
        local.tensor_layout = layout
    return local  # type: ignore[no-any-return]
