"""Copy batches to a device while earlier steps run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from .sampler import find_sampler
from .tensors import TensorLoader

_END = object()


def prefetch_to_device(
    batches: Iterable[Any], device: torch.device | str, *, ahead: bool = True
) -> Iterator[Any]:
    """Return an iterator over ``batches``, copied to ``device`` if it has streams.

    The copies run on a separate stream during the current step; copies from pinned memory do not
    block this process. Tensors and objects with ``to(device, non_blocking)`` and
    ``record_stream(stream)`` are copied, also inside lists, tuples and mappings (which become
    dicts). Other objects are returned unchanged. CUDA devices and XPUs have streams; CPUs and MPS
    devices have none, and nothing is copied.

    Args:
        batches: the batches of a loader.
        device: the device of the model.
        ahead: read one batch ahead and begin to copy it. Use False if the loader has a position to
            save or draws random numbers in this process: a resumed run would differ with True.
    """
    device = torch.device(device)
    is_host = device.type in ("cpu", "meta")
    if is_host or not hasattr(torch.get_device_module(device), "Stream"):
        return _one_ahead(batches) if ahead else iter(batches)
    copies = _copies(batches, device)
    return _arriving(_one_ahead(copies) if ahead else copies, device)


def can_read_ahead(loader: Any) -> bool:
    """Return whether reading one batch ahead leaves checkpoints correct.

    It does not if the loader has a position to save or draws random numbers in this process.
    """
    if type(loader) not in (DataLoader, TensorLoader):
        return type(loader) in (list, tuple)
    by_index = find_sampler(loader) is not None
    return by_index and (loader.num_workers > 0 or type(loader) is TensorLoader)


def _one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(batches)
    batch, failure = next(iterator, _END), None
    while batch is not _END:
        following: Any = _END
        try:
            following = next(iterator, _END)
        except Exception as error:
            # The error belongs to the following batch: raise it when that is requested.
            failure = error
        yield batch
        batch = following
    if failure is not None:
        raise failure


def _copies(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield the copies of batches before they are complete, with an event for their completion."""
    module: Any = torch.get_device_module(device)
    stream = module.Stream(device)
    for batch in batches:
        user = module.current_stream(device)
        with module.stream(stream):
            copy = _copied(batch, device, user)
        yield copy, stream.record_event()


def _arriving(copies: Iterable[Any], device: torch.device) -> Iterator[Any]:
    module: Any = torch.get_device_module(device)
    for batch, arrived in copies:
        module.current_stream(device).wait_event(arrived)
        yield batch


def _copied(data: Any, device: torch.device, user: torch.Stream) -> Any:
    if hasattr(data, "record_stream"):
        copy = data.to(device, non_blocking=True)
        # Do not reuse the memory before the stream `user` has finished with it.
        copy.record_stream(user)
        return copy
    if isinstance(data, Mapping):
        return {name: _copied(entry, device, user) for name, entry in data.items()}
    if not isinstance(data, (list, tuple)) or hasattr(data, "to"):
        return data
    entries = [_copied(entry, device, user) for entry in data]
    rebuild: Any = type(data)
    return rebuild(*entries) if hasattr(data, "_fields") else rebuild(entries)
