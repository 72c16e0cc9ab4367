"""The equally weighted average of the model's weights, and its BatchNorm statistics."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hook_runs import data, loader, metrics, new_state, train, weights
from marks import slow
from ranks import run_ranks
from sharded_runs import batch, make_run
from sharded_runs import train as train_sharded
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn, update_bn
from torch.utils.data import IterableDataset

from stepwrap.loops import (
    CheckpointHook,
    EMAHook,
    IterTrainLoop,
    SWAHook,
    ValLoop,
    build_loader,
    find_checkpoint,
    load_checkpoint,
)
from stepwrap.loops.hook import Hook, HookList
from stepwrap.loops.state import LoopState


class TorchsAverage(Hook):
    def __init__(self, *, steps: range = range(0), epochs: range = range(0)) -> None:
        self.steps, self.epochs = steps, epochs
        self.model: Any = None
        self.evaluated: list[list[Tensor]] = []

    def on_train_start(self, state: LoopState) -> None:
        self.model = AveragedModel(state.model.module, multi_avg_fn=get_swa_multi_avg_fn())

    def on_update(self, state: LoopState) -> None:
        if state.step in self.steps:
            self.model.update_parameters(state.model.module)

    def on_epoch_end(self, state: LoopState) -> None:
        if state.epoch + 1 in self.epochs:
            self.model.update_parameters(state.model.module)

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        self.evaluated.append(weights(state))


def normed() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def same(swa: SWAHook, expected: nn.Module) -> None:
    averages = swa.state_dict()["model"]
    for name, want in expected.named_parameters():
        torch.testing.assert_close(averages[name], want.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("every", [1, 3])
def test_by_steps_it_is_the_average_of_torch(every: int) -> None:
    reference, swa = TorchsAverage(steps=range(3, 99, every)), SWAHook(from_step=3, every=every)
    train(new_state(), [swa, reference], epochs=3)
    same(swa, reference.model.module)


def test_by_epochs_it_is_the_average_of_torch_and_validations_use_it() -> None:
    reference, swa = TorchsAverage(epochs=range(2, 99, 2)), SWAHook(from_epoch=2, every=2)
    train(new_state(), [swa, reference], epochs=5)
    same(swa, reference.model.module)
    averages = list(swa.state_dict()["model"].values())
    assert all(map(torch.equal, reference.evaluated[-1], averages))
    assert not any(map(torch.equal, reference.evaluated[0], averages))


def test_by_epochs_it_counts_the_passes_of_a_loop_over_steps() -> None:
    swa = SWAHook(from_epoch=2)
    loop = IterTrainLoop(loader(), max_steps=15, val_loop=ValLoop(loader(8), metrics()))
    loop.run(new_state(), HookList([swa]))
    # Passes have 4 updates, so epochs 2 and 3 were complete.
    assert swa.state_dict()["count"] == 2


def test_the_statistics_of_batchnorm_equal_torchs() -> None:
    state, swa, plain = new_state(net=normed()), SWAHook(from_step=2), new_state(net=normed())
    reference = TorchsAverage(steps=range(2, 99))
    train(state, [swa, reference])
    train(plain, [])
    averages = swa.state_dict()["model"]
    inputs = [batch[0] for batch in loader()]
    net = reference.model.module.net
    update_bn(inputs, net)
    for name, want in net.named_buffers():
        torch.testing.assert_close(averages[f"net.{name}"], want, rtol=1e-5, atol=1e-6)
    # The training's weights and statistics are unchanged.
    for name, value in plain.model.module.state_dict().items():
        assert torch.equal(value, state.model.module.state_dict()[name])
        assert state.model.module.net[1].momentum == 0.1


class Stateful(nn.Module):
    """A layer that changes a buffer, attributes and a generator of its own in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.seen, self.total = 0, [0], torch.zeros(())
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.calls += 1
            self.seen.append(len(x))
            self.total += x.detach().sum()
            x = x + 0.1 * torch.rand(x.shape, generator=self.generator)
        return (x - self.mean) * (1 + 0.1 * self.calls + 0.01 * len(self.seen)) + 0.1 * self.total


@pytest.mark.parametrize(
    "make_layer",
    [
        Stateful,
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2)),
            nn.InstanceNorm1d(2, track_running_stats=True),
            nn.Flatten(),
        ),
        lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    ],
    ids=["stateful", "instance_norm", "spectral_norm"],
)
def test_the_pass_for_batchnorm_does_not_change_the_training(make_layer: Any) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), make_layer(), nn.Linear(4, 1))
    plain, batches = deepcopy(net), list(loader())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for inputs, targets in batches * 3:
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(inputs), targets).backward()
        optimizer.step()
    swa = SWAHook(from_epoch=1)
    train(new_state(net=net), [swa], epochs=3, dataloader=batches)
    assert swa.state_dict()["count"] == swa.state_dict()["measured_at"] == 3
    for name, value in plain.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
    if isinstance(net[2], Stateful):
        assert (net[2].calls, net[2].seen) == (plain[2].calls, plain[2].seen)


