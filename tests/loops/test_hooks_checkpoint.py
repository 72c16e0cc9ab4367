"""When checkpoints are saved, and which are kept."""

from __future__ import annotations

import logging
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hook_runs import loader, metrics, new_state, scripted, train, weights
from listeners import failing, on, slow
from ranks import run_ranks
from torch import Tensor, nn
from work import count_calls

from stepwrap.loops import CheckpointHook, EMAHook, LogHook, NonFiniteError
from stepwrap.loops.checkpoints.checkpoint import list_checkpoints
from stepwrap.loops.checkpoints.files import CheckpointError
from stepwrap.loops.checkpoints.restore import load_checkpoint
from stepwrap.loops.evaluate import TestLoop, ValLoop
from stepwrap.loops.hook import Hook, HookList
from stepwrap.loops.state import LoopState
from stepwrap.loops.train import IterTrainLoop


def at_step_3(change: Callable[[LoopState], object]) -> Any:
    """Return a hook that calls a function after the third update, before all other hooks."""
    return on(order=1, on_update=lambda state: change(state) if state.step == 3 else None)


def failing_eval() -> Any:
    return failing(OSError("disk"), "on_eval_batch_end")


class GivenMetric(Hook):
    order = 1

    def __init__(self, *values: float) -> None:
        self._values = iter(values)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        metrics["score"] = state.metrics["score"] = next(self._values)


def saved(folder: Path) -> list[dict[str, Any]]:
    """Return the descriptions of the checkpoints, the latest first."""
    return [meta for _, meta in list_checkpoints(folder / "checkpoints")]


def saved_steps(folder: Path) -> list[int]:
    return [meta["step"] for meta in saved(folder)]


def test_one_an_epoch_with_the_metrics_of_its_validation(tmp_path: Path) -> None:
    state = train(new_state(run_dir=tmp_path), [CheckpointHook()])
    metas = saved(tmp_path)
    assert [(meta["step"], meta["epoch"], meta["batch"]) for meta in metas] == [
        (8, 2, 0),
        (4, 1, 0),
    ]
    assert metas[0]["metrics"] == state.metrics
    assert list(metas[1]["metrics"]) == ["error"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"every_steps": 3, "every_epochs": None, "keep_last": None},
            [(20, "end"), *((step, "interval") for step in (18, 15, 12, 9, 6, 3))],
        ),
        ({"keep_last": 2}, [(20, "interval"), (16, "interval")]),
    ],
)
def test_by_updates_and_the_last_ones(
    tmp_path: Path, settings: dict[str, Any], expected: list[tuple[int, str]]
) -> None:
    train(new_state(run_dir=tmp_path), [CheckpointHook(**settings)], epochs=5)
    assert [(m["step"], m["reason"]) for m in saved(tmp_path)] == expected


def test_a_save_reads_each_kept_checkpoint_only_once(tmp_path: Path) -> None:
    hook = CheckpointHook(every_steps=1, every_epochs=None, keep_last=None, background=False)
    settings = {"val_loop": None}
    num_reads = count_calls(
        "read_meta", lambda: train(new_state(run_dir=tmp_path), [hook], **settings)
    )
    assert len(saved(tmp_path)) == 8
    # The last step is saved again at the end of its epoch.
    assert num_reads == sum(range(8)) + 8


def test_in_the_iteration_loop_after_the_validation_of_the_same_update(tmp_path: Path) -> None:
    hook = CheckpointHook(every_steps=3, keep_best="error", mode="min", keep_last=None)
    val_loop = ValLoop(loader(8), metrics())
    loop = IterTrainLoop(loader(), max_steps=7, val_loop=val_loop, val_interval=3)
    loop.run(new_state(run_dir=tmp_path), HookList([hook]))
    # Four updates are a pass over the data, without a validation at its end.
    assert [(meta["step"], list(meta["metrics"])) for meta in saved(tmp_path)] == [
        (7, ["error"]), (6, ["error"]), (4, []), (3, ["error"])
    ]  # fmt: skip


