"""The results of all ranks in the order of the dataset."""

import os
import shutil
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any, TypeVar

import torch.distributed as dist

from ..process.ranks import live_world_size
from .agree import raise_together
from .files import all_gather_object_cpu, all_gather_object_gpu

T = TypeVar("T")

_DEVICES = ("cpu", "gpu", "npu")


def collect_results(
    results: Sequence[T],
    size: int,
    device: str = "cpu",
    tmpdir: str | os.PathLike[str] | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    remove_tmpdir: bool = False,
) -> list[T] | None:
    """Return the results of all ranks on the group's first rank; every rank must call this.

    Of ranks that took every n-th sample each: first the first results of all ranks in rank order,
    then the second ones, and so on. The other ranks get None.

    Args:
        results: this rank's results; the ranks may have different numbers of them.
        size: how many of all to return: the samplers' padding at the end is cut off.
        device: "cpu" as in `collect_results_cpu`; "gpu" or "npu" as in `collect_results_gpu`.
        tmpdir: a directory that all ranks see, for "cpu" only; default: none is needed.
        remove_tmpdir: whether to remove `tmpdir` afterwards with everything in it.

    Raises:
        NotImplementedError: no such device.
        AssertionError: a device other than "cpu" and a `tmpdir`.
        TypeError, ValueError: results that are no sequence, a negative size, or `remove_tmpdir`
            without a `tmpdir`.
        CollectiveError: see `all_gather_object_cpu`.
    """
    if device not in _DEVICES:
        raise NotImplementedError(f"device must be 'cpu' , 'gpu' or 'npu', but got {device!r}")
    if device == "cpu":
        return collect_results_cpu(results, size, tmpdir, group, remove_tmpdir=remove_tmpdir)
    if tmpdir is not None or remove_tmpdir:
        raise AssertionError(
            f"tmpdir should be None when device is {device}, and remove_tmpdir False; "
            f"got tmpdir={tmpdir!r} and remove_tmpdir={remove_tmpdir}"
        )
    return collect_results_gpu(results, size, group)


def collect_results_cpu(
    results: Sequence[T],
    size: int,
    tmpdir: str | os.PathLike[str] | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    remove_tmpdir: bool = False,
) -> list[T] | None:
    """Like `collect_results`: through the process group, or through files in `tmpdir`."""
    if remove_tmpdir and tmpdir is None:
        raise ValueError("remove_tmpdir=True needs the tmpdir that is to be removed, got None")
    _check(results, size, group)
    gathered = all_gather_object_cpu(results, tmpdir, group=group)
    if remove_tmpdir and tmpdir is not None:
        _remove(tmpdir, group)
    return None if gathered is None else _interleave(gathered, size)


def collect_results_gpu(
    results: Sequence[T], size: int, group: dist.ProcessGroup | None = None
) -> list[T] | None:
    """Like `collect_results`: through the process group, on its communication device."""
    _check(results, size, group)
    gathered = all_gather_object_gpu(results, group=group)
    return None if gathered is None else _interleave(gathered, size)


def _check(results: object, size: int, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank: what a dataset has given one rank, the others may not have got."""
    problem: Exception | None = None
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        kind = type(results).__name__
        problem = TypeError(f"results must be a list or another sequence, got {kind}")
    elif size < 0:
        problem = ValueError(f"size must not be negative, got {size}")
    raise_together(problem, group, "collect_results() ")


def _interleave(gathered: Sequence[Sequence[T]], size: int) -> list[T]:
    # An object of its own: None may be a result.
    missing: Any = object()
    turns = chain.from_iterable(zip_longest(*gathered, fillvalue=missing))
    return [result for result in turns if result is not missing][:size]


def _remove(tmpdir: str | os.PathLike[str], group: dist.ProcessGroup | None) -> None:
    """Remove the directory once; no rank goes on before it is gone."""
    problem: OSError | None = None
    if live_world_size(group) == 1 or dist.get_rank(group) == 0:
        try:
            shutil.rmtree(tmpdir)
        except FileNotFoundError:
            pass
        except OSError as error:
            problem = error
    raise_together(problem, group, "collect_results() ")
