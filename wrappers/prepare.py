"""The preparation of a model before it is wrapped: freeze, split, checkpoint, compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from .blocks import (
    CheckpointingSpec,
    CompileSpec,
    checkpoint_activations,
    compile_model,
    find_checkpointed,
    find_compiled,
    find_parameters,
    read_checkpointing,
    read_compile,
)
from .sharding.mesh import Mesh

if TYPE_CHECKING:
    from .sharding.tensor_parallel import Style

# The functions below import sharding.tensor_parallel lazily: it loads large parts of torch, and
# only a model with a tensor-parallel plan needs it.


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Settings for the preparation of a model before it is wrapped.

    Attributes:
        freeze: the patterns for ``freeze_parameters``.
        tensor_parallel: the plan for ``parallelize``.
        activation_checkpointing: the blocks for ``checkpoint_activations``.
        compile: the options for ``compile_model`` or ``compile_step``.
    """

    freeze: Iterable[str] = ()
    tensor_parallel: Mapping[str, Style] | None = None
    activation_checkpointing: CheckpointingSpec | None = None
    compile: CompileSpec = False


def check_preparation(preparation: Preparation) -> list[tuple[str, str]]:
    """Return problems that do not depend on the model, as pairs of key path and text."""
    checks: dict[str, Callable[[], object]] = {
        "compile": partial(read_compile, preparation.compile)
    }
    if (blocks := preparation.activation_checkpointing) is not None:
        checks["activation_checkpointing"] = partial(read_checkpointing, blocks)
    for name, style in (preparation.tensor_parallel or {}).items():
        from .sharding.tensor_parallel import read_style

        checks[f"tensor_parallel.plan.{name}"] = partial(read_style, name, style)
    problems = []
    for key, check in checks.items():
        try:
            check()
        except (TypeError, ValueError) as error:
            problems.append((key, str(error)))
    return problems


def model_checks(
    model: nn.Module, preparation: Preparation, tensor_size: int
) -> dict[str, Callable[[], object]]:
    """Return a check for each setting, by key path; it raises if ``model`` does not fit.

    A check returns a value that must be the same on all ranks.
    """
    plan, blocks = preparation.tensor_parallel, preparation.activation_checkpointing
    return {
        "freeze": lambda: list(find_parameters(model, preparation.freeze, "freeze")),
        "tensor_parallel.plan": lambda: _check_plan(model, plan, tensor_size),
        "activation_checkpointing": lambda: (
            None if blocks is None else list(find_checkpointed(model, blocks))
        ),
        "compile": lambda: list(_check_compiled(model, preparation, tensor_size)),
    }


def _check_plan(model: nn.Module, plan: Mapping[str, Style] | None, tensor_size: int) -> Any:
    if plan is None:
        return None
    from .sharding.tensor_parallel import check_plan

    check_plan(model, plan, tensor_size)
    # Styles are compared by type name, because the repr of torch's objects contains their address.
    return sorted(
        (name, str(style) if isinstance(style, (str, Mapping)) else type(style).__name__)
        for name, style in plan.items()
    )


def _check_compiled(
    model: nn.Module, preparation: Preparation, tensor_size: int
) -> dict[str, nn.Module]:
    """Return the modules to compile; raise ValueError if they cannot be compiled."""
    compiled = find_compiled(model, preparation.compile)
    inside = {id(child) for block in compiled.values() for child in block.modules()}
    if inside and preparation.tensor_parallel:
        from torch.distributed.tensor.parallel import RowwiseParallel

        from .sharding.split_random import dropout_layers
        from .sharding.tensor_parallel import planned_layers

        rowwise = planned_layers(model, preparation.tensor_parallel, RowwiseParallel)
        for path, layer in rowwise.items():
            if isinstance(layer, nn.Embedding) and id(layer) in inside:
                raise ValueError(
                    f"torch cannot compile the embedding {path!r}, which is split by rows; compile "
                    "only blocks without it, or give it the style colwise_replicate_output"
                )
        for path, block in compiled.items() if tensor_size > 1 else ():
            for name in dropout_layers(block):
                raise ValueError(
                    f"dropout in {'.'.join(filter(None, (path, name))) or 'the model'!r} would "
                    "draw the same mask on all ranks of a tensor group, because a compiled block "
                    "has one random stream; set its rate to 0, compile only blocks without "
                    "dropout, or do not compile"
                )
    return compiled


def freeze_parameters(model: nn.Module, patterns: str | Iterable[str]) -> list[str]:
    """Set ``requires_grad`` of parameters to False; return their names.

    Args:
        patterns: names of parameters, paths of modules (for all their parameters), or ``fnmatch``
            patterns for either.

    Raises:
        ValueError: a pattern matches nothing.
    """
    matches = find_parameters(model, patterns, "freeze")
    for parameter in matches.values():
        parameter.requires_grad_(False)
    return list(matches)


def split_parameters(model: nn.Module, preparation: Preparation) -> list[nn.Parameter]:
    """Return the parameters of the modules in the plan, without checking the plan."""
    if not preparation.tensor_parallel:
        return []
    from .sharding.tensor_parallel import planned_layers

    layers = planned_layers(model, preparation.tensor_parallel).values()
    return [param for layer in layers for param in layer.parameters()]


def prepare_model(
    model: nn.Module, preparation: Preparation, mesh: Mesh | None = None, *, localise: bool = True
) -> nn.Module:
    """Freeze, split, checkpoint and compile ``model`` in place, and return it.

    Every rank must call this with the same weights, which ``wrap_model`` ensures.

    Args:
        mesh: required for ``tensor_parallel``.
        localise: as for ``parallelize``.

    Raises:
        ValueError: there is a plan but no tensor axis, or a tensor axis but no plan, or a setting
            does not fit the model.
    """
    freeze_parameters(model, preparation.freeze)
    plan = preparation.tensor_parallel
    if plan is None and mesh is not None and mesh.tensor_size > 1:
        raise ValueError("the mesh has a tensor axis, but no tensor_parallel plan uses it")
    if plan is not None:
        if mesh is None:
            raise ValueError("tensor_parallel needs a mesh with a tensor axis")
        from .sharding.tensor_parallel import parallelize

        parallelize(model, mesh, plan, localise=localise)
    if preparation.activation_checkpointing is not None:
        checkpoint_activations(model, preparation.activation_checkpointing)
    tensor_size = 1 if plan is None or mesh is None else mesh.tensor_size
    compiled = _check_compiled(model, preparation, tensor_size)
    compile_model(model, preparation.compile)
    if compiled and tensor_size > 1:
        from .sharding.split_random import pass_whole_inputs

        for block in compiled.values():
            untyped: Any = block
            untyped._compiled_call_impl = pass_whole_inputs(untyped._compiled_call_impl)
    return model
