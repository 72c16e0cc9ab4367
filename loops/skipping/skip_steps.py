"""Skip training steps by their numbers: their batches are read, but not trained on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from ...wrappers.features import optim_features
from ...wrappers.steps.preprocess import get_device
from ..rng import preserved_rng
from ..schedule import get_windows
from ..state import LoopState
from ..steps import Step

_END = object()


def parse_skip_steps(skip_steps: Iterable[int | str]) -> set[int]:
    """Return the step numbers that a list of numbers and ranges such as "1200-1210" contains.

    Raises:
        ValueError: an entry is neither a number nor a range, or a range is empty.
    """
    steps: set[int] = set()
    for entry in skip_steps if isinstance(skip_steps, Iterable) else [repr(skip_steps)]:
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", "" if isinstance(entry, bool) else str(entry))
        start, end = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if not 1 <= start <= end:
            raise ValueError(
                "skip_steps must hold step numbers >= 1 and ranges of steps such as "
                f'"1200-1210", got {entry!r}'
            )
        steps.update(range(start, end + 1))
    return steps


def skip_listed_steps(
    batches: Iterable[Any], train_step: Step, state: LoopState
) -> tuple[Iterable[Any], Step]:
    """Wrap ``batches`` and ``train_step`` so that the steps in ``state.skip_steps`` do not train.

    Their batches are read, but the random streams are restored afterwards: later steps draw the
    same random numbers as if the skipped steps did not exist.

    Raises:
        ValueError: there are several optimizers and one accumulates gradients. It is unknown which
            micro-batches each of them would have counted.
    """
    if state.skip_steps is None:
        return batches, train_step
    skipped, device, optim = state.skip_steps, get_device(state.model), state.optim_wrapper
    is_group = isinstance(optim, Mapping)
    if is_group and max(get_windows(optim), default=1) > 1:
        raise ValueError(
            "skip_steps needs accumulative_counts=1 if there are several optimizers, "
            f"got {get_windows(optim)}"
        )

    def read() -> Iterator[Any]:
        iterator = iter(batches)
        while True:
            with preserved_rng(device) if state.step + 1 in skipped else nullcontext():
                batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch

    def step(batch: Any, optim_wrapper: Any) -> Any:
        state.skipped = state.step + 1 in skipped
        if not state.skipped:
            return train_step(batch, optim_wrapper)
        optim_features(optim_wrapper).skip_micro_batch()
        # After a resume inside an accumulation window, gradients of its first batches are present.
        optim_wrapper.zero_grad()
        return {}

    return read(), step
