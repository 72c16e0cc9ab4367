"""Layers of which every rank of a tensor group holds a part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import Tensor, nn
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
from ..torch_functions import check_options, refuse_double_backward
from .layout import split_models
from .local_parts import localise_parts, wait_for_output
from .mesh import Mesh

Style: TypeAlias = str | Mapping[str, Any] | ParallelStyle

STYLES = ("colwise", "rowwise", "sequence", "colwise_replicate_output")
_KINDS = (nn.Linear, nn.Embedding)
_DOUBLE = (
    "loses the parts that go through layers split over a tensor axis, because torch's collectives "
    "have a first derivative only; use ddp or a mesh without a tensor axis"
)
# Over which dimension of its weight a layer is split.
_SPLIT_DIMS = {
    (ColwiseParallel, nn.Linear): 0,
    (ColwiseParallel, nn.Embedding): 1,
    (RowwiseParallel, nn.Linear): 1,
    (RowwiseParallel, nn.Embedding): 0,
}
_SIZES = {
    (nn.Linear, 0): "out_features",
    (nn.Linear, 1): "in_features",
    (nn.Embedding, 0): "num_embeddings",
    (nn.Embedding, 1): "embedding_dim",
}


def parallelize(
    model: nn.Module, mesh: Mesh | DeviceMesh, plan: Mapping[str, Style], *, localise: bool = True
) -> nn.Module:
    """Split layers of ``model`` over the tensor axis of ``mesh``, in place.

    Every rank must call this, with the same weights outside of the plan. The layers then run by
    torch's ``parallelize_module``. Losses, gradients and updates stay those of the whole layers.

    A pair of layers, of which the first is split by columns and the second by rows, costs one
    ``all_reduce`` of the second one's output. What lies between them sees this rank's part of
    the features. In attention these must be whole heads, so the model views them as heads, with
    -1 for their number, before it tells query, key and value apart: a split of the fused
    output's columns in three would mix them up::

        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))   # the heads of this rank
        query, key, value = heads.permute(3, 0, 2, 1, 4)              # (batch, heads, time, size)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

        plan = {"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise"}

    Dropout between such layers draws the same mask for the parts of all ranks. A split layer's
    parameters can be used by its own ``forward`` alone.

    Before the first step of an ``OptimWrapper`` the ranks compare the gradients of the parameters
    that each of them holds whole: one that differs, as that of a norm outside of the plan between
    parts of the sequence, is an error that names it.

    Args:
        mesh: with a tensor axis; or torch's mesh of that axis.
        plan: by the path of a module, or an ``fnmatch`` pattern of paths, how it is split:
            "colwise" (its outputs), "rowwise" (its inputs), "colwise_replicate_output" (outputs
            put together again), "sequence" (a norm over a part of the sequence), or a mapping
            of such a ``type`` and its options: ``input`` and ``output``, "replicate" or
            "shard(dimension)", and ``local_output``; for sequence ``dim`` and ``local_output``.
            Or an object of torch's ``ParallelStyle``.
        localise: keep this rank's part as an ordinary parameter, that ``DistributedDataParallel``
            and every optimizer take, with its place as its attribute ``tensor_layout``. False
            leaves torch's DTensors, for ``fully_shard``.

    Raises:
        ValueError: what in the plan cannot be; the model is unchanged then.
        TypeError: a style is none.
    """
    tensor_mesh, size = _tensor_axis(mesh)
    styles = check_plan(model, plan, size)
    if tensor_mesh is None:
        return model
    before = [(one, name, value) for one in model.modules() for name, value in _own(one)]
    whole = list(model.parameters())
    for path, style in styles.items():
        layer = model.get_submodule(path)
        parallelize_module(layer, tensor_mesh, style)
        layer.register_forward_hook(wait_for_output)
        layer.register_forward_hook(_refuse_double_backward)
    _restore(before)
    if localise:
        localise_parts(model)
    _mark_replaced(whole, model)
    if size > 1:
        split_models[model] = tensor_mesh.get_group(), isinstance(mesh, Mesh)
    return model


def _refuse_double_backward(layer: nn.Module, inputs: Any, output: Any) -> None:
    refuse_double_backward(output, _DOUBLE)


def _mark_replaced(whole: list[nn.Parameter], model: nn.Module) -> None:
    """Mark the parameters that the model has no more: an optimizer that has them trains nothing."""
    present = {id(one) for one in model.parameters()}
    for one in whole:
        if id(one) not in present:
            one.is_replaced = True  # type: ignore[attr-defined]


def check_plan(
    model: nn.Module, plan: Mapping[str, Style], tensor_size: int
) -> dict[str, ParallelStyle]:
    """Return the style of every layer that is to be split, by path, and change nothing.

    Raises:
        ValueError: as for ``parallelize``, with all that is wrong.
    """
    problems: list[str] = []
    styles = _planned(model, plan, problems)
    for path, style in styles.items():
        problems += _layer_problems(path, model.get_submodule(path), style, tensor_size)
    problems += _tie_problems(model, styles)
    if problems:
        raise ValueError("; ".join(problems))
    return styles


def check_styles(plan: Mapping[str, Style]) -> dict[str, ParallelStyle]:
    """Return torch's style for every entry of a plan.

    Raises:
        ValueError: there is no such style, or an option has a wrong value.
        TypeError: a style is of another kind, or has no such option.
    """
    return {name: _style(name, spec) for name, spec in plan.items()}


def planned_layers(model: nn.Module, plan: Mapping[str, Style]) -> list[str]:
    """Paths of the modules that a plan names; mistakes in it are not checked."""
    return list(_planned(model, plan, []))


def row_split_tables(model: nn.Module, plan: Mapping[str, Style]) -> list[str]:
    """Paths of the embeddings of which a plan gives each rank some rows."""
    styles = _planned(model, plan, [])
    tables = {path for path, one in model.named_modules() if isinstance(one, nn.Embedding)}
    return [p for p, style in styles.items() if p in tables and isinstance(style, RowwiseParallel)]


def _tensor_axis(mesh: Mesh | DeviceMesh) -> tuple[DeviceMesh | None, int]:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"the mesh of the tensor axis must have one axis, got {mesh}")
        return mesh, mesh.size()
    if "tensor" not in mesh.axes:
        raise ValueError(
            f"tensor parallelism needs a tensor axis in the mesh, which has {', '.join(mesh.axes)}"
        )
    return mesh.tensor, mesh.tensor_size


def _planned(
    model: nn.Module, plan: Mapping[str, Style], problems: list[str]
) -> dict[str, ParallelStyle]:
    """Return the style of every module, by path and in module order."""
    modules = dict(model.named_modules())
    chosen: dict[str, tuple[str, ParallelStyle]] = {}
    for name, spec in plan.items():
        style = _style(name, spec)
        found = [path for path in modules if path and fnmatchcase(path, name)]
        found = [name] if name in modules else found
        if not found:
            hint = did_you_mean(name, filter(None, modules))
            problems.append(f"no module of the model has the path {name!r}{hint}")
        for path in found:
            if path in chosen:
                problems.append(f"{path!r} is matched by {chosen[path][0]!r} and by {name!r}")
            fixed = isinstance(spec, ParallelStyle) or "input" in spec
            if isinstance(modules[path], nn.Embedding) and not fixed:
                # torch takes the rows of a table for features that come split, which ids do not.
                style = _style(name, {**_options(name, spec), "input": "replicate"})
            chosen[path] = name, style
    return {path: chosen[path][1] for path in modules if path in chosen}


def _style(name: str, spec: Any) -> ParallelStyle:
    if isinstance(spec, ParallelStyle):
        return spec
    options = _options(name, spec)
    kind = options.pop("type", None)
    if kind not in STYLES:
        hint = did_you_mean(str(kind), STYLES)
        raise ValueError(f"{name}: there is no style {kind!r}, only {', '.join(STYLES)}{hint}")
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
    made = RowwiseParallel if kind == "rowwise" else ColwiseParallel
    return made(**layouts, use_local_output=local is not False)


def _options(name: str, spec: Any) -> dict[str, Any]:
    if not isinstance(spec, (str, Mapping)):
        raise TypeError(f"{name}: a style is a name or a mapping with a type, got {spec!r}")
    return {"type": spec} if isinstance(spec, str) else dict(spec)


def _placement(name: str, text: Any) -> Placement | None:
    if text is None or isinstance(text, Placement):
        return text
    if text == "replicate":
        return Replicate()
    match = re.fullmatch(r"shard\((-?\d+)\)", str(text))
    if match is None:
        raise ValueError(f"{name}: a layout is replicate or shard(dimension), got {text!r}")
    return Shard(int(match[1]))


def _layer_problems(path: str, module: nn.Module, style: ParallelStyle, size: int) -> Iterator[str]:
    """Yield what keeps a layer from being split in this way."""
    what = f"{path!r} is a {type(module).__name__}"
    if any(_is_split(value) for value in module.parameters()):
        yield f"{path!r} is split already"
    elif isinstance(style, SequenceParallel):
        if any(True for child in module.children() for _ in child.parameters()):
            yield f"{what} with layers inside; sequence takes a single layer"
    elif isinstance(style, (ColwiseParallel, RowwiseParallel)):
        named = "colwise" if isinstance(style, ColwiseParallel) else "rowwise"
        if not isinstance(module, _KINDS):
            yield f"{what}; {named} splits Linear and Embedding"
            return
        dim = _split_dim(module, style)
        length = module.weight.shape[dim or 0]
        if length % size:
            kind = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
            given = f"{_SIZES[kind, dim or 0]}={length}"
            yield f"{what} with {given}, of which {size} ranks cannot hold equal parts"


def _split_dim(module: nn.Module, style: ParallelStyle) -> int | None:
    """Over which dimension the weight is split; None when it is not, or torch alone knows."""
    for (styles, kind), dim in _SPLIT_DIMS.items():
        if isinstance(style, styles) and isinstance(module, kind):
            return dim
    return None


def _tie_problems(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> Iterator[str]:
    """Yield the parameters that several layers have and would no longer share."""
    owners: dict[int, list[tuple[str, int | None]]] = {}
    for path, module in model.named_modules():
        style = styles.get(path)
        for name, value in _own(module):
            dim = None if style is None else _split_dim(module, style)
            owners.setdefault(id(value), []).append((f"{path}.{name}", dim))
    for shared in owners.values():
        dims = {dim for _, dim in shared}
        planned = any(name.rpartition(".")[0] in styles for name, _ in shared)
        if len(shared) > 1 and planned and (len(dims) > 1 or dims == {None}):
            names = " and ".join(name for name, _ in shared)
            yield f"{names} are one parameter and must be split over the same dimension"


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, value) for name, value in module._parameters.items() if value is not None)


def _is_split(value: Tensor) -> bool:
    return isinstance(value, DTensor) or hasattr(value, "tensor_layout")


def _restore(before: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Give the new parameters what the old ones had, and to all owners of one the same."""
    made: dict[int, nn.Parameter] = {}
    for module, name, old in before:
        new = module._parameters[name]
        assert new is not None
        if new is not old:
            new.requires_grad_(old.requires_grad)
            new.__dict__.update(old.__dict__)
            module._parameters[name] = made.setdefault(id(old), new)
