"""Calls, files and frames of ours in a training step with the default hooks."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stepwrap.loops import (
    CheckpointHook,
    EpochTrainLoop,
    LogHook,
    NanGuardHook,
    ProgressHook,
    ThroughputHook,
    ValLoop,
    build_loader,
)
from stepwrap.runner import Runner
from stepwrap.wrappers import OptimWrapper, SupervisedModel

ROOT = Path(__file__).parents[2]
OURS = tuple(
    f"{ROOT / name}/" for name in ("collectives", "loops", "registry", "runner", "wrappers")
)
STEPS = 40


class Net(nn.Linear):
    """A user's layer whose forward marks a step for the tracer."""

    def forward(self, points: Tensor) -> Tensor:
        return super().forward(points)


def frames_of_ours(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            yield frame
        frame = frame.f_back


class Tracer:
    """Record calls into our files between two calls of the user's forward."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.depths: list[int] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        if frame.f_code is Net.forward.__code__:
            self.steps.append([])
            self.depths.append(len(list(frames_of_ours(frame))))
        elif self.steps and frame.f_code.co_filename.startswith(OURS):
            self.steps[-1].append(frame.f_code.co_filename)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Tracer:
    points = TensorDataset(torch.randn(4 * STEPS, 3), torch.randint(0, 2, (4 * STEPS,)))
    model = SupervisedModel(Net(3, 2), nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = build_loader(points, batch_size=4, train=True)
    runner = Runner(
        model,
        EpochTrainLoop(
            loader,
            max_epochs=1,
            val_loop=ValLoop(build_loader(points, batch_size=64, train=False)),
            # Its forward would be counted as a step.
            sanity_val=False,
        ),
        optim_wrapper=OptimWrapper(optimizer),
        hooks=[ProgressHook(), LogHook(), CheckpointHook(), ThroughputHook(), NanGuardHook()],
        run_dir=tmp_path_factory.mktemp("run"),
    )
    tracer = Tracer()
    sys.setprofile(tracer)
    try:
        runner.train()
    finally:
        sys.setprofile(None)
    assert runner.state.step == STEPS
    return tracer


def usual_step(trace: Tracer) -> list[str]:
    """Return the step with the median number of calls, which neither logs nor reads the clock."""
    steps = sorted(trace.steps[: STEPS - 1], key=len)
    return steps[len(steps) // 2]


def test_few_frames_above_the_model(trace: Tracer) -> None:
    assert max(trace.depths[:STEPS]) <= 5


def test_few_calls(trace: Tracer) -> None:
    assert 5 <= len(usual_step(trace)) <= 20


def test_few_files_and_switches(trace: Tracer) -> None:
    files = usual_step(trace)
    assert len(set(files)) <= 7
    assert sum(before != after for before, after in zip(files, files[1:], strict=False)) <= 12
