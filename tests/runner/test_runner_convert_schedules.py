"""Converted schedules give the rates and decays of mmengine's builders at every update."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    reason = "mmengine, the extra of that name, cannot be imported"
    pytest.importorskip("mmengine.runner", reason=reason, exc_type=ImportError)

from mmengine_parts import note_values, train_theirs

from stepwrap.runner import Runner
from stepwrap.runner.convert.convert import convert_config

EPOCHS, BATCHES = 4, 3
RUN = """
custom_imports = dict(imports=["mmengine_parts"], allow_failed_imports=False)
model = dict(type="Classifier", backbone=dict(type="Backbone", width=2), classes=2)
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    sampler=dict(type="{sampler}", shuffle=False),
    dataset=dict(type="Points", size=6),
)
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=0.2, weight_decay=0.1), accumulative_counts={counts}
)
train_cfg = dict({loop})
param_scheduler = {schedules}
default_hooks = dict(checkpoint=None)
"""
BY_EPOCHS = f"by_epoch=True, max_epochs={EPOCHS}"
BY_BATCHES = f"by_epoch=False, max_iters={EPOCHS * BATCHES}"


# mmengine's classes warn if batches are counted and the first update has not come yet.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `scheduler.step")


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """Restore the log level that mmengine's runner changes."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)


def assert_same_values(
    folder: Path, schedules: list[dict[str, Any]], loop: str, counts: int = 1
) -> dict[str, Any]:
    """Train by both libraries and compare each update; return the converted config."""
    # In a loop by batches, mmengine sleeps for two seconds after each pass over finite data.
    sampler = "DefaultSampler" if loop == BY_EPOCHS else "InfiniteSampler"
    settings = {"schedules": schedules, "loop": loop, "counts": counts, "sampler": sampler}
    (folder / "mm.py").write_text(RUN.format(**settings))
    config = convert_config(folder / "mm.py", epoch_length=BATCHES).config
    _, theirs = train_theirs(folder / "mm.py", note_values)
    silent = {"progress": False, "log": False, "throughput": False}
    config |= {"device": "cpu", "run_dir": str(folder / "ours")}
    config["hooks"] = {**config["hooks"], **silent}
    runner = Runner.from_config(config)
    ours = note_values(runner.state.optim_wrapper.optimizer)
    runner.train()
    assert len(ours) == len(theirs) == EPOCHS * BATCHES // counts
    for update, (values, expected) in enumerate(zip(ours, theirs, strict=True)):
        expected = expected[: len(values)]
        assert values == pytest.approx(expected, rel=1e-12, abs=1e-15), (update, ours, theirs)
    return config


@pytest.mark.parametrize(
    ("kind", "converted"),
    [
        ({"type": "CosineAnnealingLR", "eta_min": 1e-3}, {"T_max": 3, "after": 1}),
        ({"type": "LinearLR", "start_factor": 0.1}, {"total_iters": 2}),
        ({"type": "ConstantLR", "factor": 0.5}, {"total_iters": 2}),
        ({"type": "PolyLR", "eta_min": 1e-3}, {"total_iters": 2}),
        ({"type": "OneCycleLR", "eta_max": 0.3}, {"total_steps": 3}),
        ({"type": "CosineAnnealingParamScheduler", "param_name": "weight_decay"}, {"end": 4}),
    ],
    ids=lambda settings: settings.get("type", ""),
)
def test_schedules_without_end_stop_at_the_end_of_the_run(
    tmp_path: Path, kind: dict[str, Any], converted: dict[str, Any]
) -> None:
    config = assert_same_values(tmp_path, [{**kind, "begin": 1}], BY_EPOCHS)
    (schedule,) = config["schedulers"]
    assert converted.items() <= schedule.items()


@st.composite
def schedule_settings(draw: st.DrawFn, by_epochs: bool) -> dict[str, Any]:
    """Return a schedule of any kind, unit, parameter, begin and end."""
    by_epoch = draw(st.booleans())
    length = EPOCHS if by_epoch else EPOCHS * BATCHES
    kinds: dict[str, dict[str, Any]] = {
        "CosineAnnealing": {"eta_min": draw(st.sampled_from([0.0, 0.01]))},
        "Linear": {"start_factor": 0.1, "end_factor": draw(st.sampled_from([1.0, 0.5]))},
        "Constant": {"factor": 0.5},
        "Poly": {"power": 0.9, "eta_min": 0.01 * draw(st.integers(0, 1))},
        "Step": {"step_size": draw(st.integers(1, 4)), "gamma": 0.5},
        "MultiStep": {"milestones": sorted(draw(st.sets(st.integers(1, length), min_size=1)))},
        "Exponential": {"gamma": 0.9},
        "CosineRestart": {"periods": [2, length], "restart_weights": [1, 0.5], "eta_min": 0.0},
    }  # fmt: skip
    kind = draw(st.sampled_from(sorted(kinds)))
    schedule = {"type": f"{kind}LR", **kinds[kind], "by_epoch": by_epoch}
    if draw(st.integers(0, 3)) == 0:
        schedule |= {"type": f"{kind}ParamScheduler", "param_name": "weight_decay"}
    begin = draw(st.none() | st.integers(0, length - 1))
    if begin is not None:
        schedule["begin"] = begin
    end = draw(st.none() | st.integers((begin or 0) + 1, length + 2))
    if end is not None:
        schedule["end"] = end
    if kind == "CosineAnnealing" and draw(st.booleans()):
        schedule["T_max"] = draw(st.integers(1, length))
    if by_epoch and draw(st.booleans()):
        schedule["convert_to_iter_based"] = True
    # mmengine's default for a loop by batches is the end after one "epoch".
    assume(by_epochs or not by_epoch or begin in (None, 0) or end is not None)
    return schedule


def check_drawn(data: st.DataObject, folder: Path) -> None:
    by_epochs = data.draw(st.booleans())
    schedules = data.draw(st.lists(schedule_settings(by_epochs), min_size=1, max_size=2))
    loop = BY_EPOCHS if by_epochs else BY_BATCHES
    assert_same_values(folder, schedules, loop, data.draw(st.sampled_from([1, 2])))


# Shrinking would train for minutes.
SETTINGS: dict[str, Any] = {
    "deadline": None, "derandomize": True, "database": None, "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}  # fmt: skip


@settings(max_examples=5, **SETTINGS)
@given(st.data())
def test_drawn_schedules(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    check_drawn(data, tmp_path_factory.mktemp("drawn"))


@pytest.mark.nightly
@settings(max_examples=150, **SETTINGS)
@given(st.data())
def test_many_drawn_schedules(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_drawn(data, tmp_path_factory.mktemp("drawn"))
