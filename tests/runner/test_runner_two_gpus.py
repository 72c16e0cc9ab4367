"""Runs on ranks with a CUDA device each: the back-end, and ranks that stop."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm
from gpu_ranks import fail_on_gpus, run_on_gpus, stay_away
from torch import Tensor, nn

from stepwrap.loops import EpochTrainLoop, Hook, LoopState, ValLoop
from stepwrap.runner import Runner
from stepwrap.wrappers import (
    OptimWrapper,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
)

pytestmark = pytest.mark.gpu2
WRAPPERS = {"ddp": StepDistributedDataParallel, "fsdp": StepFullyShardedDataParallel}


class _Stop(Hook):
    """Let one rank stop before a batch, when there has been an update."""

    def __init__(self, how: str, rank: int) -> None:
        self.how, self.rank = how, rank

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        if state.step == 2 and dist.get_rank() == self.rank:
            stay_away(self.how)


def _batches() -> list[list[Tensor]]:
    return [[torch.ones(2, 4), torch.tensor([0, 2])] for _ in range(4)]


def _train(wrapper: str, how: str, rank: int) -> int:
    """Train in a run that one rank does not finish; return the number of steps."""
    model = SupervisedModel(nn.Linear(4, 3), nn.CrossEntropyLoss()).cuda()
    wrapped = WRAPPERS[wrapper](model)
    optim = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    loop = EpochTrainLoop(_batches(), max_epochs=4, val_loop=ValLoop(_batches()))
    runner = Runner(wrapped, loop, optim_wrapper=optim, hooks=[_Stop(how, rank)])
    return runner.train().step


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", ["sleep", "stop", "kill"])
def test_a_run_names_the_rank_that_stops(wrapper: str, how: str) -> None:
    end = fail_on_gpus(_train, 2, wrapper, how, 1, absent=1)[0]
    assert end.exit_code == 1, end.output
    # After a death, the launcher's function adds the process to the error.
    assert re.search(r"^(CollectiveError|LaunchError): .*\brank 1\b", end.error, re.S), end.output


def test_a_run_ends_after_the_death_of_the_rank_with_the_store() -> None:
    end = fail_on_gpus(_train, 2, "ddp", "kill", 0, absent=0)[1]
    assert end.exit_code == 1, end.output
    assert re.search(r"^(CollectiveError|LaunchError): .*\brank 0\b", end.error, re.S), end.output


PROGRAM = """
import os
import signal

import torch
import torch.distributed as dist

from stepwrap.runner import LaunchError, launch


def main():
    value = torch.ones(1, device="cuda")
    dist.all_reduce(value)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(value)
    dist.barrier()
    return value.item()


if __name__ == "__main__":
    try:
        launch(main, nproc=2, timeout_s=20)
    except LaunchError as error:
        print([(failure.rank, failure.kind) for failure in error.failures[:1]], error)
"""


def test_a_launch_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    """The launcher ends the other rank, which waits for it in NCCL."""
    output = warm.run_script(PROGRAM, tmp_path)
    assert "[(1, 'ProcessKilled')]" in output
    assert "SIGKILL" in output
    assert "(rank 1)" in output


def _use_the_only_device() -> dict[str, Any]:
    model = StepDistributedDataParallel(nn.Linear(2, 2).cuda())
    total = torch.full((1,), dist.get_rank() + 1.0, device="cuda")
    dist.all_reduce(total)
    return {
        "device": str(model.module.weight.device),
        "visible": torch.cuda.device_count(),
        "backend": dist.get_backend_config(),
        "total": total.item(),
    }


def test_ranks_that_see_only_their_own_device_use_nccl() -> None:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environments = [{"CUDA_VISIBLE_DEVICES": device} for device in devices[:2]]
    if "PRETEND_CUDA" in os.environ:
        environments = [{**variables, "PRETEND_CUDA": "1"} for variables in environments]
    expected = {"device": "cuda:0", "visible": 1, "backend": "cpu:gloo,cuda:nccl", "total": 3.0}
    assert run_on_gpus(_use_the_only_device, 2, environments=environments) == [expected] * 2
