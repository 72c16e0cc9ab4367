"""Python objects across ranks: any picklable object travels as bytes in a tensor."""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ._call import calling
from .errors import CollectiveError
from .process import comm_device, get_rank, live_world_size, place_in_group

T = TypeVar("T")


def broadcast(obj: T, src: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return the object of rank `src` on every rank; every rank must call this.

    The source gets its own object back, the others a copy; what they pass is ignored. CUDA tensors
    inside arrive on the CPU. Without a process group it is the identity.

    Raises:
        ValueError: `src` is no rank of the group.
        CollectiveError: on every rank, when the object cannot be pickled on the source or
            unpickled on some rank; or when a rank does not take part.
    """
    place_in_group(src, group)
    if live_world_size(group) == 1:
        return obj
    device = comm_device(group)
    is_source = dist.get_rank() == src
    parcel = _pack(obj) if is_source else _Parcel(b"")
    with calling("broadcast", group):
        header = torch.tensor(parcel.header(), dtype=torch.int64, device=device)
        dist.broadcast(header, src, group)
        failed, size = header.tolist()
        data = _to_tensor(parcel.data, size).to(device)
        dist.broadcast(data, src, group)
    _raise_failures({src: _to_bytes(data)} if failed else {}, parcel)
    if is_source:
        _unpack_together([], group)
        return obj
    copy: T = _unpack_together([_to_bytes(data)], group)[0]
    return copy


def all_gather_object(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks, in rank order, on every rank; every rank must call this.

    All are copies, the own one too; CUDA tensors inside arrive on the CPU. Without a process group
    the list holds the object itself.

    Raises:
        CollectiveError: on every rank, when some rank's object cannot be pickled or unpickled; or
            when a rank does not take part.
    """
    world_size = live_world_size(group)
    if world_size == 1:
        return [obj]
    device = comm_device(group)
    parcel = _pack(obj)
    with calling("all_gather_object", group):
        header = torch.tensor(parcel.header(), dtype=torch.int64, device=device)
        headers = [torch.empty_like(header) for _ in range(world_size)]
        dist.all_gather(headers, header, group)
        failed, sizes = torch.stack(headers).T.tolist()
        data = _to_tensor(parcel.data, max(sizes)).to(device)
        parts = [torch.empty_like(data) for _ in range(world_size)]
        dist.all_gather(parts, data, group)
    texts = [_to_bytes(part[:size]) for part, size in zip(parts, sizes, strict=True)]
    _raise_failures({rank: texts[rank] for rank in range(world_size) if failed[rank]}, parcel)
    return _unpack_together(texts, group)


def gather_object(obj: T, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """Return the objects of all ranks, in rank order, on rank `dst` and None on the others."""
    place_in_group(dst, group, "dst")
    gathered = all_gather_object(obj, group)
    return gathered if get_rank() == dst or live_world_size(group) == 1 else None


@dataclass(frozen=True)
class _Parcel:
    """A pickle, or the text of the error that pickling raised: peers then raise it too."""

    data: bytes
    error: Exception | None = None

    def header(self) -> list[int]:
        return [int(self.error is not None), len(self.data)]


def _pack(obj: object) -> _Parcel:
    try:
        return _Parcel(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    # Whatever __reduce__ raises, the other ranks are waiting.
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return _Parcel(text.encode(errors="replace"), error)


class _Unpickler(pickle.Unpickler):
    """Loads tensors onto the CPU: the sender's CUDA device may not exist here."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        return super().find_class(module_name, global_name)


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _to_tensor(data: bytes, size: int) -> torch.Tensor:
    """Return the bytes, padded with zeros to `size`, as a uint8 tensor that owns its memory."""
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def _to_bytes(data: torch.Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def _raise_failures(failures: dict[int, bytes], own: _Parcel) -> None:
    if failures:
        texts = [f"rank {rank}: {text.decode()}" for rank, text in failures.items()]
        raise CollectiveError(f"cannot pickle the object of {'; '.join(texts)}") from own.error


def _unpack_together(texts: Sequence[bytes], group: dist.ProcessGroup | None) -> list[Any]:
    """Unpickle on every rank, or raise on every rank when one of them cannot."""
    objects: list[Any] = []
    cause: Exception | None = None
    try:
        objects += [_Unpickler(io.BytesIO(text)).load() for text in texts]
    # A class that cannot be imported on one rank only; the others wait in the reduction below.
    except Exception as error:
        cause = error
    failed_rank = torch.tensor(dist.get_rank() if cause else -1, device=comm_device(group))
    with calling("unpickling", group):
        dist.all_reduce(failed_rank, dist.ReduceOp.MAX, group)
    if cause is not None:
        raise CollectiveError(
            f"rank {dist.get_rank()} cannot unpickle what it received: "
            f"{type(cause).__name__}: {cause}"
        ) from cause
    if failed_rank.item() >= 0:
        raise CollectiveError(f"rank {failed_rank.item()} cannot unpickle what it received")
    return objects
