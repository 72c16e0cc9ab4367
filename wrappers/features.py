"""Optional abilities of model and optimizer wrappers, each with the default of those without it.

Our wrappers inherit the defaults. Parts from elsewhere, such as mmengine's optimizer wrapper, are
asked through ``model_features`` and ``optim_features``, which fill in what they lack.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup


class ModelFeatures:
    """Abilities of a model wrapper besides its steps; the defaults describe a single process.

    Attributes:
        data_group: the ranks that see different batches; None for all of them.
        averages_ranks: whether a backward averages the gradients over ``data_group``.
        collective_eval: whether evaluation steps need every rank of ``data_group``.
        uneven_inputs: how ranks with fewer batches are treated; None: all need equally many.
        detect_anomalous_params: whether every step looks for parameters that the loss misses.
    """

    data_group: ProcessGroup | None = None
    averages_ranks: bool = False
    collective_eval: bool = False
    uneven_inputs: Any = None
    detect_anomalous_params: bool = False

    def look_every(self, steps: int) -> bool:
        """Re-check the model only every ``steps`` compiled steps; return whether it is compiled."""
        return False

    def average(self, value: Tensor) -> Tensor:
        """Return the mean of a detached ``value`` over the ranks that average their gradients."""
        return value

    def sync_buffers(self) -> None:
        """Give every rank the buffers of the first; every rank must call this."""

    def weigh_by(self, loss_weight: Any) -> None:
        """Accept ``loss_weight``, or raise ValueError if it cannot be combined with the wrapper."""

    def step_state(self) -> dict[str, Any]:
        """Return the state that a custom training step keeps between batches, for checkpoints.

        Override it together with ``load_step_state``: tensors, numbers, lists and dicts of this
        rank. It is restored on the same rank of a run with as many ranks.
        """
        return {}

    def load_step_state(self, state: dict[str, Any]) -> None:
        """Restore ``step_state()``."""


class OptimFeatures:
    """Abilities of an optimizer wrapper besides updating, each with its default.

    Attributes:
        accumulative_counts: micro-batches per update.
        inner_count: micro-batches so far.
        max_counts: micro-batches at the end of the training; -1 if that is not known.
        loss_weight: the measure of a batch that losses are averaged by; None: all count the same.
        last_weight: weight of the last micro-batch of this rank.
        batch_counts: whether the next micro-batch is a real one, not padding for other ranks.
        window_weight: weight of the micro-batches whose gradients this rank holds.
        guard: decides before each update whether it is made.
        grad_norm: total norm of the gradients before they were clipped.
        scales_losses: whether losses are multiplied by a scale (float16).
        needs_closure: whether the optimizer recomputes the loss, as LBFGS does.
        collective_state: whether every rank must call ``state_dict``.
        reads_parts: whether ``load_state_dict`` accepts objects that can be sliced.
        precision_context: makes the context that sets the precision of a forward, such as
            autocast; None if it sets none.
    """

    accumulative_counts: Any = 1
    inner_count: Any = 0
    max_counts: Any = -1
    loss_weight: Any = None
    last_weight: Any = None
    batch_counts: Any = True
    window_weight: Any = 0.0
    guard: Any = None
    grad_norm: Tensor | None = None
    scales_losses: bool = False
    needs_closure: bool = False
    collective_state: Any = False
    reads_parts: bool = False
    precision_context: Any = None

    def weigh(self, batch: Any, model: Any = None) -> None:
        """Set the weight of the next micro-batch."""

    def begin_batch(self) -> None:
        """Note that a batch begins."""

    def begin_pass(self, start: int, length: int | None) -> None:
        """Note where a pass over the data begins and, if it is known, how long it is."""


class _Foreign:
    """A part that is not ours, with ``defaults`` for the features that it lacks."""

    def __init__(self, part: Any, defaults: Any) -> None:
        self._part, self._defaults = part, defaults

    def __getattr__(self, name: str) -> Any:
        default = getattr(self._defaults, name)
        # mmengine has some under private names, such as _accumulative_counts.
        return getattr(self._part, name, getattr(self._part, f"_{name}", default))


_MODEL, _OPTIM = ModelFeatures(), OptimFeatures()


def model_features(model: Any) -> ModelFeatures:
    """Return ``model`` if it declares its features, otherwise a view with the defaults."""
    return model if isinstance(model, ModelFeatures) else _Foreign(model, _MODEL)  # type: ignore[return-value]


def optim_features(optim_wrapper: Any) -> OptimFeatures:
    """Return ``optim_wrapper`` if it declares its features, otherwise a view with the defaults."""
    if isinstance(optim_wrapper, OptimFeatures):
        return optim_wrapper
    return _Foreign(optim_wrapper, _OPTIM)  # type: ignore[return-value]
