"""Runs under the distributed wrappers that are stopped, resumed, and loaded elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
from marks import nightly, slow
from ranks import run_ranks
from runner_parts import records
from test_runner_ddp_options import HERE, SAMPLES, settings
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepwrap.loops import Hook, LoopState
from stepwrap.registry import HOOKS
from stepwrap.runner import Runner


@HOOKS.register_module()
class StopAt(Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_update(self, state: LoopState) -> None:
        if state.step == self.step:
            state.request_stop("enough")


def train(config: dict[str, Any], folder: Path, stop: int = 0) -> tuple[Tensor, int]:
    hooks = {**config["hooks"]}
    if stop:
        hooks["stop"] = {"type": "test_runner_ddp_resume.StopAt", "step": stop}
    runner = Runner.from_config({**config, "hooks": hooks, "run_dir": str(folder)})
    state = runner.train(resume=True)
    if "compile" in config and state.step > 3:
        assert len(state.model.batch_runner.programs) == 1
    weights = [param.detach() for param in runner.state.model.parameters()]
    full_weights = [
        weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in weights
    ]
    return torch.cat([weight.flatten() for weight in full_weights]), state.step


PAIR = {"type": f"{HERE}.Pair"}
TWO = {
    "first": {"type": "SGD", "lr": 0.5, "momentum": 0.9, "params": ["first.*"]},
    "second": {"type": "Adam", "lr": 0.01, "params": ["second.*"]},
}
SCHEDULES = [
    {"type": "ExponentialLR", "gamma": 0.9, "by": "step", "optimizer": name} for name in TWO
]
SEPARATE: dict[str, Any] = {"model": PAIR, "optimizer": TWO, "schedulers": SCHEDULES}
UNEVEN: dict[str, Any] = {
    "schedulers": {"type": "ExponentialLR", "gamma": 0.9, "by": "step"},
    "data": {
        "train": {
            # The first of three ranks has one more batch.
            "dataset": {"type": f"{HERE}.Points", "samples": SAMPLES + 4},
            "batch_size": 3,
            "shuffle": True,
        }
    },
}


WINDOWS: dict[str, Any] = {"optim_wrapper": {"type": "OptimWrapper", "accumulative_counts": 2}}


TENSOR = {"tensor_parallel": {"plan": {"net.0": "colwise", "net.2": "rowwise"}}}
NORMED = {
    "model": {
        "type": "SupervisedModel",
        "net": {"type": f"{HERE}.Normed"},
        "loss": {"type": "CrossEntropyLoss"},
    }
}
WEIGHTED = {"optim_wrapper": {"type": "OptimWrapper", "loss_weight": "samples"}}


# Batches of one shape; the step is compiled from the fourth update on.
COMPILED: dict[str, Any] = {
    "compile": {"step": True, "min_steps": 0},
    "data": {"train": {"dataset": {"type": f"{HERE}.Points", "samples": 72}, "batch_size": 3}},
}


@pytest.mark.parametrize(
    ("wrapper", "changes", "stop", "ranks"),
    [
        ({"type": "ddp"}, {}, 2, 3),
        ({"type": "separate"}, SEPARATE, 4, 3),
        ({"type": "ddp", "uneven_inputs": True}, UNEVEN, 3, 3),
        ({"type": "ddp", "static_graph": True}, WINDOWS, 2, 3),
        *slow(
            ({"type": "ddp"}, {}, 3, 2),
            ({"type": "ddp"}, {}, 3, 4),
            ({"type": "separate"}, SEPARATE, 3, 2),
            ({"type": "separate"}, SEPARATE, 3, 4),
            ({"type": "ddp", "gradient_as_bucket_view": True}, WINDOWS, 1, 4),
            (
                {"type": "ddp", "uneven_inputs": {"divide_by_initial_world_size": False}},
                UNEVEN,
                4,
                3,
            ),
            ({"type": "ddp", "uneven_inputs": True}, UNEVEN, 7, 3),
            ({"type": "ddp", "comm_hook": "bf16_compress"}, {}, 3, 3),
            ({"type": "fsdp"}, {}, 3, 3),
            ({"type": "fsdp"}, WINDOWS, 1, 4),
            ({"type": "fsdp"}, {"mesh": {"replicate": 2, "shard": 2}}, 3, 4),
            ({"type": "single"}, {"mesh": {"tensor": 3}, **TENSOR}, 3, 3),
            ({"type": "ddp"}, {"mesh": {"data": 2, "tensor": 2}, **TENSOR}, 3, 4),
            ({"type": "ddp", "sync_batchnorm": True}, NORMED, 3, 3),
            ({"type": "ddp", "sync_batchnorm": {"precision": "fp64"}}, NORMED, 3, 4),
            ({"type": "ddp"}, WEIGHTED, 3, 3),
            ({"type": "ddp"}, COMPILED, 2, 3),
        ),
        *nightly(({"type": "ddp"}, COMPILED, 4, 4)),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_resume(
    wrapper: dict[str, Any], changes: dict[str, Any], stop: int, ranks: int, tmp_path: Path
) -> None:
    """A resume is exact; two ranks would hide the order of a sum, because a + b = b + a."""
    config = settings(wrapper, **changes)
    config["train"]["log_every_steps"] = 2
    uninterrupted = run_ranks(train, ranks, config, tmp_path / "whole")
    stopped = run_ranks(train, ranks, config, tmp_path / "run", stop)
    assert [step for _, step in stopped] == [stop] * ranks
    for (weights, step), (expected, total_steps) in zip(
        run_ranks(train, ranks, config, tmp_path / "run"),
        uninterrupted,
        strict=True,
    ):
        assert step == total_steps > stop
        assert torch.equal(weights, expected)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records(folder)]


def test_a_run_under_separate_resumes_in_one_process(tmp_path: Path) -> None:
    """Names do not depend on the wrapper; one process uses twice the batch size."""
    config = settings({"type": "separate"}, **SEPARATE)
    expected = run_ranks(train, 2, config, tmp_path / "whole")[0][0]
    run_ranks(train, 2, config, tmp_path / "run", 4)
    config["data"]["train"]["batch_size"] *= 2
    alone = {**config, "wrapper": {"type": "single"}}
    ((weights, _),) = run_ranks(train, 1, alone, tmp_path / "run", init=False)
    assert (weights - expected).abs().max().item() <= 1e-12
