"""Runs from configs on a CUDA device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runner_parts import assert_identical, final_weights

from stepwrap.registry import load_config
from stepwrap.runner import Runner, launch
from stepwrap.runner.parts import build_parts
from stepwrap.runner.sections import read_sections

pytestmark = pytest.mark.gpu
WORDS = ["device=cuda", "hooks.progress=false"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_trains_in_every_precision(run: Path, dtype: str) -> None:
    amp = f"optim_wrapper={{type: AmpOptimWrapper, dtype: {dtype}}}"
    runner = Runner.from_config(load_config("points.yaml", [*WORDS, amp]))
    state = runner.train()
    assert state.step == 48
    assert state.model.module.net[0].weight.is_cuda
    assert runner.test()["accuracy"] > 0.5


@pytest.mark.parametrize(("device", "is_pinned"), [("cpu", False), ("cuda", True)])
def test_batches_are_pinned_only_for_the_device(run: Path, device: str, is_pinned: bool) -> None:
    sections = read_sections(load_config("points.yaml", [*WORDS, f"device={device}"]))
    loader = build_parts(sections).train_loop.dataloader
    assert loader.pin_memory is is_pinned


def test_a_resumed_run_is_bit_identical(run: Path) -> None:
    """Runs in separate processes, because cuBLAS reads its setting only once."""

    def train(*words: str) -> None:
        command = [sys.executable, "-m", "stepwrap.runner", "train", "points.yaml", *WORDS]
        subprocess.run([*command, "deterministic=true", *words], check=True, timeout=300)

    train("--run-dir", "whole")
    resumed = run / "whole" / "checkpoints" / "step_00000021"
    train("--run-dir", "resumed", "--resume", str(resumed))
    assert_identical(final_weights(run / "whole"), final_weights(run / "resumed"))


def test_nccl_joins_a_world_of_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch(_backend_and_steps) == {0: ("nccl", 48)}


def _backend_and_steps() -> tuple[str, int]:
    runner = Runner.from_config(load_config("points.yaml", WORDS))
    backend = torch.distributed.get_backend_config()
    name = "nccl" if "cuda:nccl" in backend else backend
    return name, runner.train().step