def test_it_resumes_exactly_from_a_checkpoint_in_the_middle(tmp_path: Path) -> None:
    def run(folder: str, *extra: Hook, resume: bool = False, epochs: int = 3) -> dict[str, Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
        state, swa = new_state(net=net, run_dir=tmp_path / folder), SWAHook(from_epoch=1)
        saver = CheckpointHook(every_steps=6)
        state.stateful |= {"hooks.swa": swa, "hooks.checkpoint": saver}
        if resume:
            load_checkpoint(find_checkpoint(tmp_path / folder)).restore(state)
        train(state, [swa, saver, *extra], epochs=epochs, dataloader=shuffled())
        return swa.state_dict()

    class Stop(Hook):
        def on_update(self, state: LoopState) -> None:
            if state.step == 6:
                state.request_stop("enough")

    def shuffled() -> Any:
        return build_loader(data(), batch_size=4, shuffle=True, train=True)

    uninterrupted = run("whole")
    run("parts", Stop())
    resumed = run("parts", resume=True)
    assert resumed["count"] == uninterrupted["count"] == 3
    for name, want in uninterrupted["model"].items():
        assert torch.equal(resumed["model"][name], want), name


def test_a_test_alone_uses_the_average_and_its_statistics(tmp_path: Path) -> None:
    state, swa = new_state(net=normed(), run_dir=tmp_path), SWAHook(from_epoch=1)
    state.stateful["hooks.swa"] = swa
    train(state, [swa, CheckpointHook()])
    checkpoint = load_checkpoint(find_checkpoint(tmp_path))
    assert checkpoint.meta["evaluated"] == ["state.safetensors", "stateful", "hooks.swa", "model"]
    other, restored = new_state(net=normed()), SWAHook(from_epoch=1)
    other.stateful["hooks.swa"] = restored
    checkpoint.load_model(other.model)
    checkpoint.load_states(other)
    restored.on_eval_start(other)
    before = {name: value.clone() for name, value in other.model.module.state_dict().items()}
    restored.on_eval_end(other, {})
    for name, want in swa.state_dict()["model"].items():
        assert torch.equal(before[name], want)
        assert torch.equal(
            other.model.module.state_dict()[name], state.model.module.state_dict()[name]
        )


def test_invalid_settings() -> None:
    for wrong in ({}, {"from_epoch": 1, "from_step": 1}):
        with pytest.raises(ValueError, match="from_epoch or from_step, .*only one"):
            SWAHook(**wrong)
    with pytest.raises(ValueError, match="every must .*>= 1, got 0"):
        SWAHook(from_epoch=1, every=0)
    swa, ema, state = SWAHook(from_epoch=1), EMAHook(), new_state()
    state.stateful |= {"hooks.ema": ema, "hooks.swa": swa}
    with pytest.raises(ValueError, match=r"one average only, .*hooks\.ema, hooks\.swa"):
        train(state, [swa, ema])


def test_a_stream_cannot_be_read_twice_for_batchnorm() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(data())

        def __len__(self) -> int:
            return 16

    stream = build_loader(Stream(), batch_size=4)
    with pytest.raises(ValueError, match="a second time, .*DataLoader .*update_bn"):
        train(new_state(net=normed()), [SWAHook(from_epoch=1)], dataloader=stream)
    train(new_state(net=normed()), [SWAHook(from_epoch=1, update_bn=False)], dataloader=stream)


def _statistics_of_rank() -> dict[str, Tensor]:
    state, swa = new_state(net=normed()), SWAHook(from_epoch=1)
    train(state, [swa], dataloader=loader(batch_size=4 // max(1, _size())))
    return swa.state_dict()["model"]


def _float64_statistics_differ_by() -> float:
    """Return the largest relative difference between the statistics of the ranks and torch's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    inputs = list(torch.randn(2 * ranks, 8, 3, generator=generator, dtype=torch.float64))
    pairs = [(x, x.sum(1, keepdim=True)) for x in inputs]
    state, swa = new_state(net=normed().double()), SWAHook(from_epoch=1)
    train(state, [swa], dataloader=pairs[rank::ranks], per_rank=True, val_loop=None)
    averages = {name.removeprefix("net."): v for name, v in swa.state_dict()["model"].items()}
    plain = normed().double()
    plain.load_state_dict(averages)
    update_bn(inputs, plain)
    pairs = [(averages[f"1.{name}"], getattr(plain[1], name)) for name in _STATISTICS]
    return max(float(((got - want) / want).abs().max()) for got, want in pairs)


_STATISTICS = ("running_mean", "running_var")


def test_float64_statistics_of_three_ranks_have_all_bits() -> None:
    assert max(run_ranks(_float64_statistics_differ_by, 3)) < 1e-12


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _averaged_by_hand(kind: str) -> bool:
    """Return whether the average of a sharded model is the mean of its weights."""
    state, swa = make_run(kind), SWAHook(from_step=2)
    state.stateful["hooks.ema"] = swa
    snapshots = []
    for index in range(4):
        train_sharded(state, [index])
        snapshots.append([_whole(p) for p in state.model.module.parameters()])
    averages = [_whole(value) for value in swa.state_dict()["model"].values()]
    expected = [torch.stack(three).mean(0) for three in zip(*snapshots[1:], strict=True)]
    plain = state.model.val_step([batch(state, 9)[0]])["preds"].clone()
    swa.on_eval_start(state)
    other = state.model.val_step([batch(state, 9)[0]])["preds"].clone()
    swa.on_eval_end(state, {})
    back = state.model.val_step([batch(state, 9)[0]])["preds"]
    assert torch.equal(plain, back)
    assert not torch.equal(plain, other)
    return all(map(torch.allclose, averages, expected))


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


@pytest.mark.parametrize(("kind", "size"), [("fsdp", 2), *slow(("ddp", 2), ("hsdp", 4))])
def test_sharded_weights_are_averaged_in_parts(kind: str, size: int) -> None:
    assert run_ranks(_averaged_by_hand, size, kind) == [True] * size


def test_the_ranks_agree_on_the_statistics() -> None:
    rank_0, second = run_ranks(_statistics_of_rank, 2)
    for name, value in rank_0.items():
        assert torch.equal(value, second[name]), name
    assert int(rank_0["net.1.num_batches_tracked"]) == 8
