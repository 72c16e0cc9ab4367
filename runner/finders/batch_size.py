"""Find the largest batch size that fits into memory, by short trainings with several sizes."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum

import torch

from ...loops import IterTrainLoop
from ...registry import Config, LoaderSection, RunSections
from ...wrappers.unwrap import num_data_ranks
from ..failure import LaunchError
from ..jobs import on_ranks, prepared
from ..parts import build_parts
from ..runner import Runner

# Parts of error messages that show that memory is exhausted. Linux may end the process by SIGKILL.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "MemoryError",
    "bad_alloc",
    "SIGKILL",
    # Libraries of CUDA that find no memory for their workspace.
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    # The runtime of XPUs.
    "OUT_OF_DEVICE_MEMORY",
)
_STEPS = 2


class BatchSizeFit(Enum):
    """The result of trying a batch size."""

    FITS = "fits"
    TOO_LARGE = "out of memory"
    TOO_FEW_SAMPLES = "more than the data set has for each rank"


def try_batch_size(
    config: Config,
    run: RunSections,
    *,
    size: int,
    memory_gib: float | None = None,
    debug: bool = False,
) -> BatchSizeFit:
    """Run two training updates with a batch size on every rank, and return whether it fits.

    If one rank runs out of memory, all ranks are stopped and the size counts as too large.

    Args:
        config: the config.
        run: its checked sections; nothing is written into the run's folder.
        size: samples per batch and rank.
        memory_gib: limit of each rank's address space in GiB; None for no limit.
        debug: show the log messages of every rank.
    """
    try:
        results = on_ranks(
            run, _train_briefly, *(config, run), size=size, memory_gib=memory_gib, debug=debug
        )
        return results[0]
    except (LaunchError, MemoryError, RuntimeError) as error:
        if not any(text in f"{type(error).__name__}: {error}" for text in _OUT_OF_MEMORY):
            raise
        return BatchSizeFit.TOO_LARGE
    finally:
        gc.collect()
        if torch.accelerator.is_available():
            torch.get_device_module().empty_cache()


def _train_briefly(
    config: Config, run: RunSections, *, size: int, memory_gib: float | None, debug: bool
) -> BatchSizeFit:
    section = run.data.train
    assert isinstance(section, LoaderSection)
    data = replace(run.data, train=replace(section, batch_size=size))
    run = replace(run, data=data, run_dir="", hooks={}, schedulers=[])
    with prepared(config, run, debug=debug), _limited(memory_gib):
        parts = build_parts(run, ("train",))
        loader = parts.train_loop.dataloader
        if len(loader.dataset) < size * num_data_ranks(parts.model):
            return BatchSizeFit.TOO_FEW_SAMPLES
        loop = IterTrainLoop(loader, max_steps=_STEPS, sanity_val=False)
        Runner(parts.model, loop, optim_wrapper=parts.optim_wrapper, hooks=()).train()
    return BatchSizeFit.FITS


@contextmanager
def _limited(memory_gib: float | None) -> Iterator[None]:
    """Limit the address space of this process, so that exceeding it raises an error as on a GPU."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if memory_gib is not None:
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_gib * 2**30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def largest_batch_size(
    fits: Callable[[int], BatchSizeFit], start: int, most: int | None = None
) -> tuple[int, BatchSizeFit]:
    """Return the largest tried size that fits (0 if none does) and why it is the largest.

    Doubles the size while it fits, or halves it while it does not. A bisection then ends when the
    smallest size that does not fit exceeds the returned size by at most 1/8, or by 1.
    The reason is the result of that size, or ``BatchSizeFit.FITS`` if ``most`` fits.

    Args:
        fits: called with a size; returns the result of trying it.
        start: the first size to try.
        most: the largest size to try; None for no limit.
    """
    good, bad, reason = 0, 0, BatchSizeFit.FITS
    size = min(start, most or start)
    while size:
        result = fits(size)
        if result is BatchSizeFit.FITS:
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
