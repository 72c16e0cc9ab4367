"""Optional features of model and optimizer wrappers, and their defaults.

stepwrap's wrappers inherit the defaults. For objects from other libraries, such as mmengine's
optimizer wrapper, ``model_features`` and ``optim_features`` return a view that has them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module


class ModelFeatures:
    """Features of a model wrapper in addition to its steps; the defaults suit a single process.

    Attributes:
        data_group: the ranks that see different batches; None if these are all ranks of the run.
        averages_ranks: whether a backward averages the gradients over ``data_group``.
        collective_eval: whether every rank of ``data_group`` must call each evaluation step.
        own_buffers: whether each rank trains with its own buffers. If false, the next training
            forward copies the first rank's to all ranks, or there is only one rank.
        uneven_inputs: how to treat ranks with fewer batches than others; None if all ranks need the
            same number.
        detect_anomalous_params: whether every step searches for parameters without a gradient.
        runs_model_step: whether ``train_step`` runs the model's own ``train_step``.
    """

    data_group: ProcessGroup | None = None
    averages_ranks: bool = False
    collective_eval: bool = False
    own_buffers: bool = False
    uneven_inputs: Any = None
    detect_anomalous_params: bool = False
    runs_model_step: bool = False

    def recheck_every(self, steps: int) -> bool:
        """Make a compiled step check the model for changes only before every ``steps``-th step.

        Returns whether the wrapper's training step is compiled; by default it is not.
        """
        return False

    def average(self, value: Tensor) -> Tensor:
        """Average a detached ``value`` over the data ranks; every data rank must call this."""
        return value

    def sync_buffers(self) -> None:
        """Copy the buffers of the first rank to all ranks; every rank must call this."""

    def keep_own_buffers(self) -> None:
        """Make the next forward continue with the buffers of each rank, inside a window.

        Every rank must call this.
        """

    def keep_in_eval(self, modules: Collection[Module]) -> None:
        """Keep ``modules`` in evaluation mode while the wrapper trains; others are released.

        Raises:
            TypeError: the wrapper does not support it.
        """
        raise TypeError(f"{type(self).__name__} cannot keep modules in evaluation mode")

    def set_loss_weight(self, loss_weight: Any) -> None:
        """Accept ``loss_weight``, or raise ValueError if it cannot be combined with the wrapper."""

    def step_state(self) -> dict[str, Any]:
        """Return the state that a custom training step keeps between batches, for checkpoints.

        Override it together with ``load_step_state``. The state may hold tensors, numbers, lists
        and dicts. Each rank gets its own state back if the resumed run has the same number of
        ranks.
        """
        return {}

    def load_step_state(self, state: dict[str, Any]) -> None:
        """Restore what ``step_state()`` returned."""


class OptimFeatures:
    """Features of an optimizer wrapper in addition to updates, and their defaults.

    Attributes:
        accumulative_counts: micro-batches per update.
        inner_count: number of micro-batches so far.
        max_counts: total number of micro-batches of the training; -1 if unknown.
        counted_from: the micro-batch from which windows are counted.
        can_close_window: whether ``close_window`` ends a window early.
        ends_by_updates: whether the training ends after a number of updates.
        loss_weight: the ``LossWeight`` of a batch; None if all micro-batches count the same.
        last_weight: weight of the last micro-batch of this rank.
        batch_counts: whether the next micro-batch is real. False gives it the weight 0: a rank
            without data runs such batches, because other ranks wait for its communication.
        window_weight: total weight of the micro-batches whose gradients this rank holds.
        guard: decides before each update whether it happens.
        empty_updates: number of updates without gradients since the last log record.
        foreign_parameters: parameters whose gradients are dropped when the next window begins.
        grad_norm: total norm of the gradients before clipping.
        scales_losses: whether losses are multiplied by a scale (float16).
        needs_closure: whether the optimizer recomputes the loss, as LBFGS does.
        collective_state: whether every rank must call ``state_dict``.
        reads_parts: whether ``load_state_dict`` also accepts objects that have a ``shape`` and can
            be sliced, instead of whole tensors. It then reads only this rank's part of them.
        precision_context: function that returns the context in which a forward runs, such as
            autocast; None if no context is needed.
    """

    accumulative_counts: Any = 1
    inner_count: Any = 0
    max_counts: Any = -1
    counted_from: int = 0
    can_close_window: bool = False
    ends_by_updates: bool = False
    loss_weight: Any = None
    last_weight: Any = None
    batch_counts: Any = True
    window_weight: Any = 0.0
    guard: Any = None
    empty_updates: int = 0
    foreign_parameters: Any = ()
    grad_norm: Tensor | None = None
    scales_losses: bool = False
    needs_closure: bool = False
    collective_state: Any = False
    reads_parts: bool = False
    precision_context: Any = None

    def window_start(self, count: int) -> int:
        """Return the number of micro-batches before the window of micro-batch ``count``."""
        return count - (count - self.counted_from) % int(self.accumulative_counts)

    def weigh(self, batch: Any, model: Any = None) -> None:
        """Set the weight of the next micro-batch."""

    def begin_batch(self) -> None:
        """Mark the start of a batch."""

    def begin_pass(self, start: int, length: int | None) -> None:
        """Mark the start of a pass over the data, with its length if that is known."""

    def continue_window(self, model: Any, init_counts: int, max_counts: int) -> None:
        """Start a training inside a window whose gradients have been restored."""

    def close_window(self, length: int) -> None:
        """Make the next micro-batch the last one of its window, which has ``length`` of them."""

    def skip_micro_batch(self) -> None:
        """Count a micro-batch that is left out, with the weight 0."""

    def count_empty_update(self) -> None:
        """Count an update that was skipped because no parameter had a gradient."""
        self.empty_updates += 1

    def pop_empty_updates(self) -> int:
        """Return ``empty_updates`` and set it to 0, for a log record."""
        count, self.empty_updates = self.empty_updates, 0
        return count


def has_collective_update(optimizer: Any) -> bool:
    """Return whether ``optimizer`` communicates with other ranks in its updates.

    These are torch's ``ZeroRedundancyOptimizer`` and ``PostLocalSGDOptimizer``, recognised by their
    attributes, since importing them loads large parts of torch.
    """
    return hasattr(optimizer, "consolidate_state_dict") or hasattr(optimizer, "averager")


def require_optim_wrapper(optim_wrapper: Any, data: Any = None) -> None:
    """Raise TypeError for an object that is not an optimizer wrapper, such as an optimizer.

    Args:
        optim_wrapper: the object.
        data: the other argument of a training step; the two may have been exchanged.
    """
    is_class = isinstance(optim_wrapper, type)
    if not is_class and hasattr(optim_wrapper, "update_params"):
        return
    remedy = "wrap the optimizer: OptimWrapper(optimizer)"
    if hasattr(data, "update_params"):
        remedy = "exchange the arguments: train_step(data, optim_wrapper)"
    elif isinstance(optim_wrapper, (Mapping, list, tuple)):
        remedy = "name several optimizers: OptimWrapperDict(generator=OptimWrapper(optimizer))"
    kind = optim_wrapper.__name__ if is_class else type(optim_wrapper).__name__
    received = f"the class {kind}" if is_class else f"an object of type {kind}"
    raise TypeError(f"training needs an optimizer wrapper, got {received}; {remedy}")


def explain_optim_wrapper(error: BaseException, optim_wrapper: Any, data: Any) -> None:
    """Raise a clearer TypeError if ``error`` says that ``optim_wrapper`` is another object."""
    missing = isinstance(error, AttributeError) and error.obj is optim_wrapper
    # For example "'SGD' object is not subscriptable".
    indexed = isinstance(error, TypeError) and type(optim_wrapper).__name__ in str(error)
    if missing or indexed:
        try:
            require_optim_wrapper(optim_wrapper, data)
        except TypeError as clearer:
            raise clearer from error


class _Foreign:
    """A view of an object from another library, with ``defaults`` for missing features."""

    def __init__(self, inner: Any, defaults: Any) -> None:
        self._part, self._defaults = inner, defaults

    def __getattr__(self, name: str) -> Any:
        default = getattr(self._defaults, name)
        # mmengine uses private names for some of them, such as _accumulative_counts.
        return getattr(self._part, name, getattr(self._part, f"_{name}", default))


class _ForeignOptim(_Foreign):
    """An optimizer wrapper of mmengine, whose windows begin at multiples of their length."""

    def continue_window(self, model: Any, init_counts: int, max_counts: int) -> None:
        # It may not have saved its count.
        count = self._part._inner_count or init_counts
        start = count - count % self._part._accumulative_counts
        self._part.initialize_count_status(model, start, max_counts)
        self._part._inner_count = count

    def skip_micro_batch(self) -> None:
        # Groups have no count.
        if hasattr(self._part, "_inner_count"):
            self._part._inner_count += 1


def model_features(model: Any) -> ModelFeatures:
    """Return ``model`` if it declares its features, otherwise a view with the defaults."""
    if isinstance(model, ModelFeatures):
        return model
    return _Foreign(model, ModelFeatures())  # type: ignore[return-value]


def optim_features(optim_wrapper: Any) -> OptimFeatures:
    """Return ``optim_wrapper`` if it declares its features, otherwise a view with the defaults."""
    if isinstance(optim_wrapper, OptimFeatures):
        return optim_wrapper
    return _ForeignOptim(optim_wrapper, OptimFeatures())  # type: ignore[return-value]
