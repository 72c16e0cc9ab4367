"""Check the first update: there must be gradients, and they must be the same on all ranks.

With a fused optimizer, gradients and state must also have the memory layout of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.optim import Optimizer

from ...collectives import all_gather_object, comm_device
from ...primitives.tensor_bits import widest_float
from ..features import model_features
from ..layout import get_layout, get_parameters, is_dtensor, local_part, split_models
from ..steps.step_checks import DifferentGradientsError, averaging_wrappers, has_custom_step
from ..unwrap import plain_name, user_model
from .gates import NO_GATE, Gate
from .optimizer_fit import align_fused_state, check_fused_gradients

# Number of elements that are converted to fp64 at a time.
_BLOCK = 2**16
_ADVICE = (
    "Only the first backward after a call of the wrapper or, under separate, of a child averages "
    "gradients: the forward must run through wrapper(...), or self(...) in its train_step. A "
    "forward of wrapper.module, of its layers or by its methods does not average them, and neither "
    "does a second backward or torch.autograd.grad. Add up the losses of one call, call again "
    "before each backward, or use wrapper.average(gradient)"
)


class FirstUpdate(Gate):
    """Check the gradients of the first update, then remove this gate from the optimizer wrapper.

    A forward that does not call the wrapper, a custom step with a second backward or
    ``torch.autograd.grad``, or a layer that is missing in a tensor-parallel plan, can make the
    gradients differ between ranks. Nothing else reports this.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_reached = False
        self._model: Any = None

    def enter(self, model: Any) -> None:
        """Remember ``model`` if it is a wrapper with a custom step that averages gradients."""
        if model_features(model).averages_ranks and has_custom_step(model):
            self._model = model

    begin = enter

    def allows(self, optim_wrapper: Any) -> bool:
        """Raise RuntimeError if gradients are missing or differ; once all agree, remove the gate.

        Every rank that shares gradients must call this.
        """
        if self._passes(optim_wrapper.inner_count > optim_wrapper.resumed_at):
            optim_wrapper.gates.first_update = NO_GATE
            self._model = None
        return True

    def _passes(self, has_run: bool) -> bool:
        parameters = list(get_parameters(self._optimizer))
        if not self._is_reached:
            name = type(self._optimizer).__name__
            if not (_is_reached(parameters, name, has_run) and _compare_tensor_ranks(parameters)):
                return False
            check_fused_gradients(self._optimizer)
            align_fused_state(self._optimizer)
            self._is_reached = True
        # Infinite gradients hide differences, so in that case the next update is checked again.
        return compare_gradients(self._optimizer, self._model)