def test_by_the_clock(tmp_path: Path) -> None:
    hook = CheckpointHook(every_secs=1e-9, every_epochs=None, keep_last=None)
    train(new_state(run_dir=tmp_path), [hook, slow(0.06)], epochs=1)
    assert len(saved_steps(tmp_path)) > 1


@pytest.mark.parametrize(("mode", "best"), [("max", 8), ("min", 4)])
def test_the_best_one_stays(tmp_path: Path, mode: str, best: int) -> None:
    hook = CheckpointHook(keep_last=1, keep_best="score", mode=mode)
    train(new_state(run_dir=tmp_path), [GivenMetric(0.1, 0.9, 0.5, 0.2), hook], epochs=4)
    assert saved_steps(tmp_path) == [16, best]
    assert [meta["best"] for meta in saved(tmp_path)] == [False, True]


@pytest.mark.parametrize(("metric", "best"), [("loss", 4), ("accuracy", 8)])
def test_the_best_one_by_the_direction_of_the_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metric: str, best: int
) -> None:
    """The direction of both metrics follows from their names."""
    caplog.set_level(logging.INFO)
    checkpoint_hook = CheckpointHook(keep_last=1, keep_best=metric)
    val_loop = ValLoop(loader(8), {metric: scripted(0.1, 0.9, 0.5, 0.2)})
    train(new_state(run_dir=tmp_path), [checkpoint_hook], epochs=4, val_loop=val_loop)
    assert saved_steps(tmp_path) == [16, best]
    extreme = "lowest" if metric == "loss" else "highest"
    assert f"CheckpointHook: the best {metric} is the {extreme}" in caplog.messages
    path = tmp_path / "checkpoints" / f"step_{best:08}"
    assert f"saved checkpoint {path} ({extreme} {metric} so far)" in caplog.messages


def test_an_improvement_is_saved_between_the_intervals(tmp_path: Path) -> None:
    hook = CheckpointHook(every_epochs=None, keep_best="score", mode="max", keep_last=None)
    train(new_state(run_dir=tmp_path), [GivenMetric(0.1, float("nan"), 0.5, 0.2), hook], epochs=4)
    assert saved_steps(tmp_path) == [16, 12, 4]


def test_a_resumed_run_knows_the_best_value(tmp_path: Path) -> None:
    hook = CheckpointHook(keep_best="score", mode="max")
    state = new_state(run_dir=tmp_path)
    state.stateful["hooks.checkpoint"] = hook
    train(state, [GivenMetric(0.9), hook], epochs=1)
    hook = CheckpointHook(keep_best="score", mode="max")
    state = new_state(run_dir=tmp_path)
    state.stateful["hooks.checkpoint"] = hook
    load_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0][0]).restore(state)
    train(state, [GivenMetric(0.5), hook], epochs=2)
    assert [(meta["step"], meta["best"]) for meta in saved(tmp_path)] == [(8, False), (4, True)]


def test_a_signal_saves(tmp_path: Path) -> None:
    terminate = at_step_3(lambda state: signal.raise_signal(signal.SIGTERM))
    state = train(new_state(run_dir=tmp_path), [CheckpointHook(), terminate])
    assert state.signal == signal.SIGTERM
    assert [(m["step"], m["reason"]) for m in saved(tmp_path)] == [(3, "signal")]


def test_an_error_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    state = new_state(run_dir=tmp_path)
    with pytest.raises(OSError, match="disk"):
        train(state, [CheckpointHook(), failing(OSError("disk"), step=3)])
    ((path, meta),) = list_checkpoints(tmp_path / "checkpoints")
    assert (meta["step"], meta["reason"]) == (3, "exception")
    assert f"saved checkpoint {path} (after the error)" in caplog.text
    again = new_state()
    load_checkpoint(path).load_model(again.model)
    assert all(map(torch.equal, weights(again), weights(state)))


