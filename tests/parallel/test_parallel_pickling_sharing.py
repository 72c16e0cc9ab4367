"""Tensors by reference share memory, in any process and if loaded several times."""

from __future__ import annotations

import gc
import multiprocessing
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow
from queue_work import descriptors, ended, served, started
from shared_work import (
    add_one,
    are_same_memory,
    dump_to,
    exhaust_and_share,
    load_from,
    train_tied,
)
from tensor_families import families, numbers, touch
from torch import nn

from stepwrap.parallel import SimpleQueue, dumps, loads
from stepwrap.transport import wire as _wire

METHODS = ["spawn", "fork", "forkserver"]
Sent = Callable[[Any], Any]


def _send_bytes(value: Any) -> Any:
    return loads(dumps(value, copy_tensor=False))


def _send_over_wire(value: Any) -> Any:
    return _wire.unpack(*_wire.pack(value, copy_tensor=False))


BOTH = pytest.mark.parametrize("sent", [_send_bytes, _send_over_wire])


@pytest.fixture
def send_file_name() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@BOTH
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_all_views_are_the_same_memory(sent: Sent, data: st.DataObject) -> None:
    family = data.draw(families())
    arrived = sent(family)
    for number, (view, other) in enumerate(zip(family, arrived, strict=True)):
        assert (view.dtype, view.shape, view.stride()) == (other.dtype, other.shape, other.stride())
        touch(other, number)
        assert torch.equal(numbers(view), numbers(other))
        if view.numel():
            assert view.data_ptr() == other.data_ptr()


@BOTH
def test_twice_in_one_message_and_in_two(sent: Sent) -> None:
    tensor = torch.zeros(3)
    received, other = sent((tensor, tensor))
    assert received is other
    again = sent([tensor, received, tensor[1:]])
    again[2].add_(1)
    for value in (tensor, received, *again[:2]):
        assert value.tolist() == [0, 1, 1]


def test_both_ways_may_be_mixed() -> None:
    # Tensors keep the way in which they were first shared, by descriptor or by file name.
    left_tensor, second = torch.zeros(4), torch.zeros(4)
    by_bytes, by_wire = _send_bytes(left_tensor), _send_over_wire(second)
    for tensor, sent in ((left_tensor, _send_over_wire), (second, _send_bytes)):
        address = tensor.data_ptr()
        sent(tensor).add_(1)
        assert tensor.data_ptr() == address, "others that have the memory lost it"
        assert tensor.tolist() == [1] * 4
    assert by_bytes.tolist() == by_wire.tolist() == [1] * 4


@pytest.mark.usefixtures("send_file_name")
def test_the_strategy_that_the_user_has_chosen() -> None:
    tensor = torch.zeros(4)
    packed = _wire.pack(tensor, copy_tensor=False)
    assert packed.fds == ()
    _wire.unpack(*packed).add_(1)
    assert tensor.tolist() == [1] * 4
    assert torch.multiprocessing.get_sharing_strategy() == "file_system"


@pytest.mark.parametrize("method", METHODS)
def test_returned_tensors_are_the_same_memory(method: str) -> None:
    context = multiprocessing.get_context(method)
    given_to: Any = SimpleQueue()
    back: Any = SimpleQueue()
    # Shared before the start, so that a forked process knows it already.
    shared = torch.zeros(5).share_memory_()
    _send_over_wire(shared)
    process = started(context, add_one, given_to, back)
    fresh = torch.zeros(100_000)
    for count in (1, 2, 3):
        given_to.put([shared, fresh, fresh[7:9].view(2, 1).t()])
        arrived = back.get(60)
        assert [tensor.data_ptr() for tensor in arrived] == [
            tensor.data_ptr() for tensor in (shared, fresh, fresh[7:])
        ]
        assert (shared[0], fresh[0], fresh[8]) == (count, count, 2 * count)
    given_to.put([torch.zeros(2)])
    (made_there,) = back.get(60)
    assert made_there.tolist() == [1, 1]
    given_to.put(None)
    assert ended(process) == 0


@pytest.mark.parametrize("method", ["fork", *slow("spawn")])
def test_loaded_twice_in_a_worker(method: str) -> None:
    given_to, back, process = served(multiprocessing.get_context(method), are_same_memory)
    tensors = [torch.zeros(3), torch.ones(100, requires_grad=True), nn.Parameter(torch.ones(2))]
    for _ in range(2):
        given_to.put(tensors)
    assert back.get(60) == [True] * 3
    assert ended(process) == 0


