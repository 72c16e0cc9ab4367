"""The examples of processes that call each other."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import an example in a way that lets the rank processes import it too."""
    monkeypatch.syspath_prepend(EXAMPLES)
    module = __import__(request.param)
    assert isinstance(module, ModuleType)
    return module


@pytest.mark.parametrize("example", ["parameter_server"], indirect=True)
def test_asynchronous_training_gets_there(example: ModuleType) -> None:
    accuracy, *rest = run_ranks(example.main, 4, 6, timeout_s=150)
    assert accuracy >= 0.95
    assert rest == [None] * 3


@pytest.mark.parametrize("example", ["model_server"], indirect=True)
def test_evaluators_follow_the_trainer(example: ModuleType) -> None:
    trainer, *evaluators = run_ranks(example.main, 3, 4, timeout_s=150)
    assert trainer == []
    for seen in evaluators:
        versions = [version for version, _ in seen]
        assert versions == sorted(set(versions))
        assert set(versions) <= {1, 2, 3, 4}
        assert versions[-1] == 4
        assert seen[-1][1] > 0.9


def test_the_parameter_server_under_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLES / "parameter_server.py")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "test accuracy" in line]
    assert float(line.split()[-1]) >= 0.95


def test_the_model_server_by_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "model_server.py")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split(":")[0] for line in done.stdout.splitlines()} == {"validator", "tester"}
