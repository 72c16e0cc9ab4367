"""Steps that a training skips: which, how a loop passes over them, what is undone after them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .checkpoints.restore import load_checkpoint
from .checkpoints.weights import device_of, step_state, user_model
from .rng import capture_rng, preserved_rng, restore_rng
from .schedule import is_weighted, members_of, windows_of
from .state import LoopState
from .steps import Step

_END = object()
# A longer range is a slip of the keyboard, and would fill the memory.
_LONGEST = 1_000_000


class GoingBack(BaseException):
    """Ends a training, on every rank alike, that is to go on from an earlier checkpoint.

    No error, and therefore, like KeyboardInterrupt, no Exception.
    """

    def __init__(self, checkpoint: Path, reason: str) -> None:
        super().__init__(f"{reason}; going back to {checkpoint}")
        self.checkpoint = checkpoint


class Attempt:
    """Trains inside; after `GoingBack` it restores the checkpoint, and `ended` stays False."""

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self.ended = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.ended = not isinstance(error, GoingBack)
        if isinstance(error, GoingBack):
            load_checkpoint(error.checkpoint).restore(self._state)
        return not self.ended


def steps_of(skip_steps: Iterable[int | str]) -> set[int]:
    """Return the steps that numbers and ranges such as "1200-1210" name."""
    steps: set[int] = set()
    for entry in skip_steps if isinstance(skip_steps, Iterable) else [repr(skip_steps)]:
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", "" if isinstance(entry, bool) else str(entry))
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if not 1 <= first <= last < first + _LONGEST:
            raise ValueError(
                'skip_steps must hold numbers of steps from 1, and ranges such as "1200-1210" of '
                f"at most {_LONGEST:,} steps, got {entry!r}"
            )
        steps.update(range(first, last + 1))
    return steps


def skipping(
    batches: Iterable[Any], train_step: Step, state: LoopState
) -> tuple[Iterable[Any], Step]:
    """Return both such that nothing is done in the steps that are in `state.skip_steps`.

    Their batches are read, so that all others stay in their places, but leave no trace in the
    random streams.

    Raises:
        ValueError: Several optimizers accumulate: no one knows what each of them would have
            counted.
    """
    if state.skip_steps is None:
        return batches, train_step
    skipped, device, optim = state.skip_steps, device_of(state.model), state.optim_wrapper
    is_group = isinstance(optim, Mapping)
    if is_group and max(windows_of(optim), default=1) > 1:
        raise ValueError(
            "steps of several optimizers can be left out with accumulative_counts=1 only, "
            f"got {windows_of(optim)}"
        )

    def read() -> Iterator[Any]:
        own = iter(batches)
        while True:
            with preserved_rng(device) if state.step + 1 in skipped else nullcontext():
                batch = next(own, _END)
            if batch is _END:
                return
            yield batch

    def step(batch: Any, optim_wrapper: Any) -> Any:
        state.skipped = state.step + 1 in skipped
        if not state.skipped:
            return train_step(batch, optim_wrapper)
        _leave_out(optim_wrapper)
        return {}

    return read(), step


def _leave_out(optim_wrapper: Any) -> None:
    """Count a batch of which nothing is trained."""
    if is_weighted(optim_wrapper):
        # Nothing of this batch counts, nor what was weighed before it.
        for member in members_of(optim_wrapper):
            member.last_weight = 0.0
    if hasattr(optim_wrapper, "_inner_count"):
        optim_wrapper._inner_count += 1
    # Of the window's batches from before a resume.
    optim_wrapper.zero_grad()


def buffer_restorer(model: nn.Module) -> Callable[[], None]:
    """Return what puts the buffers of `model` back to what they are now."""
    kept = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in user_model(model).modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]

    def put_back() -> None:
        with torch.no_grad():
            for owner, name, buffer, value in kept:
                owner[name] = buffer.copy_(value)

    return put_back


def window_restorer(state: LoopState) -> Callable[[], None]:
    """Return what undoes all that the batches of a window change, but for weights and counters.

    That is the buffers, the random streams, and what a training step carries from batch to batch.
    """
    wrapper: Any = state.model
    put_back_buffers, device = buffer_restorer(wrapper), device_of(wrapper)
    streams, carried = capture_rng(device), deepcopy(step_state(wrapper))

    def put_back() -> None:
        put_back_buffers()
        restore_rng(streams, device)
        if carried:
            wrapper.load_step_state(carried)

    return put_back
