"""Training on XPUs and MPS devices: the same results as on the host, and no feature is lost.

One program for each type of device runs everything, and the tests compare what it reports.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pretend

PROGRAM = Path(__file__).parent / "train_other_device.py"
KINDS = ("xpu", "mps")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    programs = {
        kind: subprocess.Popen(
            [sys.executable, str(PROGRAM), kind],
            cwd=folder,
            env={**os.environ, "PRETEND_CUDA": "2", "PRETEND_KIND": kind},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for kind, folder in folders.items()
    }
    try:
        for program in programs.values():
            _, errors = program.communicate(timeout=240)
            assert program.returncode == 0, errors
    finally:
        for program in programs.values():
            program.kill()
    return {
        kind: json.loads((folder / "report.json").read_text()) for kind, folder in folders.items()
    }


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def report(reports: dict[str, dict[str, Any]], kind: str) -> dict[str, Any]:
    for entry in reports[kind].values():
        assert not isinstance(entry, str), entry
    return reports[kind]


def test_full_precision_equals_the_host(report: dict[str, Any], kind: str) -> None:
    host, device = (report["full_precision"][name] for name in ("cpu", kind))
    for name in ("losses", "norms", "metrics"):
        assert device[name] == pytest.approx(host[name], rel=1e-5)
    assert device["outputs"] == [f"torch.float32 on {kind}"]


def test_autocast_is_on(report: dict[str, Any], kind: str) -> None:
    usual, half = report["full_precision"][kind], report["bfloat16"]
    assert half["outputs"] == [f"torch.bfloat16 on {kind}"]
    assert half["losses"] != usual["losses"]
    assert half["losses"] == pytest.approx(usual["losses"], rel=0.01)


def test_an_update_that_overflows_is_skipped(report: dict[str, Any], kind: str) -> None:
    half = report["float16"]
    assert half["outputs"] == [f"torch.float16 on {kind}"]
    scales, changed = zip(*half["updates"], strict=True)
    # The scale halves with each skipped update, from 2**19.
    overflows = changed.index(True)
    assert overflows > 0
    assert all(changed[overflows:])
    assert scales[: overflows + 1] == (
        *(2.0 ** (18 - update) for update in range(overflows)),
        2.0 ** (19 - overflows),
    )
    assert math.isfinite(half["losses"][-1])


def test_a_resumed_run_with_dropout_is_the_same(report: dict[str, Any]) -> None:
    resumed = report["resumed"]
    assert resumed["resumed"] == resumed["losses"]
    assert resumed["is_same"]
    assert resumed["on_host"]


def test_the_device_is_named(report: dict[str, Any], kind: str) -> None:
    # torch.mps has no names.
    assert (report["resumed"]["device"] == "Pretend") is (kind == "xpu")


def test_a_step_is_not_compiled_for_a_reason(report: dict[str, Any], kind: str) -> None:
    (message,) = report["compiled"]["messages"]
    assert f"net.0.weight is on {kind}:0; only steps on CPUs and on CUDA GPUs" in message


def test_a_config_names_the_device(report: dict[str, Any], kind: str) -> None:
    config = report["config"]
    assert config["code"] == 0
    assert math.isfinite(config["records"][-1]["loss"])
    several, other = config["problems"]
    assert f"device: is {kind}, on which a run has one process, but there are 2" in several
    assert "is cuda, but torch finds no CUDA device" in other


def test_a_batch_that_does_not_fit_frees_memory(report: dict[str, Any]) -> None:
    assert report["out_of_memory"] == {"fit": "TOO_LARGE", "calls": 1}


def test_the_random_stream_of_the_device_is_known(report: dict[str, Any], kind: str) -> None:
    streams = report["streams"]
    assert streams["hashed"][-1] == kind
    assert streams["traced"] == [kind]
    assert streams["preserved"]


def test_batches_are_copied_ahead_from_pinned_memory(report: dict[str, Any], kind: str) -> None:
    """An XPU has streams and pinned memory; MPS has neither."""
    has_streams = kind == "xpu"
    prefetched = report["prefetched"]
    assert prefetched["devices"] == [kind if has_streams else "cpu"]
    assert prefetched["is_equal"]
    assert prefetched["is_pinned"] == report["pinned_by_request"] == [has_streams] * 2


def test_waiting_while_the_device_works_does_not_count(report: dict[str, Any]) -> None:
    # The loader waits 0.2 s while the device works.
    assert report["throughput"] < 0.2


def test_the_peak_of_the_memory_is_logged(report: dict[str, Any], kind: str) -> None:
    record = report["full_precision"][kind]["last"]
    assert (record.get("xpu_peak_gib", 0.0) > 0.0) is (kind == "xpu")
