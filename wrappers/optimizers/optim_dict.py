"""Several optimizer wrappers under one name, for models that step them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ...registry import OPTIM_WRAPPERS
from ..features import OptimFeatures, optim_features
from .loss_weight import LossWeight
from .optim import OptimWrapper

# What decides in which precision a member's forward runs.
_CAST = ("device_type", "cast_dtype")


def _refused(name: str) -> Callable[..., Any]:
    def method(self: OptimWrapperDict, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"`{name}` should be called by each optimizer separately, as in "
            f"optim_wrapper[{next(iter(self), 'name')!r}].{name}(...)"
        )

    method.__name__ = name
    method.__doc__ = "Not for a group: raises NotImplementedError."
    return method


@OPTIM_WRAPPERS.register_module()
class OptimWrapperDict(Mapping[str, OptimWrapper], OptimFeatures):
    """Named optimizer wrappers, as a mapping.

    The model's or wrapper's ``train_step`` picks its optimizers by name; what concerns all
    of them (clearing, counters, state, rates) is forwarded to each.

    Attributes:
        collective_state: every rank must call ``state_dict``, since a member's is spread.
        reads_parts: ``load_state_dict`` takes what can be cut in place of tensors.

    Raises:
        AssertionError: a value is not an optimizer wrapper.
    """

    def __init__(self, **optim_wrappers: OptimWrapper) -> None:
        for name, wrapper in optim_wrappers.items():
            # mmengine's own wrapper is welcome as well, hence by its interface.
            if not (hasattr(wrapper, "optimizer") and hasattr(wrapper, "update_params")):
                raise AssertionError(
                    "`OptimWrapperDict` only accept OptimWrapper instance, "
                    f"but got {name}: {type(wrapper)}"
                )
        self.optim_wrappers = dict(optim_wrappers)
        self._followers: set[str] = set()
        # By member, the micro-batches before the running batch; None: nobody tells of batches.
        self._before: dict[str, int] | None = None
        members = optim_wrappers.values()
        self.collective_state = any(optim_features(one).collective_state for one in members)
        self.reads_parts = all(optim_features(one).reads_parts for one in members)

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

    update_params = _refused("update_params")
    backward = _refused("backward")
    step = _refused("step")
    optim_context = _refused("optim_context")

    def precision_context(self) -> AbstractContextManager[Any]:
        """What an evaluation of the model in training runs in, where it is the same for all."""
        casts = {tuple(getattr(one, a, None) for a in _CAST) for one in self.values()}
        member: Any = next(iter(self.values())) if len(casts) == 1 else None
        own = optim_features(member).precision_context or nullcontext
        context: AbstractContextManager[Any] = own()
        return context

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients of all."""
        for wrapper in self.values():
            wrapper.zero_grad(**kwargs)

    @property
    def loss_weight(self) -> LossWeight | None:
        """That of the first member that has one."""
        return next((one.loss_weight for one in self._weighing()), None)

    @property
    def last_weight(self) -> float | Tensor | None:
        """That of the first member that has a ``loss_weight``."""
        return next((one.last_weight for one in self._weighing()), None)

    @property
    def batch_counts(self) -> bool:
        """Whether the coming batch is a real one; to be set, for all members."""
        return all(one.batch_counts for one in self._weighing())

    @batch_counts.setter
    def batch_counts(self, counts: bool) -> None:
        for one in self._weighing():
            one.batch_counts = counts

    def weigh(self, batch: Any, model: Any = None) -> None:
        """Set what the coming micro-batch of each member weighs."""
        for one in self._weighing():
            one.weigh(batch, model)

    def begin_pass(self, start: int, length: int | None) -> None:
        """Tell the `followers` where a pass over the data begins, and how long it is."""
        for wrapper in self.followers():
            if optim_features(wrapper).loss_weight is not None:
                wrapper.begin_pass(start, length)

    def _weighing(self) -> list[OptimWrapper]:
        # Members may be mmengine's.
        return [one for one in self.values() if optim_features(one).loss_weight is not None]

    def begin_batch(self) -> None:
        """Make `should_update` consider only the members that take part in the coming batch.

        To be called before each training step; our training loops do.
        """
        self._before = {name: wrapper._inner_count for name, wrapper in self.items()}

    def should_update(self) -> bool:
        """Whether the last batch ended a window of a member that took part in it.

        Without `begin_batch`, or where a step updates by hand so that no member has counted:
        whether the last micro-batch of any member, however long ago, ended its window.
        """
        before = self._before
        if before is None or all(
            one._accumulative_counts == 1 and one._inner_count == before[name]
            for name, one in self.items()
        ):
            return any(wrapper.should_update() for wrapper in self.values())
        return any(_has_ended(wrapper, before[name]) for name, wrapper in self.items())

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Tell the `followers` where training starts and ends.

        A member that does not see every batch once is to be initialised beforehand.
        """
        self._before = None
        for wrapper in self.followers():
            wrapper.initialize_count_status(model, init_counts, max_counts)

    def followers(self) -> list[OptimWrapper]:
        """The members that the caller has not initialised: they follow the run's counts."""
        self._followers.update(
            n for n, wrapper in self.items() if optim_features(wrapper).max_counts < 0
        )
        return [wrapper for name, wrapper in self.items() if name in self._followers]

    @property
    def inner_count(self) -> int:
        """Micro-batches so far, of the member that has seen most."""
        return max((wrapper._inner_count for wrapper in self.values()), default=0)

    @property
    def param_groups(self) -> dict[str, list[dict[str, Any]]]:
        """Parameter groups by member."""
        return {name: wrapper.param_groups for name, wrapper in self.items()}

    def get_lr(self) -> dict[str, list[float]]:
        """Learning rates as ``name.lr`` (and ``name.base_lr``)."""
        return {f"{n}.{k}": rates for n, one in self.items() for k, rates in one.get_lr().items()}

    def get_momentum(self) -> dict[str, list[float]]:
        """Momenta as ``name.momentum``."""
        return {f"{n}.{k}": v for n, one in self.items() for k, v in one.get_momentum().items()}

    def state_dict(self) -> dict[str, Any]:
        """State by member; every rank must call this where `collective_state`."""
        return {name: wrapper.state_dict() for name, wrapper in self.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the members that ``state_dict`` names.

        Raises:
            AssertionError: it names something else.
        """
        self._before = None
        for name, state in state_dict.items():
            if name not in self:
                raise AssertionError(
                    f"Mismatched `state_dict`! cannot found {name} in OptimWrapperDict, "
                    f"it has {list(self)}"
                )
            self[name].load_state_dict(state)


def _has_ended(wrapper: OptimWrapper, before: int) -> bool:
    """Whether a window of ``wrapper`` has ended since it had counted to ``before``."""
    every = wrapper._accumulative_counts
    # Of several micro-batches in a batch an earlier one may have ended it.
    start = wrapper._pass_start if isinstance(wrapper, OptimWrapper) else 0
    earlier = (wrapper._inner_count - 1 - start) // every > (before - start) // every
    return wrapper._inner_count > before and (earlier or wrapper.should_update())
