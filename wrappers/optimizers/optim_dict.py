"""A mapping of optimizer wrappers, for models that train with several optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ...registry import OPTIM_WRAPPERS
from ..features import OptimFeatures, optim_features
from .gates import GradientGate, PhaseGate
from .loss_weight import LossWeight
from .optim import OptimWrapper


def _not_for_groups(name: str) -> Callable[..., Any]:
    def method(self: OptimWrapperDict, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"`{name}` should be called by each optimizer separately, for example "
            f"optim_wrapper[{next(iter(self), 'name')!r}].{name}(...)"
        )

    method.__name__ = name
    method.__doc__ = "Raise NotImplementedError: call the method of a member."
    return method


@OPTIM_WRAPPERS.register_module()
class OptimWrapperDict(Mapping[str, OptimWrapper], OptimFeatures):
    """A mapping of names to optimizer wrappers.

    The ``train_step`` of the model or wrapper selects an optimizer by name. Methods for gradients,
    state and learning rates call every member. Gradients that
    the backward of one member leaves in the parameters of another are dropped.

    Attributes:
        collective_state: whether every rank must call ``state_dict``.
        reads_parts: whether ``load_state_dict`` also accepts objects that have a ``shape`` and can
            be sliced, instead of whole tensors. It then reads only this rank's part of them.

    Raises:
        AssertionError: a value is not an optimizer wrapper.
    """

    def __init__(self, **optim_wrappers: OptimWrapper) -> None:
        for name, wrapper in optim_wrappers.items():
            # Checks the interface, to accept mmengine's wrapper as well.
            if not (hasattr(wrapper, "optimizer") and hasattr(wrapper, "update_params")):
                # mmengine raises the same error.
                raise AssertionError(
                    "`OptimWrapperDict` only accept OptimWrapper instance, "
                    f"but got {name}: {type(wrapper)}"
                )
        self.optim_wrappers = dict(optim_wrappers)
        gates: list[PhaseGate] = []
        for name, wrapper in optim_wrappers.items():
            if isinstance(wrapper, OptimWrapper) and len(optim_wrappers) > 1:
                wrapper.gates.phase = PhaseGate(name, wrapper, gates)
                wrapper.gates.gradients = GradientGate()
        self._followers: set[str] = set()
        # Each member's micro-batches before the current batch; None without `begin_batch`.
        self._before: dict[str, int] | None = None
        members = optim_wrappers.values()
        self.collective_state = any(optim_features(member).collective_state for member in members)
        self.reads_parts = all(optim_features(member).reads_parts for member in members)

    def __getitem__(self, name: str) -> OptimWrapper:
        try:
            return self.optim_wrappers[name]
        except KeyError:
            raise KeyError(f"Cannot find {name} in OptimWrapperDict, it has {list(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.optim_wrappers)

    def __len__(self) -> int:
        return len(self.optim_wrappers)

    def __repr__(self) -> str:
        return "\n".join(f"name: {name}\n{wrapper!r}" for name, wrapper in self.items())

    update_params = _not_for_groups("update_params")
    backward = _not_for_groups("backward")
    step = _not_for_groups("step")
    optim_context = _not_for_groups("optim_context")

    def precision_context(self) -> AbstractContextManager[Any]:
        """Return autocast for evaluations during training; no context if precisions differ."""
        casts = {
            (getattr(member, "device_type", None), getattr(member, "cast_dtype", None))
            for member in self.values()
        }
        member: Any = next(iter(self.values())) if len(casts) == 1 else None
        make_context = optim_features(member).precision_context or nullcontext
        context: AbstractContextManager[Any] = make_context()
        return context

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients of all members."""
        for wrapper in self.values():
            wrapper.zero_grad(**kwargs)

    @property
    def loss_weight(self) -> LossWeight | None:
        """``loss_weight`` of the first member that has one."""
        return next((member.loss_weight for member in self._weighted()), None)

    @property
    def last_weight(self) -> float | Tensor | None:
        """``last_weight`` of the first member that has a ``loss_weight``."""
        return next((member.last_weight for member in self._weighted()), None)

    @property
    def batch_counts(self) -> bool:
        """Whether the next batch is real; setting it sets all members with a ``loss_weight``."""
        return all(member.batch_counts for member in self._weighted())

    @batch_counts.setter
    def batch_counts(self, counts: bool) -> None:
        for member in self._weighted():
            member.batch_counts = counts

    def weigh(self, batch: Any, model: Any = None) -> None:
        """Set the weight of the next micro-batch in each member that has a ``loss_weight``."""
        for member in self._weighted():
            member.weigh(batch, model)

    def begin_pass(self, start: int, length: int | None) -> None:
        """Set for each member in ``followers()`` the start and length of a pass over the data."""
        for wrapper in self.followers():
            if optim_features(wrapper).loss_weight is not None:
                wrapper.begin_pass(start, length)

    def _weighted(self) -> list[OptimWrapper]:
        return [
            member for member in self.values() if optim_features(member).loss_weight is not None
        ]

    def begin_batch(self) -> None:
        """Make ``should_update`` consider only the members that take part in the next batch.

        Call it before each training step in your own loop; stepwrap's training loops call it.
        """
        self._before = {name: wrapper._inner_count for name, wrapper in self.items()}

    def should_update(self) -> bool:
        """Return whether the last batch ended a window of a member that took part in it.

        Call ``begin_batch`` before each batch. Without it, return whether the last micro-batch of
        any member ended its window. The same applies if no member accumulates and none has counted
        a micro-batch since ``begin_batch``.
        """
        before = self._before
        if before is None or all(
            member._accumulative_counts == 1 and member._inner_count == before[name]
            for name, member in self.items()
        ):
            return any(wrapper.should_update() for wrapper in self.values())
        return any(_has_ended(wrapper, before[name]) for name, wrapper in self.items())

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Set for each member in ``followers()`` the first and last micro-batch of the training.

        If a member does not get every batch exactly once, call its ``initialize_count_status``
        yourself before this.
        """
        self._before = None
        followers = self.followers()
        for wrapper in followers:
            wrapper.initialize_count_status(model, init_counts, max_counts)
            # One warning about the model is enough.
            for other in followers:
                other.warns_of_batch_norm &= wrapper.warns_of_batch_norm

    def continue_window(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Call ``continue_window`` of each member in ``followers()``."""
        self._before = None
        for wrapper in self.followers():
            optim_features(wrapper).continue_window(model, init_counts, max_counts)

    def skip_micro_batch(self) -> None:
        """Set ``last_weight`` to 0 in each member that has a ``loss_weight``.

        No member counts, because it is unknown which ones would have trained on the batch.
        """
        for member in self._weighted():
            member.last_weight = 0.0

    def followers(self) -> list[OptimWrapper]:
        """Return the members whose counts the training loop sets.

        These are the members whose ``max_counts`` is negative (unknown), now or in an earlier call.
        Members that you initialised yourself have a known ``max_counts``.
        """
        self._followers.update(
            n for n, wrapper in self.items() if optim_features(wrapper).max_counts < 0
        )
        return [wrapper for name, wrapper in self.items() if name in self._followers]

    @property
    def inner_count(self) -> int:
        """The largest ``inner_count`` of the members."""
        return max((wrapper._inner_count for wrapper in self.values()), default=0)

    @property
    def param_groups(self) -> dict[str, list[dict[str, Any]]]:
        """Parameter groups by member."""
        return {name: wrapper.param_groups for name, wrapper in self.items()}

    def get_lr(self) -> dict[str, list[float]]:
        """Return learning rates as ``name.lr`` (and ``name.base_lr``)."""
        return {
            f"{n}.{k}": rates for n, member in self.items() for k, rates in member.get_lr().items()
        }

    def get_momentum(self) -> dict[str, list[float]]:
        """Return momenta as ``name.momentum``."""
        return {
            f"{n}.{k}": v for n, member in self.items() for k, v in member.get_momentum().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state by member; every rank must call this if ``collective_state``."""
        return {name: wrapper.state_dict() for name, wrapper in self.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the members that ``state_dict`` names.

        Raises:
            AssertionError: ``state_dict`` contains another name.
        """
        self._before = None
        for name, state in state_dict.items():
            if name not in self:
                # mmengine raises the same error.
                raise AssertionError(
                    f"Mismatched `state_dict`! cannot found {name} in OptimWrapperDict, "
                    f"it has {list(self)}"
                )
            self[name].load_state_dict(state)


def _has_ended(wrapper: OptimWrapper, before: int) -> bool:
    """Return whether a window of ``wrapper`` has ended since its count was ``before``."""
    every = wrapper._accumulative_counts
    # One batch may have several micro-batches, of which an earlier one may have ended a window.
    start = optim_features(wrapper).counted_from
    earlier = (wrapper._inner_count - 1 - start) // every > (before - start) // every
    return wrapper._inner_count > before and (earlier or wrapper.should_update())