def test_an_error_leaves_a_good_checkpoint_of_the_same_update(tmp_path: Path) -> None:
    late = failing(OSError("disk"), "on_save_point", step=3)
    late.order = 99
    hooks = [CheckpointHook(every_steps=3), late]
    with pytest.raises(OSError, match="disk"):
        train(new_state(run_dir=tmp_path), hooks)
    assert [(m["step"], m["reason"]) for m in saved(tmp_path)] == [(3, "interval")]


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (NonFiniteError("nan"), {}),
        (OSError("disk"), {"save_on_exception": False}),
        (KeyboardInterrupt(), {}),
        (SystemExit(), {}),
    ],
    ids=["nan", "off", "interrupt", "exit"],
)
def test_errors_that_do_not_save(
    tmp_path: Path, error: BaseException, settings: dict[str, Any]
) -> None:
    with pytest.raises(type(error)):
        train(new_state(run_dir=tmp_path), [CheckpointHook(**settings), failing(error, step=3)])
    assert saved_steps(tmp_path) == []


def test_an_error_inside_a_step_is_not_reported_as_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(nn.Linear):
        calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            Failing.calls += self.training
            if Failing.calls == 3:
                raise OSError("disk")
            return super().forward(inputs)

    caplog.set_level(logging.INFO)
    with pytest.raises(OSError, match="disk"):
        train(new_state(run_dir=tmp_path, net=Failing(3, 1)), [CheckpointHook()])
    assert saved_steps(tmp_path) == []
    path = tmp_path / "checkpoints" / "incomplete_step_00000002"
    assert path.is_dir()
    assert f"saved {path} after the error" in caplog.text
    assert "other random numbers" in caplog.text
    assert "saved checkpoint" not in caplog.text


@pytest.mark.parametrize("trained", [False, True])
def test_an_error_in_an_evaluation_alone_does_not_save(tmp_path: Path, trained: bool) -> None:
    state, hook = new_state(run_dir=tmp_path), CheckpointHook()
    if trained:
        train(state, [hook], epochs=1)
    state.step = 9
    with pytest.raises(OSError, match="disk"):
        TestLoop(loader(8), metrics()).run(state, HookList([hook, failing_eval()]))
    assert saved_steps(tmp_path) == ([4] if trained else [])


def test_the_launcher_waits_for_a_save_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ListsLaunchFolder(Hook):
        seen: list[str] = []

        def state_dict(self) -> dict[str, Any]:
            ListsLaunchFolder.seen = [path.name for path in folder.iterdir()]
            return {}

    folder = tmp_path / "launch"
    folder.mkdir()
    monkeypatch.setenv("STEPWRAP_LAUNCH_DIR", str(folder))
    state = new_state(run_dir=tmp_path)
    state.stateful["hooks.lists"] = ListsLaunchFolder()  # type: ignore[assignment]
    with pytest.raises(OSError, match="disk"):
        train(state, [CheckpointHook(), failing(OSError("disk"), step=3)])
    assert ListsLaunchFolder.seen == ["saving_checkpoint_0"]
    assert list(folder.iterdir()) == []


