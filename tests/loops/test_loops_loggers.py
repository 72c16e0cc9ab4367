"""Loggers: settings, scalars and media, read back from files, TensorBoard, W&B and MLflow."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hook_runs import new_state, train
from ranks import run_ranks

from stepwrap.loops import (
    Hook,
    LoggerHook,
    LogHook,
    LoopState,
    MLflowHook,
    TensorBoardHook,
    TrackioHook,
    WandbHook,
)
from stepwrap.registry import ConfigError, check_config, config_from_dict, load_config
from stepwrap.runner import Runner

SETTINGS = {"optimizer": {"lr": 0.05, "betas": [0.9, 0.99]}, "seed": 3, "name": None}
FLAT = {"optimizer.lr": 0.05, "optimizer.betas": "[0.9, 0.99]", "seed": 3, "name": "None"}
IMAGE = torch.arange(24).reshape(3, 2, 4).float() / 24


class Shows(Hook):
    """Log an image, a figure and a text at the end of each epoch."""

    def on_epoch_end(self, state: LoopState) -> None:
        figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(1, 1))
        state.log_image("inputs/first", IMAGE)
        state.log_figure("curve", figure)
        state.log_text("note", f"<step> {state.step}")


class Recorder(LoggerHook):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def scalars(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        self.calls.append((state.step, phase, *values))

    def settings(
        self, state: LoopState, settings: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        self.calls.append((settings, [*metrics]))

    def media(self, state: LoopState, name: str, content: Any) -> None:
        self.calls.append((state.step, name, content))

    def close(self, failed: bool) -> None:
        self.calls.append("failed" if failed else "done")


class Fails(Hook):
    def on_update(self, state: LoopState) -> None:
        raise RuntimeError("stop here")


def state_in(folder: Path) -> LoopState:
    state = new_state(run_dir=folder)
    state.settings = SETTINGS
    return state


def resume_at_4(folder: Path) -> LoopState:
    state = state_in(folder)
    state.step, state.iteration, state.epoch, state.evaluated_at = 4, 4, 1, 4
    return state


def test_a_custom_logger_gets_settings_scalars_and_media_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    train(state_in(tmp_path), [recorder, Shows()], epochs=1)
    start, train_record, second, image, figure, text, val_record, end, done = recorder.calls
    assert start == (FLAT, [])
    assert (train_record, second, val_record) == (
        (2, "train", "loss"),
        (4, "train", "loss"),
        (4, "val", "error"),
    )
    assert image[:2] == (4, "inputs/first")
    expected = (IMAGE.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    assert image[2].dtype == np.uint8
    assert (image[2] == expected).all()
    assert figure[:2] == (4, "curve")
    assert text == (4, "note", "<step> 4")
    assert end == (FLAT, ["val/error"])
    assert done == "done"


def test_an_error_closes_the_logger_as_failed(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="stop here"):
        train(state_in(tmp_path), [recorder, Fails()], epochs=1)
    assert recorder.calls[-1] == "failed"


def test_without_a_run_folder_nothing_is_logged() -> None:
    recorder, state = Recorder(), new_state()
    train(state, [recorder, Shows()], epochs=1)
    assert recorder.calls == ["done"]
    assert state.media_loggers == []


def _train_two(folder: Path) -> list[Any]:
    recorder = Recorder()
    train(state_in(folder), [recorder, Shows()], epochs=1)
    return [call for call in recorder.calls if call != "done"]


def test_only_rank_0_logs(tmp_path: Path) -> None:
    rank_0, second = run_ranks(_train_two, 2, tmp_path)
    assert len(rank_0) == 7
    assert second == []


def test_files_of_media(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    train(state_in(tmp_path), [LogHook(), Shows()], epochs=1)
    media = tmp_path / "media"
    with pillow.open(media / "inputs" / "first_4.png") as image:
        saved = np.asarray(image)
    assert (saved == (IMAGE.permute(1, 2, 0).numpy() * 255).round()).all()
    assert (media / "note_4.txt").read_text() == "<step> 4"
    with pillow.open(media / "curve_4.png") as curve:
        assert curve.size == (100, 100)


@pytest.mark.parametrize(
    ("image", "stored"),
    [
        (torch.tensor([[0, 255], [300, 7]]), [[0, 255], [255, 7]]),
        (torch.full((1, 1, 2), 0.5, dtype=torch.bfloat16), [[128, 128]]),
        (np.array([[[0.0], [2.0]]]), [[0, 255]]),
    ],
)
def test_images_become_bytes(tmp_path: Path, image: Any, stored: list[Any]) -> None:
    recorder, state = Recorder(), state_in(tmp_path)
    recorder.on_run_start(state)
    state.log_image("x", image)
    assert recorder.calls[0][2].tolist() == stored


def test_mistakes_in_media_name_the_allowed_values(tmp_path: Path) -> None:
    recorder, state = Recorder(), state_in(tmp_path)
    recorder.on_run_start(state)
    with pytest.raises(ValueError, match=r"1, 3 or 4 channels; got the shape \(4, 4, 2\)"):
        state.log_image("x", np.zeros((4, 4, 2)))
    for name in ("../x", "/x", "", "a//b", "a/../b"):
        with pytest.raises(ValueError, match="name of the text .*letters"):
            state.log_text(name, "a")
    with pytest.raises(TypeError, match="log_figure needs .*figure, got int"):
        state.log_figure("x", 3)


def test_tensorboard_has_settings_and_media(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(state_in(tmp_path), [TensorBoardHook(), Shows()], epochs=1)
    events = reading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert tags["images"] == ["inputs/first", "curve"]
    assert events.Images("inputs/first")[0].step == 4
    assert "note/text_summary" in tags["tensors"]
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for name in (b"optimizer.lr", b"seed"):
        assert name in content
    metrics = events.summary_metadata["_hparams_/experiment"].plugin_data.content
    assert b"val/error" in metrics


@pytest.fixture
def mlflow_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "store").as_uri()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_settings_scalars_and_media_and_a_resume_continues_its_run(
    tmp_path: Path, mlflow_uri: str
) -> None:
    folder = tmp_path / "digits"
    train(state_in(folder), [MLflowHook(tracking_uri=mlflow_uri, experiment="mine"), Shows()])
    client = pytest.importorskip("mlflow").MlflowClient(mlflow_uri)
    number = (folder / "mlflow_id.txt").read_text().strip()
    mlflow_run = client.get_run(number)
    assert mlflow_run.info.status == "FINISHED"
    assert mlflow_run.info.run_name == "digits"
    assert mlflow_run.data.params == {name: str(value) for name, value in FLAT.items()}
    history = client.get_metric_history(number, "train/loss")
    assert [entry.step for entry in history] == [2, 4, 6, 8]
    assert {artifact.path for artifact in client.list_artifacts(number, "media")} >= {
        "media/curve_4.png",
        "media/note_8.txt",
    }
    train(resume_at_4(folder), [MLflowHook(tracking_uri=mlflow_uri, experiment="mine")])
    assert (folder / "mlflow_id.txt").read_text().strip() == number
    assert [entry.step for entry in client.get_metric_history(number, "val/error")][-1] == 8
    # A run that starts from the beginning is a new MLflow run.
    train(state_in(folder), [MLflowHook(tracking_uri=mlflow_uri, experiment="mine")], epochs=1)
    assert (folder / "mlflow_id.txt").read_text().strip() != number


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_without_the_stored_run_names_a_remedy(tmp_path: Path, mlflow_uri: str) -> None:
    (tmp_path / "mlflow_id.txt").write_text("0" * 32)
    with pytest.raises(ValueError, match=r"mlflow_id\.txt .*cannot be continued"):
        train(resume_at_4(tmp_path), [MLflowHook(tracking_uri=mlflow_uri)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_has_settings_scalars_and_media(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    folder = tmp_path / "digits"
    train(state_in(folder), [WandbHook(mode="offline", project="p"), Shows()], epochs=1)
    number = (folder / "wandb_id.txt").read_text().strip()
    (file,) = folder.glob(f"wandb/offline-run-*/run-{number}.wandb")
    # The service writes the rest of the file when it stops.
    wandb.teardown()
    # The file has protobuf records, in which names are plain bytes.
    written = file.read_bytes()
    for name in ("train/loss", "val/error", "step", "note", "optimizer.lr"):
        assert name.encode() in written
    media = [path.name for path in file.parent.glob("files/media/**/*") if path.is_file()]
    assert sum(name.endswith(".png") for name in media) == 2
    assert sum(name.endswith(".html") for name in media) == 1
    train(resume_at_4(folder), [WandbHook(mode="offline", project="p")])
    assert (folder / "wandb_id.txt").read_text().strip() == number


def _log_to_trackio(folder: Path) -> list[Any]:
    """Return the configs and records of the runs in Trackio's database."""
    # Read when trackio is imported.
    os.environ["TRACKIO_DIR"] = str(folder / "database")
    run_dir = folder / "digits"
    train(state_in(run_dir), [TrackioHook(project="p"), Shows()], epochs=1)
    train(resume_at_4(run_dir), [TrackioHook(project="p")])
    resumed_name = (run_dir / "trackio_id.txt").read_text().strip()
    # A run that starts from the beginning is another run.
    train(state_in(run_dir), [TrackioHook(project="p")], epochs=1)
    second = (run_dir / "trackio_id.txt").read_text().strip()
    from trackio import SQLiteStorage

    names = SQLiteStorage.get_runs("p")
    assert sorted(names) == sorted([resumed_name, second])
    return [
        SQLiteStorage.get_run_config("p", resumed_name),
        SQLiteStorage.get_logs("p", resumed_name),
    ]


