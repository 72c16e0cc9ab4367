"""Messages of a paused or resumed run, and loading the model that it evaluated."""

import re
import signal
from pathlib import Path

import pytest
import torch
from runner_parts import records

from stepwrap.loops import CheckpointError, find_checkpoint, load_checkpoint
from stepwrap.runner import load_model
from stepwrap.runner.command.cli import main

EMA = "hooks.ema={type: EMAHook, decay: 0.9}"


def accuracy_on_validation(model: torch.nn.Module) -> float:
    from points import Points  # The user's module, which the command has imported.

    data = Points(20)
    with torch.inference_mode():
        correct = model(data.inputs, mode="tensor").argmax(1) == data.labels
    return float(correct.float().mean())


@pytest.mark.slow
def test_the_evaluated_model_of_a_paused_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = "hooks.stop={type: runner_parts.SignalHook, at_step: 31}"
    assert main(["train", "points.yaml", EMA, stop]) == 128 + signal.SIGTERM
    out = capsys.readouterr().out
    assert re.search(
        r"state\.safetensors .*stateful / hooks\.ema / model \(not.*model\.safetensors\)", out
    )
    assert "load_model('runs/points')" in out
    for which in ("best", "latest"):
        checkpoint = load_checkpoint(find_checkpoint("runs/points", which))
        model = load_model("runs/points", which)
        assert not any(module.training for module in model.modules())
        averages = checkpoint.read("state")["stateful"]["hooks.ema"]["model"]
        plain = checkpoint.read("model")
        for name, value in model.state_dict().items():
            assert torch.equal(value, averages[name])
            assert not torch.equal(value, plain[name])
    best = load_checkpoint(find_checkpoint("runs/points", "best"))
    accuracy = accuracy_on_validation(load_model("runs/points", "best"))
    assert accuracy == pytest.approx(best.meta["metrics"]["accuracy"], abs=1e-6)

    assert main(["train", "points.yaml", "--resume", "optimizer.lr=0.5", EMA,
                 "data.train.batch_size=8", "train.max_epochs=3"]) == 0  # fmt: skip
    message = capsys.readouterr().err
    assert re.search(r"  optimizer\.lr: 0\.01 -> 0\.5 \(no effect: .*checkpoint", message)
    assert re.search(r"  data\.train\.batch_size: 4 -> 8 \(.*micro-batch only", message)
    assert "4 samples: accumulative_counts is now 1" in message
    assert "  hooks.stop.at_step: 31 -> not set" in message
    assert max(record["lr"] for record in records(Path("runs/points")) if "lr" in record) <= 0.01

    assert main(["train", "runs/points/config.yaml", "--resume"]) == 0
    message = capsys.readouterr().err
    assert "left to train: max_epochs is 3" in message
    assert "differ" not in message


@pytest.mark.slow
def test_a_folder_without_its_config(run: Path) -> None:
    with pytest.raises(CheckpointError, match="runs/points has no checkpoint"):
        load_model("runs/points")
    assert main(["train", "points.yaml", "train.max_epochs=1"]) == 0
    plain = load_checkpoint(find_checkpoint("runs/points", "best")).read("model")
    loaded = load_model("runs/points").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in plain.items())
    Path("runs/points/config.yaml").unlink()
    with pytest.raises(FileNotFoundError, match=r"(?s)no config.*load_checkpoint\('runs/points"):
        load_model("runs/points")
