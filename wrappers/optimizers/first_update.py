"""What is looked at before a first update: are there gradients, and the same on all ranks?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, distributed
from torch.optim import Optimizer

from ..sharding.layout import is_dtensor
from ..sharding.tensor_ranks import compare_gradients

# Relative to the gradient: the means that the ranks get are the same to the last bit.
_TOLERANCE = 1e-3
# Relative to the largest gradient: what is smaller may be nothing but rounding.
_NOISE = 1e-6


class FirstUpdate:
    """Looks at the gradients that an optimizer is about to take for the first time.

    Args:
        optimizer: whose update it is.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_reached = False
        self._model: Any = None

    def note(self, model: Any) -> None:
        """Learn which wrapper runs the step, if ``model`` is one with a step of its own."""
        if getattr(model, "averages_ranks", False) and has_own_step(model):
            self._model = model

    def check(self, has_run: bool) -> bool:
        """Return whether all is well, so that nothing needs to be looked at again.

        Every rank of a wrapper that averages gradients must call this.

        Args:
            has_run: there has been a backward.

        Raises:
            RuntimeError: no parameter has a gradient, or the model has others in the place of
                some; or the ranks have different gradients.
        """
        if not self._is_reached:
            self._is_reached = _is_reached(self._optimizer, has_run)
        if not self._is_reached:
            return False
        return self._model is None or _is_shared(self._optimizer, self._model)


def has_own_step(model: Any) -> bool:
    """Whether a training step is not the usual one of our wrappers: a subclass's, the model's."""
    if getattr(model, "_model_steps", False):
        return True
    owner = next((one for one in type(model).__mro__ if "train_step" in vars(one)), None)
    return owner is None or not owner.__module__.startswith("stepwrap.wrappers.")


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what ``optimizer`` updates."""
    return (one for group in optimizer.param_groups for one in group["params"])


def _is_reached(optimizer: Optimizer, has_run: bool) -> bool:
    """Whether there is a gradient; RuntimeError where there should be one."""
    parameters = list(parameters_of(optimizer))
    name = type(optimizer).__name__
    if any(getattr(one, "is_replaced", False) for one in parameters):
        raise RuntimeError(
            f"{name} has parameters that the model has no more, since its layers were split; make "
            "the optimizer after wrapping"
        )
    if any(one.grad is not None for one in parameters):
        return True
    # What is frozen may be trained later, and another wrapper's backward may reach others.
    if has_run and any(one.requires_grad for one in parameters):
        raise RuntimeError(
            f"no parameter of {name} has a gradient at its first update: either the loss reaches "
            "none of them, or they are no longer those of the model; make the optimizer after "
            "wrapping, because fsdp and split layers put others in their place"
        )
    return False


def _is_shared(optimizer: Optimizer, model: Any) -> bool:
    """Whether the ranks were found to agree; False where infinities hide it."""
    group = model.data_group
    parameters = list(parameters_of(optimizer))
    if not _is_averaged(model) or any(map(is_dtensor, parameters)):
        return True
    differs, is_finite = compare_gradients(parameters, group, tolerance=_TOLERANCE, noise=_NOISE)
    if not is_finite:
        return False
    if differs.any():
        _fail(parameters[int(differs.nonzero()[0])], model)
    return True


def _is_averaged(model: Any) -> bool:
    """Whether each rank is to update by the same gradients, and comes to every update."""
    if not distributed.is_initialized() or getattr(model, "uneven_inputs", None) is not None:
        return False
    # A hook may leave them apart, as local SGD does, and so may what torch is told to ignore.
    return not any(
        getattr(one, "_comm_hooks", None) or getattr(one, "parameters_to_ignore", None)
        for one in model.modules()
    )


def _fail(parameter: Tensor, model: Any) -> None:
    names = {id(one): name for name, one in model.module.named_parameters()}
    raise RuntimeError(
        f"the ranks have different gradients of {names.get(id(parameter), 'a parameter')!r} at "
        f"the first update in {type(model).__name__}.train_step, and would train apart. Only the "
        "first backward after a call of self(...), or of a child under separate, averages: not "
        "torch.autograd.grad, and no second backward of calls made before the first. Add up the "
        "losses that share calls, call again before each backward, or take "
        "self.average(gradient)"
    )