@pytest.mark.parametrize("method", ["fork", *slow("spawn")])
def test_tied_weights(method: str) -> None:
    given_to, back, process = served(multiprocessing.get_context(method), train_tied)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    given_to.put(model)
    assert back.get(60) is True
    assert model[1].weight.eq(7).all()
    assert ended(process) == 0


@pytest.mark.parametrize("method", ["fork", *slow("spawn")])
def test_bytes_outlive_the_process_that_wrote_them(method: str, tmp_path: Path) -> None:
    # A reference is valid while a process has the memory: here the parent, which shared it first.
    tensor = torch.arange(1000.0).share_memory_()
    paths = [str(tmp_path / name) for name in ("shared", "copied")]
    process = started(multiprocessing.get_context(method), dump_to, tensor, *paths)
    assert ended(process) == 0
    shared, copied = (loads(Path(path).read_bytes()) for path in paths)
    tensor[0] = 5
    assert (shared[0], copied[0]) == (5, 0)
    assert torch.equal(copied[1:], tensor[1:])
    assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"


@pytest.mark.parametrize("method", ["fork", *slow("spawn")])
def test_bytes_are_loaded_in_another_process(method: str, tmp_path: Path) -> None:
    named, described = torch.zeros(3), torch.zeros(2, 2).share_memory_()
    path = tmp_path / "tensors"
    path.write_bytes(dumps([named, named[1:], described], copy_tensor=False))
    back: Any = SimpleQueue()
    process = started(multiprocessing.get_context(method), load_from, str(path), back)
    assert back.get(60) == [1, 2, 1]
    assert named.tolist() == [1, 2, 2]
    assert described.eq(1).all()
    assert ended(process) == 0


@pytest.mark.parametrize("share_by_descriptor", [True, False])
def test_bytes_of_freed_memory(share_by_descriptor: bool) -> None:
    tensor = torch.zeros(3)
    if share_by_descriptor:
        tensor.share_memory_()
    data = dumps(tensor, copy_tensor=False)
    if share_by_descriptor:
        del tensor
    else:
        tensor.untyped_storage()._shared_decref()
        del tensor
    with pytest.raises(OSError, match="by reference .*gone.*shared by"):
        loads(data)


@BOTH
def test_computed_tensors_are_refused(sent: Sent) -> None:
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"autograd recorded it \(MulBackward0\)"):
        sent([weight, weight * 2])
    assert sent((weight * 2).detach()).tolist() == [2, 2, 2]


@BOTH
def test_files_that_are_mapped(sent: Sent, tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(12))
    tensor = torch.from_file(str(path), shared=False, size=3)
    with pytest.raises(ValueError, match="clone"):
        sent(tensor)
    assert _wire.unpack(*_wire.pack(tensor, copy_tensor=True)).sum() == 0
    torch.save({"weight": torch.ones(3)}, path)
    assert sent(torch.load(path, mmap=True))["weight"].sum() == 3


@BOTH
def test_received_copies_can_be_passed_on(sent: Sent) -> None:
    received = _wire.unpack(*_wire.pack(torch.zeros(100_000), copy_tensor=True))
    sent(received).add_(1)
    assert received.eq(1).all()


def test_the_limit_of_open_files_is_named_by_the_sender() -> None:
    back: Any = SimpleQueue()
    process = started(multiprocessing.get_context("spawn"), exhaust_and_share, back)
    text = back.get(60)
    assert "ulimit -n" in text
    assert "by copy" in text
    assert ended(process) == 0


def test_a_failed_message_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(12))
    mapped = torch.from_file(str(tmp_path / "numbers"), shared=False, size=3)
    tensors = [torch.zeros(3).share_memory_() for _ in range(5)]
    _send_over_wire(tensors)
    gc.collect()
    before = descriptors()
    with pytest.raises(TypeError):
        _wire.pack([*tensors, (number for number in tensors)], copy_tensor=False)
    with pytest.raises(ValueError, match="mapped"):
        _wire.pack([*tensors, mapped], copy_tensor=False)
    packed = _wire.pack(tensors, copy_tensor=False)
    assert descriptors() == before + 5
    packed.close()
    assert descriptors() == before
    packed = _wire.pack(tensors, copy_tensor=False)
    with pytest.raises(struct.error):
        _wire.unpack(b"\x01", packed.fds)
    packed = _wire.pack([*tensors, _FailsToLoad()], copy_tensor=False)
    with pytest.raises(ZeroDivisionError):
        _wire.unpack(*packed)
    gc.collect()
    assert descriptors() == before


class _FailsToLoad:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)
