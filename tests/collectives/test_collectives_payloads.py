"""Every object collective delivers any object unchanged."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from payloads import objects, same
from ranks import on_ranks, run_ranks

from stepwrap.collectives import (
    all_gather_object,
    all_gather_object_cpu,
    all_gather_object_gpu,
    broadcast,
    collect_results,
    gather_object,
    get_dist_backend,
    obj2tensor,
    tensor2obj,
)


def _failures(objects: list[Any], tmpdir: str) -> list[str]:
    """Return the names of the collectives that changed an object."""
    rank, payload = dist.get_rank(), objects[dist.get_rank()]
    backend = get_dist_backend("torch")
    gathered = {
        "all_gather_object": all_gather_object(payload),
        "gather_object": gather_object(payload, dst=1),
        "all_gather_object_gpu": all_gather_object_gpu(payload, False),
        "all_gather_object_cpu": all_gather_object_cpu(payload, rank_zero_return_only=False),
        "through files": all_gather_object_cpu(payload, tmpdir, False),
        "back-end": backend.all_gather_object(payload),
        "collect_results": collect_results([payload], len(objects)),
    }
    expected_none = {"gather_object": rank != 1, "collect_results": rank != 0}
    failed = [
        name
        for name, answer in gathered.items()
        if not (answer is None if expected_none.get(name) else same(answer, objects))
    ]
    for src, sent in enumerate(objects):
        if not same(broadcast(payload, src), sent):
            failed.append(f"broadcast from {src}")
        if not same(backend.broadcast_object(payload, src), sent):
            failed.append(f"back-end, from {src}")
    if not same(tensor2obj(torch.cat([obj2tensor(payload), torch.zeros(1000).byte()])), payload):
        failed.append("tensor2obj")
    return failed


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sent=st.lists(objects(), min_size=2, max_size=2))
@pytest.mark.slow
def test_any_object_comes_through_every_object_collective(sent: list[Any], tmp_path: Any) -> None:
    assert run_ranks(_failures, 2, sent, str(tmp_path)) == [[], []]


@pytest.mark.slow
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sent=st.lists(objects(), min_size=4, max_size=4))
def test_any_object_comes_through_on_four_ranks(sent: list[Any], tmp_path: Any) -> None:
    assert run_ranks(_failures, 4, sent, str(tmp_path)) == [[]] * 4


@on_ranks(2)
def test_gathered_objects_are_copies() -> None:
    """Each rank can write to the received objects without changing another rank's."""
    are_copies = []
    for size in (10, 5_000, 500_000):
        sent = {"t": torch.zeros(size), "a": np.zeros(size), "same": None}
        sent["same"] = sent["t"]
        gathered = all_gather_object(sent)
        for number, received in enumerate(gathered):
            received["t"] += number + 1
            received["a"] += dist.get_rank() + 1
        dist.barrier()
        are_copies.append(
            all(bool((received["t"] == n + 1).all()) for n, received in enumerate(gathered))
            and all(bool((received["a"] == dist.get_rank() + 1).all()) for received in gathered)
            and all(received["same"] is received["t"] for received in gathered)
            and not sent["t"].any()
            and not sent["a"].any()
        )
    assert are_copies == [True] * 3


def _send_dtypes_that_torch_cannot_pickle() -> list[str]:
    names = ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64")
    sent = {name: torch.tensor([[1, 2, 3]]).to(getattr(torch, name)) for name in names}
    return [
        name
        for gathered in all_gather_object(sent)
        for name, tensor in gathered.items()
        if tensor.dtype != sent[name].dtype or tensor.tolist() != [[1, 2, 3]]
    ]


def test_dtypes_that_torch_itself_cannot_pickle() -> None:
    assert run_ranks(_send_dtypes_that_torch_cannot_pickle, 2) == [[], []]


@on_ranks(2)
def test_memory_format_and_attributes_are_kept_and_only_the_view_is_sent() -> None:
    image = torch.rand(2, 3, 64, 64).to(memory_format=torch.channels_last)
    view = torch.zeros(10_000_000)[:3]
    with_attribute = torch.ones(2)
    with_attribute.note = "kept"
    gathered = all_gather_object([image, view, with_attribute])[1]
    assert [
        gathered[0].stride() == image.stride(),
        gathered[1].untyped_storage().nbytes(),
        gathered[2].note,
    ] == [True, 12, "kept"]
