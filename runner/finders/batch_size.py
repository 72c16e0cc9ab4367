"""The largest batch size that fits into memory, by trying sizes in separate trainings."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum

import torch

from ...loops import IterTrainLoop
from ...loops.checkpoints.weights import num_data_ranks
from ...registry import LoaderSection
from ..failure import LaunchError
from ..jobs import Job, on_ranks, prepared
from ..parts import build_parts
from ..runner import Runner

# The texts with which allocators of torch, Python and the kernel report that memory is exhausted.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "MemoryError",
    "bad_alloc",
    "SIGKILL",
)
_STEPS = 2


class Fit(Enum):
    """The result of trying a batch size."""

    FITS = "fits"
    TOO_LARGE = "out of memory"
    TOO_FEW_SAMPLES = "more than the data set has for each rank"


def try_batch_size(job: Job, size: int, memory_gib: float | None = None) -> Fit:
    """Train two updates with a batch size on all ranks of a run.

    If a rank runs out of memory, its error ends the other ranks too, so none waits for it.

    Args:
        job: the run; nothing is written into its folder.
        size: samples per batch and rank.
        memory_gib: GiB of address space that each rank may use; None for no limit.
    """
    try:
        return on_ranks(job.run, _train, (job, size, memory_gib))[0]
    except (LaunchError, MemoryError, RuntimeError) as error:
        if not any(text in f"{type(error).__name__}: {error}" for text in _OUT_OF_MEMORY):
            raise
        return Fit.TOO_LARGE
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _train(job: Job, size: int, memory_gib: float | None) -> Fit:
    section = job.run.data.train
    assert isinstance(section, LoaderSection)
    data = replace(job.run.data, train=replace(section, batch_size=size))
    run = replace(job.run, data=data, run_dir="", hooks={}, schedulers=[])
    with prepared(job), _limited(memory_gib):
        parts = build_parts(run, ("train",))
        loader = parts["train_loop"].dataloader
        if len(loader.dataset) < size * num_data_ranks(parts["model"]):
            return Fit.TOO_FEW_SAMPLES
        loop = IterTrainLoop(loader, max_steps=_STEPS, sanity_val=False)
        Runner(parts["model"], loop, optim_wrapper=parts["optim_wrapper"], hooks=()).train()
    return Fit.FITS


@contextmanager
def _limited(memory_gib: float | None) -> Iterator[None]:
    """Limit the memory of this process, so that the CPU runs out of memory like a GPU."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if memory_gib is not None:
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_gib * 2**30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def largest_batch_size(
    fits: Callable[[int], Fit], start: int, most: int | None = None
) -> tuple[int, Fit]:
    """Return the largest size that fits, 0 if none does, and why no larger one was chosen.

    Doubles or halves the size until the limit lies between two sizes, and then halves the interval
    until it is at most an eighth of the size.

    Args:
        fits: tries a size.
        start: the first size to try.
        most: the largest size to try.
    """
    good, bad, reason = 0, 0, Fit.FITS
    size = min(start, most or start)
    while size:
        result = fits(size)
        if result is Fit.FITS:
            good = size
        else:
            bad, reason = size, result
        if bad and bad - good <= max(1, good // 8):
            break
        if not bad:
            if good == most:
                break
            size = min(2 * good, most or 2 * good)
        else:
            size = (good + bad) // 2 if good else bad // 2
    return good, reason
