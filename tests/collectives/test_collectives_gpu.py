"""Collectives with CUDA tensors: two gloo ranks on one device, and NCCL alone."""

from typing import Any

import pytest
from calls import group_of_one
from gpu_calls import call_every_helper
from ranks import run_ranks

from stepwrap.collectives import comm_device

pytestmark = pytest.mark.gpu


def test_two_gloo_ranks_share_the_device() -> None:
    for rank, answers in enumerate(run_ranks(call_every_helper, 2)):
        assert answers["devices"] == ["cpu"]
        assert answers["sum"] == ([3.0] * 3, "cuda:0")
        assert answers["mean"] == ([1.5] * 3, True)
        assert answers["dict"] == {
            "a": ([3.0] * 3, "cuda"),
            "b": ([3.0] * 3, "cuda"),
            "c": ([3.0] * 3, "cpu"),
        }
        assert answers["scalars"] == {"a": 1.5, "b": 1.5, "c": 1.0}
        assert answers["gathered"] == [([1j] * 3, True), ([2j] * 3, True)]
        assert answers["on_0"] == ([[True] * 3] * 2 if rank == 0 else [])
        assert answers["padded"] == ([1, 2], True)


def _run_nccl(backend: str | None) -> tuple[dict[str, Any], str]:
    with group_of_one(backend):
        return call_every_helper(), comm_device().type


@pytest.mark.parametrize(
    ("backend", "device"), [("nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu"), (None, "cpu")]
)
def test_nccl_alone(backend: str | None, device: str) -> None:
    answers, used = run_ranks(_run_nccl, 1, backend, init=False)[0]
    assert used == device
    assert answers["sum"] == ([1.0] * 3, "cuda:0")
    assert answers["dict"]["b"] == ([1] * 3, "cuda")
    assert answers["scalars"] == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert answers["gathered"] == [([1j] * 3, True)]
