"""Loops on CUDA devices: parameters in host memory, and the random streams of all devices."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from loop_parts import assert_identical, get_weights, make_data, make_loader
from torch import nn

from stepwrap.loops import (
    EpochTrainLoop,
    HookList,
    LogHook,
    LoopState,
    ValLoop,
    build_loader,
    load_checkpoint,
    save_checkpoint,
    seed_rng,
)
from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    StepDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


class _RecordInputs(nn.Module):
    """A layer that records device and dtype of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: list[tuple[str, torch.dtype]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        self.seen.append((outputs.device.type, outputs.dtype))
        return outputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.usefixtures("_group")
def test_parameters_on_the_host_are_used_on_the_device(dtype: torch.dtype, prefetch: bool) -> None:
    net = _RecordInputs()
    model = SupervisedModel(net, nn.CrossEntropyLoss()).cuda()
    wrapper = StepFullyShardedDataParallel(model, cpu_offload=True)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    assert {parameter.device.type for parameter in wrapper.parameters()} == {"cpu"}
    amp = AmpOptimWrapper(optimizer, dtype=dtype)
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    validation = ValLoop(build_loader(make_data(6), batch_size=2), metrics={"accuracy": accuracy})
    state = LoopState(model=wrapper, optim_wrapper=amp)
    validation.try_batch(state)
    loop = EpochTrainLoop(
        make_loader(), max_epochs=1, val_loop=validation, prefetch_to_device=prefetch
    )
    loop.run(state, HookList([LogHook()]))
    assert set(net.seen) == {("cuda", dtype)}
    assert 0.0 <= state.metrics["accuracy"] <= 1.0


@pytest.mark.gpu2
def test_dropout_on_two_devices_continues_exactly(tmp_path: Path) -> None:
    def make() -> LoopState:
        seed_rng(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).cuda()
        model = StepDataParallel(SupervisedModel(net, nn.CrossEntropyLoss()), [0, 1])
        return LoopState(
            model=model,
            optim_wrapper=OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)),
        )

    def train(state: LoopState, epochs: int) -> None:
        EpochTrainLoop(make_loader(batch_size=4), max_epochs=epochs).run(state, HookList([]))

    uninterrupted, begun = make(), make()
    seed_rng(1)
    train(uninterrupted, 2)
    seed_rng(1)
    train(begun, 1)
    path = save_checkpoint(tmp_path / "checkpoint", begun)
    resumed: Any = make()
    load_checkpoint(path).restore(resumed)
    train(resumed, 2)
    assert_identical(get_weights(resumed), get_weights(uninterrupted))