class SameParameters(Gate):
    """Compare at some updates which sharded parameters have a gradient on each rank.

    FSDP2 gathers and reduces the parameters of a module as one message. If the ranks use different
    parameters whose messages have the same size, it mixes their weights and gradients.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._model: Any = None
        self._updates = 0

    def enter(self, model: Any) -> None:
        self._model = model

    def allows(self, optim_wrapper: Any) -> bool:
        """Raise RuntimeError if the ranks differ; all ranks that share parameters must call this.

        The first three updates are compared, and then each hundredth.
        """
        self._updates += 1
        if self._updates <= 3 or self._updates % 100 == 0:
            compare_used_parameters(self._optimizer, self._model)
        return True


def compare_used_parameters(optimizer: Optimizer, model: Any = None) -> None:
    """Compare which sharded parameters have a gradient; all ranks that share them must call this.

    Args:
        optimizer: its sharded parameters are compared.
        model: the model, for the names in the error.

    Raises:
        RuntimeError: a parameter has a gradient on some ranks only.
    """
    sharded = [p for p in get_parameters(optimizer) if is_dtensor(p) and p.requires_grad]
    for mesh in dict.fromkeys(parameter.device_mesh for parameter in sharded):
        parameters = [parameter for parameter in sharded if parameter.device_mesh == mesh]
        if mesh.size() == distributed.get_world_size():
            groups: list[ProcessGroup | None] = [None]
        else:
            groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        for group in groups:
            _compare_used(parameters, group, model)


def _compare_used(
    parameters: Sequence[Tensor], group: ProcessGroup | None, model: nn.Module | None
) -> None:
    used = [parameter.grad is not None for parameter in parameters]
    counts = torch.tensor(used, dtype=torch.int32, device=comm_device(group))
    distributed.all_reduce(counts, group=group)
    size = distributed.get_world_size(group)
    differs = [index for index, count in enumerate(counts.tolist()) if count % size]
    if not differs:
        return
    index = differs[0]
    everywhere = all_gather_object(used[index], group)
    ranks = ", ".join(str(rank) for rank, is_used in enumerate(everywhere) if is_used)
    named = () if model is None else user_model(model).named_parameters()
    names = {id(parameter): plain_name(name) for name, parameter in named}
    name = names.get(id(parameters[index]), f"number {index} of the optimizer")
    raise RuntimeError(
        f"only on rank {ranks} of {size} the parameter {name} has a gradient ({len(differs)} such "
        "parameters). Under fsdp, all ranks must use the same parameters in each step, because "
        "FSDP2 would mix the weights and gradients of different ones. Use all of them on every "
        "rank (for example, add 0 * layer(inputs).sum() to the loss), draw the numbers that choose "
        "layers from the same generator on all ranks, or use ddp with find_unused_parameters"
    )


def compare_gradients(optimizer: Optimizer, custom: Any = None) -> bool:
    """Compare the gradients of ``optimizer``'s parameters between the ranks that average them.

    Every rank must call this. Returns whether all gradients are finite; infinite gradients hide
    differences.

    Args:
        optimizer: its parameters are looked up in all wrappers that average gradients.
        custom: a wrapper with a custom training step, which must average all parameters.

    Raises:
        RuntimeError: the gradients of a parameter differ, or no forward of the wrapper has run.
    """
    parameters = list(get_parameters(optimizer))
    all_finite = True
    for wrapper, averaged in _averaged(parameters, custom):
        if not _is_averaged(wrapper):
            if not getattr(wrapper, "_lazy_init_ran", True):
                raise RuntimeError(
                    f"{type(wrapper).__name__} has not been called before the first update, so the "
                    f"ranks have not combined their gradients. {_ADVICE}"
                )
            continue
        differs, is_finite = _differing(averaged, wrapper.data_group, 1e-3, 1e-6)
        all_finite = all_finite and is_finite
        for index in differs.nonzero()[:1]:
            names = {id(value): name for name, value in wrapper.module.named_parameters()}
            name = names.get(id(averaged[int(index)]), "a parameter")
            step = f" in {type(custom).__name__}.train_step" if custom else ""
            raise DifferentGradientsError(
                f"the ranks have different gradients of {name!r} at the first update{step}, but "
                f"they must be the same. {_ADVICE}",
                wrapper,
            )
    return all_finite


def _averaged(parameters: Sequence[Tensor], custom: Any) -> Iterable[tuple[Any, Sequence[Tensor]]]:
    """Yield the wrappers whose ranks average some of ``parameters``, and these parameters."""
    if not distributed.is_initialized() or any(map(is_dtensor, parameters)):
        return
    if custom is not None:
        yield custom, parameters
        return
    remaining = {id(parameter): parameter for parameter in parameters}
    # The last wrapper first: earlier ones around the same model may exist on some ranks only, where
    # they have not been collected yet.
    for wrapper in reversed([*averaging_wrappers]):
        inside = map(id, wrapper.parameters())
        averaged = [remaining.pop(key) for key in inside if key in remaining]
        group = model_features(wrapper).data_group
        if averaged and distributed.get_world_size(group) > 1:
            yield wrapper, averaged


def _is_reached(parameters: Sequence[Tensor], name: str, has_run: bool) -> bool:
    """Return whether any parameter has a gradient; raise RuntimeError if a backward gave none."""
    if any(getattr(param, "is_replaced", False) for param in parameters):
        raise RuntimeError(
            f"{name} has parameters that do not belong to the model any more, because splitting "
            "its layers replaced them; create the optimizer after wrapping"
        )
    if any(param.grad is not None for param in parameters):
        return True
    # It is not an error if all parameters are still frozen, or if no backward has run yet.
    if has_run and any(param.requires_grad for param in parameters):
        raise RuntimeError(
            f"no parameter of {name} has a gradient at its first update: either the loss depends "
            "on none of them, or they are not the model's parameters any more; create the "
            "optimizer after wrapping, because fsdp and tensor_parallel replace parameters"
        )
    return False


def _is_averaged(model: Any) -> bool:
    """Return whether all ranks must have the same gradients in every update."""
    # In `join`, ranks without further batches do not update.
    if model_features(model).uneven_inputs is not None or getattr(model, "_is_joined", False):
        return False
    # Ignored parameters, and communication hooks such as local SGD, may leave gradients different.
    for module in model.modules():
        hooks = getattr(module, "_comm_hooks", None)
        if hooks and not getattr(getattr(module, "_hook", None), "averages", False):
            return False
        if getattr(module, "parameters_to_ignore", None):
            return False
    return True


def _compare_tensor_ranks(parameters: Iterable[Tensor]) -> bool:
    """Compare the gradients of parameters that are not split, within each tensor group.

    Every rank must call this. Returns whether all gradients are finite; infinite gradients hide
    differences.

    Raises:
        RuntimeError: the gradients of a parameter differ.
    """
    param_ids, all_finite = {id(param) for param in parameters}, True
    for model, (group, everywhere) in list(split_models.items()):
        named = {name: param for name, param in model.named_parameters() if id(param) in param_ids}
        if not named:
            continue
        shared = {k: v for k, v in named.items() if v.requires_grad and not _is_split(v, group)}
        differs, is_finite = _differing(shared.values(), group, 0.02, 1e-3)
        wrong = differs.nonzero()
        # The index counts from the end, so that MAX finds the first parameter that differs on any
        # rank.
        verdict = torch.tensor([len(differs) - int(wrong[0]) if len(wrong) else 0, not is_finite])
        if everywhere:
            verdict = verdict.to(comm_device())
            distributed.all_reduce(verdict, ReduceOp.MAX)
        from_end, infinite = verdict.tolist()
        all_finite = all_finite and not infinite
        if from_end:
            name = list(shared)[-from_end]
            ranks = ", ".join(map(str, distributed.get_process_group_ranks(group)))
            raise RuntimeError(
                f"the gradient of {name!r} must be the same on all ranks of a tensor group (here "
                f"{ranks}), because the parameter is not split, but it differs. Either the plan "
                "leaves out a layer that gets a part of the sequence or of the features: give it a "
                'style (such as "sequence" for a norm), or make the previous layer return whole '
                'tensors ("replicate"). Or these ranks get different batches or random numbers'
            )
    return all_finite


def _is_split(parameter: Tensor, group: ProcessGroup) -> bool:
    # Compares ranks and not groups: torch may reuse the group of an earlier mesh of these ranks.
    ranks = distributed.get_process_group_ranks(group)
    over = get_layout(parameter).sharded_over
    return any(distributed.get_process_group_ranks(mesh_group) == ranks for mesh_group in over)


@torch.no_grad()
def _differing(
    parameters: Iterable[Tensor], group: ProcessGroup | None, tolerance: float, noise: float
) -> tuple[Tensor, bool]:
    """Return which gradients differ between the ranks, and whether all are finite.

    Every rank of ``group`` must call this.

    Args:
        tolerance: allowed difference, relative to the norm of the gradient, because kernels may sum
            in any order.
        noise: gradients whose norm is below this part of the largest norm may be rounding errors,
            and are not compared.
    """
    # The row of zeros avoids an empty message for an optimizer without parameters.
    digests = torch.stack(
        [torch.zeros(4, dtype=torch.float64), *(_digest(p.grad) for p in parameters)]
    )
    digests = digests.to(comm_device(group))
    everywhere = [torch.empty_like(digests) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(everywhere, digests, group=group)
    digests = torch.stack(everywhere).cpu()
    norms = digests[..., 0].amax(0)
    is_finite = bool(norms.isfinite().all())
    norms = norms.nan_to_num(0.0, 0.0)
    apart = (digests - digests[0]).abs().amax((0, 2))
    return ((apart > tolerance * norms) & (norms > noise * norms.max()))[1:], is_finite


def _digest(gradient: Tensor | None) -> Tensor:
    """Return the norm and three partial sums of a gradient; zeros for a missing gradient."""
    if gradient is None:
        return torch.zeros(4, dtype=torch.float64)
    local = local_part(gradient)
    values = local.coalesce().values() if local.is_sparse else local
    flat = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    middle = len(flat) // 2
    subsets = (flat[:middle], flat[middle:], flat[::2])
    sums = [_wide_sum(subset) for subset in subsets]
    return torch.stack([_wide_sum(flat, power=2).sqrt(), *sums]).cpu().double()


def _wide_sum(flat: Tensor, power: int = 1) -> Tensor:
    """Return the sum of a power of all elements in fp64, without a copy of all of them in fp64."""
    dtype = widest_float(flat.device)
    blocks = (block.to(dtype) for block in torch.split(flat, _BLOCK))
    return torch.stack([block.pow(power).sum() for block in blocks]).sum()
