"""What is done to a model before it is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ..registry import did_you_mean
from .blocks.activation_checkpointing import (
    CheckpointingSpec,
    checkpoint_activations,
    find_checkpointed,
    read_checkpointing,
)
from .blocks.compiling import CompileSpec, compile_model, find_compiled, read_compile
from .sharding.mesh import Mesh

if TYPE_CHECKING:
    from .sharding.tensor_parallel import Style


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is to be done to a model before it is wrapped.

    Attributes:
        freeze: what ``freeze_parameters`` takes.
        tensor_parallel: the plan that ``parallelize`` takes.
        activation_checkpointing: what ``checkpoint_activations`` takes.
        compile: what ``compile_model`` takes.
    """

    freeze: Iterable[str] = ()
    tensor_parallel: Mapping[str, Style] | None = None
    activation_checkpointing: CheckpointingSpec | None = None
    compile: CompileSpec = False


def check_preparation(preparation: Preparation) -> list[tuple[str, str]]:
    """Return what is wrong with a preparation for any model, each as key path and problem."""
    checks: dict[str, Callable[[], object]] = {}
    if preparation.activation_checkpointing is not None:
        blocks = preparation.activation_checkpointing
        checks["activation_checkpointing"] = lambda: read_checkpointing(blocks)
    checks["compile"] = lambda: read_compile(preparation.compile)
    problems = [
        (key, str(error)) for key, check in checks.items() if (error := _raised(check)) is not None
    ]
    for name, style in (preparation.tensor_parallel or {}).items():
        # Where nothing is split, what that needs of torch is not imported.
        from .sharding.tensor_parallel import check_styles

        error = _raised(partial(check_styles, {name: style}))
        if error is not None:
            problems.append((f"tensor_parallel.plan.{name}", str(error)))
    return problems


def model_checks(
    model: nn.Module, preparation: Preparation, tensor_size: int
) -> dict[str, Callable[[], object]]:
    """Return what raises where a preparation does not fit ``model``, by key path."""
    checks: dict[str, Callable[[], object]] = {
        "freeze": lambda: find_parameters(model, preparation.freeze)
    }
    plan = preparation.tensor_parallel
    if plan is not None:
        from .sharding.tensor_parallel import check_plan

        checks["tensor_parallel.plan"] = lambda: check_plan(model, plan, tensor_size)
    blocks = preparation.activation_checkpointing
    if blocks is not None:
        checks["activation_checkpointing"] = lambda: find_checkpointed(model, blocks)
    checks["compile"] = lambda: _check_compiled(model, preparation)
    return checks


def _check_compiled(model: nn.Module, preparation: Preparation) -> None:
    compiled = find_compiled(model, preparation.compile)
    inside = {id(part) for one in compiled for part in one.modules()}
    if not inside or not preparation.tensor_parallel:
        return
    from .sharding.tensor_parallel import row_split_tables

    for path in row_split_tables(model, preparation.tensor_parallel):
        if id(model.get_submodule(path)) in inside:
            raise ValueError(
                f"torch cannot compile the table {path!r}, which is split by rows; compile the "
                "blocks without it, or split it colwise_replicate_output"
            )


def _raised(check: Callable[[], object]) -> Exception | None:
    try:
        check()
    except (TypeError, ValueError) as error:
        return error
    return None


def freeze_parameters(model: nn.Module, patterns: str | Iterable[str]) -> list[str]:
    """Let parameters require no gradient; returns their names.

    Args:
        patterns: as for ``find_parameters``.

    Raises:
        ValueError: something matches nothing.
    """
    found = find_parameters(model, patterns)
    for parameter in found.values():
        parameter.requires_grad_(False)
    return list(found)


def find_parameters(model: nn.Module, patterns: str | Iterable[str]) -> dict[str, nn.Parameter]:
    """Parameters that ``patterns`` name, by name.

    Args:
        patterns: names of parameters or paths of modules, whose parameters are meant, or
            ``fnmatch`` patterns of either.

    Raises:
        ValueError: something matches nothing.
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
                f"freeze: no parameter of the model has the name or path {pattern!r}{hint}"
            )
        chosen += found
    return {name: parameters[name] for name in chosen}


def split_layers(
    model: nn.Module, preparation: Preparation, mesh: Mesh | None, *, localise: bool
) -> nn.Module:
    """Make the preparation's layers tensor parallel; every rank must call this.

    Raises:
        ValueError: there is a plan and no tensor axis, or an axis and no plan; or as
            ``parallelize``.
    """
    plan = preparation.tensor_parallel
    wide = mesh is not None and mesh.tensor_size > 1
    if plan is None:
        if wide:
            raise ValueError("the mesh has a tensor axis, and no tensor_parallel plan uses it")
        return model
    if mesh is None:
        raise ValueError("tensor_parallel needs a mesh with a tensor axis")
    from .sharding.tensor_parallel import parallelize

    return parallelize(model, mesh, plan, localise=localise)


def chosen_blocks(model: nn.Module, preparation: Preparation) -> dict[str, Any]:
    """What the preparation comes down to for ``model``, to be compared with that of others."""
    plan, spec = preparation.tensor_parallel, preparation.activation_checkpointing
    compiled = {id(one) for one in find_compiled(model, preparation.compile)}
    return {
        "tensor_parallel": None if plan is None else sorted(map(_told, plan.items())),
        "activation_checkpointing": None if spec is None else list(find_checkpointed(model, spec)),
        "compile": [path for path, one in model.named_modules() if id(one) in compiled],
    }


def _told(entry: tuple[str, Any]) -> tuple[str, str]:
    name, style = entry
    # The text of an object of torch's names its place in memory.
    return name, str(style) if isinstance(style, (str, Mapping)) else type(style).__name__


def split_paths(model: nn.Module, preparation: Preparation) -> list[str]:
    """Paths of the modules that the plan names; mistakes in it are not checked."""
    if not preparation.tensor_parallel:
        return []
    from .sharding.tensor_parallel import planned_layers

    return planned_layers(model, preparation.tensor_parallel)


def shape_blocks(model: nn.Module, preparation: Preparation) -> nn.Module:
    """Checkpoint activations, then compile, as the preparation says."""
    if preparation.activation_checkpointing is not None:
        checkpoint_activations(model, preparation.activation_checkpointing)
    _check_compiled(model, preparation)
    return compile_model(model, preparation.compile)


def prepare_model(
    model: nn.Module, preparation: Preparation, mesh: Mesh | None = None, *, localise: bool = True
) -> nn.Module:
    """Do to ``model``, in place, what the preparation says: freeze, split, checkpoint, compile.

    Every rank must call this. The weights must be the same on all ranks; ``wrap_model`` sees to
    that itself.

    Args:
        mesh: needed for ``tensor_parallel``.
        localise: as for ``parallelize``.
    """
    freeze_parameters(model, preparation.freeze)
    split_layers(model, preparation, mesh, localise=localise)
    return shape_blocks(model, preparation)