def test_a_checkpoint_that_can_not_be_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(new_state(run_dir=tmp_path), [CheckpointHook()], epochs=1)
    remove = shutil.rmtree

    def fail(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("busy")
        remove(folder, ignore_errors=True)

    monkeypatch.setattr(shutil, "rmtree", fail)
    state = new_state(run_dir=tmp_path)
    state.step, state.iteration, state.epoch, state.evaluated_at = 4, 4, 1, 4
    train(state, [CheckpointHook(keep_last=1)], epochs=2)
    assert saved_steps(tmp_path) == [8]
    assert "could not remove old checkpoints" in caplog.text


def _file_for_checkpoints(state: LoopState) -> None:
    (state.run_dir / "checkpoints").write_text("in the way")


def test_a_file_in_place_of_the_folder_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    state = new_state(run_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"making .*checkpoints failed: FileExistsError"):
        train(state, [CheckpointHook()])
    assert state.iteration == 0


@pytest.mark.parametrize("hook", [CheckpointHook, LogHook])
def test_a_run_folder_that_is_removed_ends_the_run(tmp_path: Path, hook: type[Hook]) -> None:
    run_dir = tmp_path / "run"
    removing = at_step_3(lambda state: shutil.rmtree(run_dir))
    with pytest.raises((CheckpointError, FileNotFoundError), match=f"{run_dir} was removed while"):
        train(new_state(run_dir=run_dir), [hook(), removing])
    assert not run_dir.exists()


def test_an_error_while_saving_after_an_error_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = [CheckpointHook(), at_step_3(_file_for_checkpoints), failing(OSError("disk"), step=3)]
    with pytest.raises(OSError, match="disk"):
        train(new_state(run_dir=tmp_path), hooks)
    assert "could not save a checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1"),
        ({"mode": "best"}, "mode must be 'min' or 'max', got 'best'"),
        ({"every_steps": 0}, "every_steps must be"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CheckpointHook(**settings)


def test_the_average_is_saved_next_to_the_plain_weights(tmp_path: Path) -> None:
    ema = EMAHook(decay=0.5)
    state = new_state(run_dir=tmp_path)
    state.stateful["hooks.ema"] = ema
    train(state, [CheckpointHook(), ema])
    path = list_checkpoints(tmp_path / "checkpoints")[0][0]
    plain = load_checkpoint(path).read("model")
    average = load_checkpoint(path).read("state")["stateful"]["hooks.ema"]["model"]
    assert plain.keys() == average.keys()
    assert all(map(torch.equal, weights(state), plain.values()))
    assert not any(map(torch.equal, plain.values(), average.values()))


def test_an_error_in_an_evaluation_with_the_average_saves_the_plain_weights(tmp_path: Path) -> None:
    state = new_state(run_dir=tmp_path)
    with pytest.raises(OSError, match="disk"):
        train(state, [CheckpointHook(), EMAHook(decay=0.5), failing_eval()])
    ((path, _),) = list_checkpoints(tmp_path / "checkpoints")
    plain = new_state()
    train(plain, [], epochs=1, val_loop=None)
    assert all(map(torch.equal, load_checkpoint(path).read("model").values(), weights(plain)))


def _train_two_ranks(folder: Path) -> tuple[list[str], dict[str, float]]:
    state = train(new_state(run_dir=folder), [CheckpointHook(keep_best="error", mode="min")])
    _, meta = list_checkpoints(folder / "checkpoints")[0]
    return sorted(meta["files"]), state.metrics


def test_both_ranks_save_into_one_checkpoint(tmp_path: Path) -> None:
    for files, results in run_ranks(_train_two_ranks, 2, tmp_path):
        assert {"rank_00000.safetensors", "rank_00001.safetensors", "model.safetensors"} <= set(
            files
        )
        assert results == saved(tmp_path)[0]["metrics"]


def _fail_on_rank_1(folder: Path) -> str:
    from stepwrap.collectives import get_rank

    broken = failing(OSError("disk"), step=1 if get_rank() == 0 else 99)
    try:
        train(new_state(run_dir=folder), [CheckpointHook(), broken])
    except (OSError, RuntimeError, CheckpointError, ValueError) as failure:
        return type(failure).__name__
    return "none"


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_alone_is_not_the_latest(tmp_path: Path) -> None:
    run_ranks(_fail_on_rank_1, 2, tmp_path, group_timeout_s=2)
    assert saved_steps(tmp_path) == []
    aside = tmp_path / "checkpoints" / "incomplete_step_00000001"
    assert sorted(load_checkpoint(aside).meta["files"]) == [
        "model.safetensors", "optim.safetensors", "rank_00000.safetensors", "state.safetensors"
    ]  # fmt: skip


def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def poison(state: LoopState) -> None:
        next(iter(state.model.parameters())).data.flatten()[0] = float("nan")

    hook = CheckpointHook(every_steps=1, keep_last=2)
    train(new_state(run_dir=tmp_path), [at_step_3(poison), hook], epochs=1)
    assert saved_steps(tmp_path) == [2, 1]
    assert re.search("step 3 is not saved, .*parameter ", caplog.text)
