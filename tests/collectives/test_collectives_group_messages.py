"""Messages between two ranks of a group."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from calls import HERE, outcome
from group_calls import assert_same, get_members
from ranks import on_ranks, run_ranks
from tensors_by_rank import DTYPES, get_values

from stepwrap.collectives import CollectiveGroup, recent_collectives, trace_collectives


@on_ranks(4)
def test_every_dtype_is_sent_in_a_part_of_the_ranks() -> None:
    group, is_member = get_members([1, 3])
    if not is_member:
        return
    rank = dist.get_rank()
    for dtype in DTYPES:
        sent, target = get_values(7, dtype), get_values(0, dtype)
        if rank == 1:
            group.send(sent, 3)
            group.isend(sent, 3, tag=5).wait()
            continue
        # The tensors are not contiguous. The sender is given or any; its global rank is returned.
        for src, tag, later in ((1, 0, False), (None, 5, True)):
            target = get_values(0, dtype)
            if later:
                handle = group.irecv(target, src, tag)
                assert (handle.wait(), handle.wait()) == (1, 1)
                assert handle.is_completed()
            else:
                assert group.recv(target, src, tag) == 1
            assert_same(target, sent)
    group.destroy()


def _receive_from_any() -> list[int]:
    group = CollectiveGroup.create()
    rank = dist.get_rank()
    if rank:
        # Sent by both calls, and received in another order of the tags.
        later = group.isend(torch.tensor([rank]), 0, tag=2)
        group.send(torch.tensor([10 * rank]), 0, tag=1)
        later.wait()
        group.destroy()
        return []
    senders = []
    for tag, factor in ((1, 10), (2, 1)):
        for later in (False, True):
            target = torch.zeros(1, dtype=torch.int64)
            sender = group.irecv(target, tag=tag).wait() if later else group.recv(target, tag=tag)
            assert target.item() == factor * sender
            senders.append(sender)
        assert sorted(senders[-2:]) == [1, 2]
    group.destroy()
    return senders


def test_any_sender_is_named() -> None:
    run_ranks(_receive_from_any, 3)


@on_ranks(2)
def test_complex_views_and_parameters_are_received() -> None:
    group = CollectiveGroup.create()
    other = 1 - dist.get_rank()
    number = torch.tensor([complex(1, 2), complex(3, 4)])
    buffer = torch.zeros(2, dtype=torch.complex64)
    weight = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
    for target in (buffer.conj(), weight):
        work = group.isend(number.conj(), other)
        assert group.irecv(target, other).wait() == other
        work.wait()
    assert buffer.tolist() == [1 + 2j, 3 + 4j]
    assert weight.tolist() == [1 - 2j, 3 - 4j]
    group.destroy()


MISTAKES = [
    ("send", (torch.ones(1), 2), "ValueError", "dst must be a rank of the group [0, 1], got 2"),
    ("isend", ([1.0], 1), "TypeError", "tensor must be a torch.Tensor, got list"),
    ("send", (torch.ones(1), 0), "ValueError", "dst must not be this process's own rank, got 0"),
    ("send", (torch.ones(1), 1, -1), "ValueError", "tag must not be negative, got -1"),
    ("recv", (torch.ones(1), 7), "ValueError", "src must be a rank of the group [0, 1], got 7"),
    ("irecv", (torch.ones(1), 0), "ValueError", "src must not be this process's own rank, got 0"),
    ("recv", (torch.ones(1).expand(3),), "ValueError", "tensor must not be expanded"),
    ("irecv", (torch.eye(2).to_sparse(),), "ValueError", "tensor must be a dense"),
]


def _mistake_messages() -> list[tuple[str, str]]:
    group = CollectiveGroup.create()
    alone, is_member = get_members([0])
    endings = []
    if is_member:
        endings = [outcome(getattr(group, name), *call_args) for name, call_args, _, _ in MISTAKES]
        endings.append(outcome(alone.recv, torch.ones(1)))
    # No message was sent.
    group.barrier()
    return endings


def test_mistakes_are_found_before_anything_is_sent() -> None:
    *endings, last_ending = run_ranks(_mistake_messages, 2)[0]
    for (kind, text), (_, _, expected, phrase) in zip(endings, MISTAKES, strict=True):
        assert kind == expected
        assert phrase in text
    assert last_ending[0] == "ValueError"
    assert re.search("another member.*only rank 0$", last_ending[1])


def _wait_in_vain(later: bool) -> str:
    group = CollectiveGroup.create(timeout_s=1)
    text = ""
    if dist.get_rank() == 0:
        receive = group.irecv(torch.ones(1), 1).wait if later else group.recv
        kind, text = outcome(receive) if later else outcome(receive, torch.ones(1), tag=3)
        assert kind == "CollectiveError"
    # The other rank is alive, but has sent nothing.
    dist.barrier()
    return text


@pytest.mark.parametrize(
    ("later", "call", "sender"),
    [
        (False, "group.recv()", "any rank of [0, 1] (tag 3)"),
        (True, "group.irecv.wait()", "rank 1 (tag 0)"),
    ],
)
def test_a_missing_message_names_its_sender(later: bool, call: str, sender: str) -> None:
    text = run_ranks(_wait_in_vain, 2, later)[0]
    assert text.startswith(f"{call} on rank 0 ({HERE}:")
    assert f"received nothing from {sender}. The transport (cpu:gloo" in text


def _trace_messages() -> list[str]:
    group = CollectiveGroup.create()
    trace_collectives()
    try:
        # The third rank makes no call; the other two must not wait for it.
        if dist.get_rank() == 0:
            group.isend(torch.ones(2), 1).wait()
        elif dist.get_rank() == 1:
            group.recv(torch.ones(2))
        else:
            time.sleep(0.2)
        records = recent_collectives()
        return [f"{record.name}: {record.structure} {record.state}" for record in records]
    finally:
        trace_collectives(False)


def test_messages_are_recorded_while_tracing() -> None:
    shape = "torch.float32 of shape (2,) on cpu"
    sent = f"{shape} to rank 1, tag 0 finished"
    sender, receiver, _ = run_ranks(_trace_messages, 3)
    assert sender[-2:] == [f"group.isend: {sent}", f"group.isend.wait: {sent}"]
    assert receiver[-1] == f"group.recv: {shape} from any rank of [0, 1, 2], tag 0 finished"
