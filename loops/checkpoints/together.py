"""What all ranks do together: if one fails, all of them hear of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from ...collectives import (
    Progress,
    all_gather_object,
    distributed_available,
    get_rank,
    get_world_size,
    in_progress,
    run_together,
)
from ..state import LoopState, Phase

T = TypeVar("T")
_DOING: Final = {Phase.TRAIN: "training", Phase.VAL: "validation", Phase.TEST: "test"}
Gather = Callable[[Any], list[Any]]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the same on every rank."""


def together(what: str, action: Callable[[], T], gather: Gather = all_gather_object) -> list[T]:
    """Run `action` on every rank and return all results; if one fails, all fail.

    Raises:
        CheckpointError: With the text of every rank that failed.
    """
    results, failures, cause = run_together(action, gather)
    texts = []
    for failure in filter(None, failures):
        text = failure.text if issubclass(failure.kind, CheckpointError) else failure.told
        texts.append(f"rank {failure.rank}: {text}" if len(failures) > 1 else text)
    if texts:
        raise CheckpointError(f"{what} failed: {'; '.join(texts)}") from cause
    return results


def naming_missing_ranks(state: LoopState) -> AbstractContextManager[None]:
    """Name the ranks that do not come where the body waits for them in vain; every rank enters.

    Raises:
        CollectiveError: In place of the transport's error; says where each rank is.
    """

    def progress() -> Progress:
        return Progress(_DOING[state.phase], f"step {state.step}, epoch {state.epoch}")

    return in_progress(progress)


@contextmanager
def reading(checkpoint: Path, file: str, entry: str) -> Iterator[None]:
    """Have errors in the block say which entry of which file of a checkpoint led to them.

    Raises:
        CheckpointError: In place of any other.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {checkpoint}: {file}: {entry} cannot be restored: "
            f"{type(error).__name__}: {error}"
        ) from error


def own_rank() -> int:
    """Return this process's rank in the group, 0 without one, whatever the environment says."""
    return get_rank() if distributed_available() else 0


def world_size() -> int:
    """Return the number of ranks in the group, 1 without one, whatever the environment says."""
    return get_world_size() if distributed_available() else 1
