"""Profiles of steps, and statistics of the system in the records."""

from __future__ import annotations

import json
import logging
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hook_runs import new_state, train
from listeners import on
from ranks import run_ranks

from stepwrap.loops import ProfileHook, SystemHook


def test_a_profile_has_a_trace_a_table_and_the_wait_for_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(new_state(run_dir=tmp_path), [ProfileHook(skip=2, steps=3)])
    folder = tmp_path / "profile"
    events = json.loads((folder / "rank0.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "Optimizer.step#SGD.step" for event in events) == 3
    text = (folder / "costliest.txt").read_text()
    assert text.strip() in caplog.text
    head, columns, *rows, trace = text.strip().splitlines()
    assert re.fullmatch(r"profile of steps 3 to 5: [\d.]+ s, \d+% waiting for data", head)
    assert columns.split() == ["operation", "calls", "CPU", "ms", "share"]
    assert len(rows) == 10
    assert all(len(row) <= 80 for row in (columns, *rows))
    times = [float(row.split()[-2]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert trace.endswith(str(folder / "rank0.json"))


def test_a_short_training_is_profiled_to_its_end_or_logs_why_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(new_state(run_dir=tmp_path / "a"), [ProfileHook(skip=0, steps=99)], epochs=1)
    text = (tmp_path / "a" / "profile" / "costliest.txt").read_text()
    assert text.startswith("profile of steps 1 to 4")
    assert "training ended" not in caplog.text
    train(new_state(run_dir=tmp_path / "b"), [ProfileHook(skip=4)], epochs=1)
    assert re.search("profiled: .*step 4, .*after step 4", caplog.text)
    assert not (tmp_path / "b" / "profile").exists()
    train(new_state(run_dir=tmp_path / "c"), [ProfileHook(skip=9)], epochs=1)
    assert re.search("profiled: .*step 4, .*after step 9", caplog.text)
    assert not (tmp_path / "c" / "profile").exists()


@pytest.mark.parametrize("settings", [{"skip": -1}, {"steps": 0}])
def test_numbers_that_are_too_small(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needs skip >= 0 and steps >= 1"):
        ProfileHook(**settings)


def _train(folder: Path) -> None:
    train(new_state(run_dir=folder), [ProfileHook(skip=1, steps=1)])


def test_each_rank_writes_a_trace(tmp_path: Path) -> None:
    run_ranks(_train, 2, tmp_path)
    names = {path.name for path in (tmp_path / "profile").iterdir()}
    assert names == {"rank0.json", "rank1.json", "costliest.txt"}


def test_records_have_memory_and_system_statistics(tmp_path: Path) -> None:
    records: list[dict[str, float]] = []
    tensors: list[torch.Tensor] = []

    def allocate(state: object) -> None:
        tensors.append(torch.ones(2**24))

    listen = on(on_log=lambda state, record: records.append(dict(record)), on_update=allocate)
    train(new_state(run_dir=tmp_path), [SystemHook(), listen])
    assert {"rss_gib", "cpu_cores", "disk_free_gib"} <= records[0].keys()
    # Between two records two tensors of 64 MiB are allocated.
    memory = [record["rss_gib"] for record in records]
    assert all(later - earlier > 0.1 for earlier, later in pairwise(memory))
    assert all(record["cpu_cores"] > 0 for record in records)
    assert all(record["disk_free_gib"] > 0 for record in records)
