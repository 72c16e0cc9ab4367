"""Back-ends: object collectives built on five hooks, over threads that copy, and over gloo."""

import json
import pickle
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from calls import outcome
from marks import slow
from ranks import run_ranks

from stepwrap.collectives import (
    BaseDistBackend,
    CollectiveError,
    NonDist,
    TensorBaseDistBackend,
    TorchCPUDist,
    TorchCUDADist,
    TorchDist,
)

PAYLOADS = [None, "x", list(range(300)), {"a": [1, None]}, b"\0" * 100_000]


class _Hub:
    """Exchange tensors between the threads that act as ranks."""

    def __init__(self, world_size: int) -> None:
        self.slots: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=20)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


class _NumpyDist(TensorBaseDistBackend):
    """A back-end that never writes to its arguments."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self.hub = hub
        self.own_rank = rank
        self.encoded: list[Any] = []

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def rank(self) -> int:
        return self.own_rank

    @property
    def world_size(self) -> int:
        return len(self.hub.slots)

    def _object_to_tensor(self, value: Any) -> tuple[Any, Any]:
        self.encoded.append(value)
        data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        return data, np.array(len(data))

    def _tensor_to_object(self, tensor: Any, size: int) -> Any:
        assert type(size) is int
        return pickle.loads(tensor[:size].tobytes())

    def _pad_tensor(self, tensor: Any, max_size: int) -> Any:
        assert type(max_size) is int
        # A size that is too small raises "negative dimensions".
        return np.concatenate([tensor, np.zeros(max_size - len(tensor), np.uint8)])

    def _all_gather(self, tensor: Any) -> list[Any]:
        arrays = self.hub.exchange(self.rank, tensor)
        assert len({array.shape for array in arrays}) == 1
        return [np.copy(array) for array in arrays]

    def _broadcast(self, tensor: Any, src: int) -> Any:
        return self._all_gather(tensor)[src]


class _CopyingTorchDist(_NumpyDist):
    def _object_to_tensor(self, value: Any) -> tuple[Any, Any]:
        data, size = super()._object_to_tensor(value)
        return torch.from_numpy(data.copy()), torch.tensor([int(size)])

    def _tensor_to_object(self, tensor: Any, size: int) -> Any:
        return super()._tensor_to_object(tensor.numpy(), size)

    def _pad_tensor(self, tensor: Any, max_size: int) -> Any:
        return torch.cat([tensor, torch.zeros(max_size - len(tensor), dtype=torch.uint8)])

    def _all_gather(self, tensor: Any) -> list[Any]:
        tensors = self.hub.exchange(self.rank, tensor)
        assert len({tensor.shape for tensor in tensors}) == 1
        return [tensor.clone() for tensor in tensors]


class _JsonDist(_NumpyDist):
    """Encode as JSON, in which None is longer than a digit."""

    def _object_to_tensor(self, value: Any) -> tuple[Any, Any]:
        data = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        return data, np.array(len(data))

    def _tensor_to_object(self, tensor: Any, size: int) -> Any:
        return json.loads(tensor[:size].tobytes())


class _RefusingDist(_NumpyDist):
    """Fail on rank 1 to decode one word."""

    def _tensor_to_object(self, tensor: Any, size: int) -> Any:
        value = super()._tensor_to_object(tensor, size)
        if self.rank == 1 and value == "poison":
            raise LookupError("no such word")
        return value


def _run_threads(
    kind: type[_NumpyDist], world_size: int, work: Callable[[_NumpyDist], Any]
) -> list[Any]:
    hub = _Hub(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: work(kind(hub, rank)), range(world_size)))


@pytest.mark.parametrize("kind", [_NumpyDist, _CopyingTorchDist])
@pytest.mark.parametrize("src", [0, 1])
def test_broadcast_without_aliasing(kind: type[_NumpyDist], src: int) -> None:
    """Longer, shorter and equal payloads and None, over a back-end that works out of place."""

    def work(backend: _NumpyDist) -> None:
        for payload in PAYLOADS:
            for other in PAYLOADS:
                sent = payload if backend.rank == src else other
                received = backend.broadcast_object(sent, src)
                assert received == payload
                assert (received is sent) or backend.rank != src or payload is None

    _run_threads(kind, 2, work)


def test_an_object_may_be_shorter_than_none() -> None:
    def work(backend: _NumpyDist) -> None:
        for payload in (7, "", None, "long" * 100):
            assert backend.broadcast_object(payload if backend.rank else None, 1) == payload
            assert backend.all_gather_object(payload if backend.rank else 7) == [7, payload]

    _run_threads(_JsonDist, 2, work)


@pytest.mark.parametrize("kind", [_NumpyDist, _CopyingTorchDist])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gather_of_any_sizes(kind: type[_NumpyDist], world_size: int) -> None:

    def work(backend: _NumpyDist) -> None:
        for entry in PAYLOADS:
            sent = [entry] * backend.rank
            gathered = backend.all_gather_object(sent)
            assert gathered == [[entry] * rank for rank in range(world_size)]
            assert gathered[backend.rank] is not sent

    _run_threads(kind, world_size, work)


def test_objects_of_receiving_ranks_are_ignored() -> None:
    """A lambda is allowed there, because it is never encoded."""

    def work(backend: _NumpyDist) -> Any:
        sent = "text" if backend.rank == 1 else (lambda: None)
        assert backend.broadcast_object(sent, 1) == "text"
        return [value for value in backend.encoded if value is not None]

    assert _run_threads(_NumpyDist, 2, work) == [[], ["text"]]


def _fail_then_continue(backend: BaseDistBackend) -> list[tuple[str, str]]:
    """Let rank 1 fail in both collectives, and check after each that the ranks are in step."""
    bad = threading.Lock() if backend.rank == 1 else "text"
    outcomes = [outcome(backend.all_gather_object, bad)]
    assert backend.all_gather_object(backend.rank) == list(range(backend.world_size))
    outcomes.append(outcome(backend.broadcast_object, bad, 1))
    assert backend.broadcast_object(backend.rank, 1) == 1
    return outcomes


def test_an_encoding_error_on_one_rank_raises_on_all() -> None:
    for outcomes in _run_threads(_NumpyDist, 3, _fail_then_continue):
        for kind, text in outcomes:
            assert kind == "CollectiveError"
            assert re.search(r"rank 1: TypeError: .*_thread\.lock", text)
            assert "rank 0" not in text


def test_a_decoding_error_on_one_rank_raises_on_all() -> None:
    def work(backend: _NumpyDist) -> list[tuple[str, str]]:
        outcomes = [
            outcome(backend.all_gather_object, "poison"),
            outcome(backend.broadcast_object, "poison", 0),
        ]
        assert backend.all_gather_object("bread") == ["bread"] * 3
        return outcomes

    text = "an object cannot be sent or received on rank 1: LookupError: no such word"
    for outcomes in _run_threads(_RefusingDist, 3, work):
        assert outcomes == [("CollectiveError", text)] * 2


@pytest.mark.parametrize("src", [-1, 2, "0", None])
def test_a_source_that_is_not_a_rank_is_refused(src: Any) -> None:
    for kind, text in _run_threads(_NumpyDist, 2, lambda b: outcome(b.broadcast_object, 1, src)):
        assert kind == "ValueError"
        assert re.search(f"src must .* 2, got {src!r}$", text)


def test_an_incomplete_back_end_cannot_be_made() -> None:
    class Incomplete(NonDist):
        rank = BaseDistBackend.rank  # type: ignore[assignment]

    for kind in (BaseDistBackend, TensorBaseDistBackend, Incomplete):
        with pytest.raises(TypeError, match="abstract"):
            kind()


@pytest.mark.parametrize("kind", [NonDist, TorchDist, TorchCPUDist])
def test_one_process(kind: type[BaseDistBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a launcher's variables set but no group."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    backend, lock = kind(), threading.Lock()
    assert (backend.is_initialized, backend.rank, backend.world_size) == (False, 0, 1)
    assert backend.all_gather_object(lock)[0] is lock
    assert backend.broadcast_object(lock, 0) is lock
    if kind is NonDist:
        assert backend.broadcast_object(lock, 7) is lock
    else:
        with pytest.raises(ValueError, match=r"src must .* got 7"):
            backend.broadcast_object(lock, 7)


def _use(kind: Callable[[], BaseDistBackend]) -> list[tuple[str, str]]:
    backend, rank, size = kind(), dist.get_rank(), dist.get_world_size()
    assert (backend.is_initialized, backend.rank, backend.world_size) == (True, rank, size)
    for src in range(size):
        for payload in [b"1", list(range(300)), bytes(5_000_000), None]:
            sent = payload if rank == src else threading.Lock()
            assert backend.broadcast_object(sent, src) == payload
    lists = [list(range(r)) for r in range(size)]
    assert backend.all_gather_object(lists[rank]) == lists
    # They are copies: changes on one rank do not reach another.
    gathered = backend.all_gather_object({"tensor": torch.zeros(3)})
    for at, received in enumerate(gathered):
        received["tensor"] += rank + at
    assert [received["tensor"][0].item() for received in gathered] == [
        rank + at for at in range(size)
    ]
    assert outcome(backend.broadcast_object, 1, size)[0] == "ValueError"
    return _fail_then_continue(backend)


@pytest.mark.parametrize("world_size", [2, *slow(4)])
@pytest.mark.parametrize("kind", [TorchDist, TorchCPUDist])
def test_gloo(kind: type[BaseDistBackend], world_size: int) -> None:
    for outcomes in run_ranks(_use, world_size, kind):
        for name, text in outcomes:
            assert name == "CollectiveError"
            assert "rank 1" in text
            assert "cannot pickle '_thread.lock' object" in text


def _use_a_sub_group() -> tuple[Any, ...]:
    group = dist.new_group([1, 3])
    backend = TorchDist(group)
    if dist.get_rank() not in (1, 3):
        return tuple(outcome(getattr, backend, name)[0] for name in ("rank", "world_size"))
    received = backend.broadcast_object(dist.get_rank(), 1)
    refused = outcome(backend.broadcast_object, None, 3)
    return (
        backend.rank,
        backend.world_size,
        backend.all_gather_object(dist.get_rank())[backend.rank],
        received,
        refused,
    )


def test_a_sub_group_numbers_its_own_ranks() -> None:
    """`samples[rank::world_size]` then omits no sample."""
    outside, rank_0, _, second = run_ranks(_use_a_sub_group, 4)
    assert outside == ("ValueError", "ValueError")
    refused = ("ValueError", "src must be a rank below 2, got 3")
    assert rank_0 == (0, 2, 1, 3, refused)
    assert second == (1, 2, 3, 3, refused)


def _lose_the_others() -> tuple[str, str]:
    if dist.get_rank() != 0:
        return "", ""
    return outcome(TorchCPUDist().all_gather_object, 1)


@pytest.mark.slow
def test_a_rank_that_never_comes_ends_in_an_error() -> None:
    name, text = run_ranks(_lose_the_others, 2, group_timeout_s=1)[0]
    assert name == "CollectiveError"
    assert "all_gather" in text


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_cuda_needs_nccl() -> None:
    with pytest.raises(RuntimeError, match="needs torch built with NCCL"):
        TorchCUDADist()


@pytest.mark.gpu
def test_cuda_with_ranks_that_share_a_device() -> None:
    for outcomes in run_ranks(_use, 2, TorchCUDADist):
        assert [name for name, _ in outcomes] == ["CollectiveError"] * 2


def test_the_error_keeps_the_cause() -> None:
    def work(backend: _NumpyDist) -> type:
        with pytest.raises(CollectiveError) as error:
            backend.all_gather_object(threading.Lock() if backend.rank else 1)
        return type(error.value.__cause__)

    assert _run_threads(_NumpyDist, 2, work) == [type(None), TypeError]
