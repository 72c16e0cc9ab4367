"""Stopping when the validation does not improve any more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hook_runs import loader, new_state, scripted, train
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MinMaxMetric

from stepwrap.loops import CheckpointHook, EarlyStopHook, Hook, find_checkpoint
from stepwrap.loops.evaluate import ValLoop
from stepwrap.loops.state import LoopState, Phase


def stopped_after(values: list[float], **settings: Any) -> int | None:
    """Return the number of validations with these values until the hook requests a stop."""
    hook = EarlyStopHook("score", **{"mode": "min", **settings})
    state = LoopState(model=new_state().model, phase=Phase.VAL)
    for count, value in enumerate(values, start=1):
        state.step = count * 10
        hook.on_eval_end(state, {"score": value})
        if state.stop_reason:
            return count
    return None


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        ([3, 2, 1, 1, 1], {"patience": 2}, 5),
        ([3, 2, 1, 1], {"patience": 2}, None),
        ([1, 2, 3, 2, 1], {"patience": 2, "mode": "max"}, 5),
        ([3, 2.95, 2.9, 2.85], {"patience": 2, "min_delta": 0.2}, 3),
        ([1, 1.05, 1.3, 1.35], {"patience": 1, "min_delta": 0.2, "mode": "max"}, 2),
        ([NAN, NAN], {"patience": 2}, 2),
        ([3, NAN, 2, NAN], {"patience": 2}, None),
    ],
)
def test_patience(values: list[float], settings: dict[str, Any], expected: int | None) -> None:
    assert stopped_after(values, **settings) == expected


def test_training_stops_with_a_reason() -> None:
    state = train(new_state(lr=0.0), [EarlyStopHook("error", patience=2)], epochs=9)
    assert state.epoch == 3
    assert state.stop_reason.startswith("error was lowest at ")
    assert re.search(r"\(step 4\) .*not improved in 2 .*\(patience 2\)$", state.stop_reason)


@pytest.mark.parametrize(
    ("hook", "setting"),
    [
        (EarlyStopHook("erorr", patience=2), "EarlyStopHook: metric"),
        (CheckpointHook(keep_best="erorr", mode="min"), "CheckpointHook: keep_best"),
    ],
)
def test_a_metric_that_does_not_exist(hook: Hook, setting: str, tmp_path: Path) -> None:
    text = f"{setting} .* got 'erorr'; the last evaluation computed: error; did you mean 'error'"
    with pytest.raises(ValueError, match=text):
        train(new_state(run_dir=tmp_path), [hook])


def test_a_test_run_does_not_count() -> None:
    hook = EarlyStopHook("score", patience=1, mode="max")
    state = LoopState(model=new_state().model, phase=Phase.TEST)
    hook.on_eval_end(state, {"score": 1.0})
    hook.on_eval_end(state, {"other": 1.0})
    assert state.stop_reason == ""


def test_a_resumed_run_keeps_its_patience() -> None:
    stopped_hook = EarlyStopHook("error", patience=3)
    train(new_state(lr=0.0), [stopped_hook], epochs=2)
    second = EarlyStopHook("error", patience=3)
    second.load_state_dict(stopped_hook.state_dict())
    assert train(new_state(lr=0.0), [second], epochs=9).epoch == 2


@pytest.mark.parametrize(
    ("name", "higher", "epochs"),
    [
        ("score", True, 4),
        ("score", False, 3),
        ("val_loss", None, 3),
        ("top1_error", None, 3),
        ("accuracy", None, 4),
        ("error", True, 4),
        ("all/score", True, 4),
        ("all/score", False, 3),
    ],
)
def test_the_direction_is_the_metrics_own(name: str, higher: bool | None, epochs: int) -> None:
    group, _, key = name.rpartition("/")
    metric = {key: scripted(1, 2, 3, 4, higher_is_better=higher)}
    val_loop = ValLoop(loader(8), {group: MetricCollection(metric)} if group else metric)
    state = train(new_state(), [EarlyStopHook(name, patience=2)], epochs=4, val_loop=val_loop)
    assert state.epoch == epochs
    assert ("was lowest at 1 " in state.stop_reason) == (epochs == 3)


class OneMinus(Metric):
    """A metric with another one inside it whose direction it reverses."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.metric = metric

    def update(self, num_samples: int) -> None:
        self.metric.update(num_samples)

    def compute(self) -> Tensor:
        return 1 - self.metric.compute()


