"""The operations of a training step are those of a hand-written step, whatever their speed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from waits import single_rank_group

from stepwrap.loops import EpochTrainLoop, Hook, LoopState
from stepwrap.runner import Runner
from stepwrap.wrappers import OptimWrapper, SupervisedModel, wrap_model

pytestmark = pytest.mark.pretend

# The first updates compare the ranks.
STEPS, WARM_UP = 8, 4
# Launches of a step that the hand-written step lacks, by wrapper; negative if it has more.
EXTRA: dict[str, dict[str, int]] = {
    "single": {},
    "ddp": {},
    # The model's own step returns the logs, and the wrapper copies each value: see `detach_value`.
    "fsdp": {"aten::copy_": 1},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).cuda()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 6).cuda(), torch.zeros(4).long().cuda()) for _ in range(STEPS)]


class WorkOfSteps(Hook):
    """Record the device's work from the end of the warm-up to the last update."""

    order = 1000

    def __init__(self) -> None:
        from pretend_devices import recording_work

        self._recording = recording_work()

    def on_save_point(self, state: LoopState) -> None:
        if state.step == WARM_UP:
            self.work = self._recording.__enter__()
        if state.step == STEPS and state.batch:
            self._recording.__exit__(None, None, None)


def train_by_hand(wrapper: str, optimizer_name: str) -> Any:
    from pretend_devices import recording_work

    model: Any = make_net()
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
    elif wrapper == "fsdp":
        fully_shard(model)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    loss_function = nn.CrossEntropyLoss()

    def train(batches: list[tuple[Tensor, Tensor]]) -> None:
        for inputs, target in batches:
            optimizer.zero_grad()
            loss_function(model(inputs), target).backward()
            optimizer.step()

    batches = make_batches()
    train(batches[:WARM_UP])
    with recording_work() as work:
        train(batches[WARM_UP:])
    return work


def train_by_runner(wrapper: str, optimizer_name: str, folder: Path) -> Any:
    model = wrap_model(wrapper, SupervisedModel(make_net(), nn.CrossEntropyLoss()))
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    recorder = WorkOfSteps()
    Runner(
        model,
        EpochTrainLoop(make_batches(), max_epochs=1),
        optim_wrapper=OptimWrapper(optimizer),
        hooks={"recorder": recorder},
        run_dir=folder / "run",
    ).train()
    return recorder.work


# torch's fused SGD cannot update sharded parameters.
@pytest.mark.parametrize(
    ("wrapper", "optimizer"),
    [("single", "sgd"), ("single", "adamw"), ("ddp", "sgd"), ("ddp", "adamw"), ("fsdp", "adamw")],
)
def test_a_step_launches_what_a_hand_written_one_does(
    wrapper: str, optimizer: str, tmp_path: Path
) -> None:
    with nullcontext() if wrapper == "single" else single_rank_group(tmp_path):
        by_hand = train_by_hand(wrapper, optimizer)
        ours = train_by_runner(wrapper, optimizer, tmp_path)
    steps = STEPS - WARM_UP
    extra = {
        name: (ours.launches.get(name, 0) - by_hand.launches.get(name, 0)) / steps
        for name in {**ours.launches, **by_hand.launches}
    }
    assert {name: count for name, count in extra.items() if count} == EXTRA[wrapper]
    assert ours.collectives == by_hand.collectives
    assert ours.copies == by_hand.copies
    assert ours.waits == []