@pytest.mark.slow
def test_trackio_has_settings_scalars_and_media(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    ((settings, records),) = run_ranks(_log_to_trackio, 1, tmp_path, init=False)
    assert settings.items() >= FLAT.items()
    steps = {name: [r["step"] for r in records if name in r] for r in records for name in r}
    assert steps["train/loss"] == [2, 4, 6, 8]
    assert steps["val/error"][-1] == 8
    assert {name: steps[name] for name in ("inputs/first", "curve", "note")} == {
        "inputs/first": [4],
        "curve": [4],
        "note": [4],
    }


def test_an_unknown_mode_of_wandb() -> None:
    pytest.importorskip("wandb")
    with pytest.raises(ValueError, match="mode .*online, offline or disabled, got 'off'"):
        WandbHook(mode="off")


@pytest.mark.parametrize(
    ("hook", "name"), [(WandbHook, "wandb"), (MLflowHook, "mlflow"), (TrackioHook, "trackio")]
)
def test_a_missing_package_is_reported_with_its_extra_when_the_config_is_checked(
    monkeypatch: pytest.MonkeyPatch, hook: Any, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"`pip install stepwrap\[{name}\]`"):
        hook()
    config = config_from_dict({"model": {"type": "torch.nn.Identity"}, "hooks": {name: {}}})
    with pytest.raises(ConfigError, match=rf"hooks.{name}.*: {hook.__name__} needs .*{name}\]"):
        check_config(config)


def test_a_config_is_logged_as_settings(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = ["train.max_epochs=1", "hooks.progress=false", "hooks.tensorboard={}"]
    config = load_config("digits_single", [f"run_dir={tmp_path}", *words])
    Runner.from_config(config).train()
    events = reading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"optimizer.lr" in content