REVERSED = [lambda metric: 1 - metric, OneMinus]


@pytest.mark.parametrize("reverse", REVERSED)
def test_a_reversed_metric_does_not_have_the_direction_inside_it(
    reverse: Any, tmp_path: Path
) -> None:
    """The values are 0, -1, -2 and -3, of which the last is the best."""
    metric = reverse(scripted(1, 2, 3, 4, higher_is_better=True))
    state = new_state(run_dir=tmp_path)
    hooks = [EarlyStopHook("error", patience=2), CheckpointHook(keep_best="error", keep_last=1)]
    train(state, hooks, epochs=4, val_loop=ValLoop(loader(8), {"error": metric}))
    assert (state.epoch, find_checkpoint(tmp_path, "best").name) == (4, "step_00000016")
    metrics = {"high": scripted(1, higher_is_better=True), "score": reverse(scripted(1))}
    collection = {"all": MetricCollection(metrics)}
    for name, unknown in (("score", metrics), ("all/score", collection)):
        hook, val_loop = EarlyStopHook(name, patience=2), ValLoop(loader(8), unknown)
        with pytest.raises(ValueError, match="mode must be given"):
            train(new_state(), [hook], val_loop=val_loop)


@pytest.mark.parametrize(("higher", "epochs"), [(True, 4), (False, 3)])
def test_a_wrapper_has_the_direction_of_the_metric_inside_it(higher: bool, epochs: int) -> None:
    metric = MinMaxMetric(scripted(1, 2, 3, 4, higher_is_better=higher))
    hook = EarlyStopHook("score/raw", patience=2)
    val_loop = ValLoop(loader(8), {"score": metric})
    assert train(new_state(), [hook], epochs=4, val_loop=val_loop).epoch == epochs


@pytest.mark.parametrize(
    "hook", [EarlyStopHook("score", patience=2), CheckpointHook(keep_best="score")]
)
def test_an_unknown_direction_is_an_error_before_training(hook: Hook, tmp_path: Path) -> None:
    state, val_loop = new_state(run_dir=tmp_path), ValLoop(loader(8), {"score": scripted(1)})
    text = f"{type(hook).__name__}: mode must be given, since neither .* the name of 'score'"
    with pytest.raises(ValueError, match=text):
        train(state, [hook], val_loop=val_loop)
    assert state.step == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"patience": 0}, "patience must be a whole number >= 1, got 0"),
        ({"patience": 1, "min_delta": -1.0}, "min_delta must be at least 0"),
        ({"patience": 1, "mode": "up"}, "mode must be 'min' or 'max', got 'up'"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EarlyStopHook("error", **settings)


def test_a_resume_of_a_run_that_was_stopped_does_not_train() -> None:
    stopped_hook = EarlyStopHook("error", patience=2)
    state = train(new_state(lr=0.0), [stopped_hook], epochs=9)
    second = EarlyStopHook("error", patience=2)
    second.load_state_dict(stopped_hook.state_dict())
    assert train(state, [second], epochs=9).epoch == 3
    assert re.search(r"not improved in 2 .*\(patience 2\)$", state.stop_reason)
    patient = EarlyStopHook("error", patience=4)
    patient.load_state_dict(stopped_hook.state_dict())
    assert train(state, [patient], epochs=9).epoch == 5


def test_several_metrics_are_refused() -> None:
    with pytest.raises(TypeError, match="EarlyStopHook: metric must .*one metric"):
        EarlyStopHook(["accuracy", "loss"], 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="CheckpointHook: keep_best must .*one metric"):
        CheckpointHook(keep_best=["accuracy", "loss"])  # type: ignore[arg-type]
