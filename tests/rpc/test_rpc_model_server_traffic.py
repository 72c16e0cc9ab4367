"""The model server sends only changed tensors; counted as bytes of packed calls."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import model_client, run_group, run_world

from stepwrap.rpc import RpcGroup, World
from stepwrap.rpc.calls import calls as _calls

MEGABYTE = 2**20
LITTLE = 2000


class Traffic:
    """Count the bytes of messages that this process sends and receives."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def take(self) -> tuple[int, int]:
        """Return the bytes sent and received since the last call."""
        counts = self.sent, self.received
        self.sent = self.received = 0
        return counts


@contextmanager
def counted() -> Iterator[Traffic]:
    traffic, pack, unpack = Traffic(), _calls.pack, _calls.unpack

    def size(parcel: Any) -> int:
        payload, buffers = parcel
        return len(payload) + sum(buffer.nbytes for buffer in buffers if isinstance(buffer, Tensor))

    def counting_pack(value: Any) -> Any:
        parcel = pack(value)
        traffic.sent += size(parcel)
        return parcel

    def counting_unpack(parcel: Any) -> Any:
        traffic.received += size(parcel)
        return unpack(parcel)

    _calls.pack, _calls.unpack = counting_pack, counting_unpack
    try:
        yield traffic
    finally:
        _calls.pack, _calls.unpack = pack, unpack


class Tuned(nn.Module):
    """A frozen backbone of one megabyte and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(512, 512, bias=False)
        self.head = nn.Linear(8, 8)

    def tune(self) -> None:
        with torch.no_grad():
            self.head.weight.add_(1)


def is_equal(model: nn.Module, other: nn.Module) -> bool:
    other_state = other.state_dict()
    return all(value.equal(other_state[name]) for name, value in model.state_dict().items())


def _frozen(world: World, group: RpcGroup) -> list[tuple[int, int]]:
    server = model_client(group)
    counts = []
    if world.rank != 1:
        return []
    with counted() as traffic:
        model, other = Tuned(), Tuned()

        def count(is_done: bool) -> None:
            assert is_done
            counts.append(traffic.take())

        traffic.take()
        count(server.push(model))
        count(server.pull(other))
        model.tune()
        count(server.push(model))
        count(server.pull(other))
        assert is_equal(model, other)
        count(server.push(model))
        count(server.pull(other))
        count(server.pull(other))
        # The client is several versions behind and has changed its own model.
        for _ in range(3):
            model.tune()
            assert server.push(model)
        other.backbone.weight.data.fill_(3)
        traffic.take()
        count(server.pull(other))
        assert is_equal(model, other)
    return counts


def test_a_frozen_backbone_travels_once() -> None:
    _, counts, _ = run_group(_frozen, 3)
    for sent, received in (counts[0][::-1], counts[1]):
        assert sent < LITTLE
        assert received > MEGABYTE
    for sent, received in counts[2:]:
        assert sent + received < LITTLE


def _trained(world: World, group: RpcGroup) -> list[tuple[int, int]]:
    server = model_client(group)
    counts = []
    if world.rank != 1:
        return []
    with counted() as traffic:
        model, other = Tuned(), Tuned()
        for _ in range(4):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            assert server.push(model)
        assert server.pull(other)
        assert is_equal(model, other)
        other.tune()
        assert server.push(other)
        # After a refused push, tensors that were changed here are pulled as well.
        model.backbone.weight.data.fill_(3)
        assert not server.push(model)
        assert is_equal(model, other)
        for _ in range(20):
            traffic.take()
            assert server.push(model)
            counts.append(traffic.take())
        assert server.pull(other)
        assert is_equal(model, other)
    return counts


def test_tensors_that_always_change_are_compared_from_time_to_time() -> None:
    """A model that is not trained any more is soon not sent any more."""
    _, counts, _ = run_group(_trained, 3)
    sizes = [sent + received for sent, received in counts]
    assert max(sizes[16:]) < LITTLE


def _refused(world: World, group: RpcGroup) -> list[tuple[int, int]]:
    server = model_client(group)
    counts = []
    if world.rank != 1:
        return []
    with counted() as traffic:
        model, other = Tuned(), Tuned()
        assert server.push(model)
        assert server.pull(other)
        for pull_on_fail in (True, False):
            model.tune()
            assert server.push(model)
            other.head.bias.data.fill_(7)
            traffic.take()
            assert not server.push(other, pull_on_fail=pull_on_fail)
            assert server.pull(other)
            counts.append(traffic.take())
            assert is_equal(model, other)
    return counts


def test_tensors_sent_by_a_refused_push_are_loaded_again() -> None:
    _, counts, _ = run_group(_refused, 3)
    for sent, received in counts:
        assert sent + received < 2 * LITTLE


@run_world(3)
def test_states_pushed_past_the_model_server_are_pulled(world: World, group: RpcGroup) -> None:
    server = model_client(group)
    plain_server = group.get_paired("server_o_server").to_here()
    model, other = Tuned(), Tuned()
    if world.rank == 1:
        assert server.push(model)
        assert server.pull(other)
        model.tune()
        # Push whole states past the accessor.
        assert plain_server.push("model", model.state_dict(), 2, 1)
        assert server.pull(other)
        assert other.pp_version == 2
        assert is_equal(model, other)
        # The state must map names to tensors.
        with pytest.raises(TypeError, match="state must be a mapping"):
            plain_server.push("model", 5, 3, 2)
        # Other names: the whole state is sent, without the removed tensors.
        del model.head, other.head
        assert plain_server.push("model", model.state_dict(), 3, 2)
        assert server.pull(other)
        assert other.pp_version == 3
        assert server.push(other)
        small = nn.Linear(2, 2)
        assert plain_server.push("model", small.state_dict(), 5, 4)
        newest = nn.Linear(2, 2)
        assert server.pull(newest)
        assert is_equal(small, newest)
    group.barrier()
    answer = plain_server.pull("model")
    assert answer is not None
    assert (sorted(answer[0]), answer[1]) == (["bias", "weight"], 5)


def _special(world: World, group: RpcGroup) -> bool:
    server = model_client(group)
    if world.rank != 1:
        return True
    with counted() as traffic:
        model, other = Tuned(), Tuned()
        model.backbone.weight.data.fill_(torch.nan)
        model.head.bias.data.fill_(0.0)
        assert server.push(model)
        assert server.pull(other)
        traffic.take()
        model.head.bias.data.neg_()
        assert server.push(model)
        # NaN compares as unchanged; the sign of zero has changed.
        assert traffic.take()[0] < LITTLE
        assert server.pull(other)
        assert other.head.bias.signbit().all()
        # Copies are freed with the model.
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None
    return True


def test_changes_are_found_bit_by_bit_and_models_may_go() -> None:
    assert run_group(_special, 3) == [True] * 3
