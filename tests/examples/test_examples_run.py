"""The examples run as their first lines say."""

import runpy
from pathlib import Path

import pytest
from programs import run

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_loop() -> None:
    main = runpy.run_path(str(EXAMPLES / "own_loop.py"))["main"]
    assert main(epochs=4) > 0.9


@pytest.mark.slow
def test_own_loop_under_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    out = run(*torchrun, str(EXAMPLES / "own_loop.py"), cwd=tmp_path)
    (accuracy,) = [line.split()[-1] for line in out.splitlines() if "test accuracy" in line]
    assert float(accuracy) > 0.9
    assert out.count("epoch 1:") == 1


@pytest.mark.slow
def test_own_train_step(tmp_path: Path) -> None:
    config = str(EXAMPLES / "own_train_step.yaml")
    words = ("train", config, "--nproc", "2", "train.max_epochs=3")
    out = run("-m", "stepwrap.runner", *words, "--run-dir", str(tmp_path / "run"), cwd=tmp_path)
    # The wrapper of the example logs its two losses, no other one does.
    assert "loss_second" in out
    assert "test" in out


@pytest.mark.parametrize("name", ["own_loop.py", "own_train_step.py"])
def test_examples_stay_short(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 45
