"""Ranks with different numbers of batches and `uneven_inputs`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from listeners import stop_at
from loop_parts import Unsized
from ranks import RanksError, run_ranks
from torch import Tensor, nn

from stepwrap.loops import (
    EMAHook,
    EpochTrainLoop,
    Hook,
    IterTrainLoop,
    NanGuardHook,
    SchedulerHook,
    Stateful,
    ValLoop,
)
from stepwrap.runner import Runner
from stepwrap.wrappers import (
    OptimWrapper,
    StepDistributedDataParallel,
    SupervisedModel,
    ZeroRedundancyOptimizer,
)

COUNTS = (5, 3)
EPOCHS = 3
DECAY = 0.9


def _batches(rank: int, count: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        [torch.randn(2, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 2])]
        for _ in range(count)
    ]


def _data(rank: int) -> list[list[Tensor]]:
    return _batches(rank, COUNTS[rank])


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def _optimizer(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)


def _split_batches(run_dir: Path | None = None, stop: Hook | None = None, **options: Any) -> Runner:
    model = SupervisedModel(_net(), nn.CrossEntropyLoss())
    optimizer = _optimizer(model)
    rank = dist.get_rank()
    by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    return Runner(
        StepDistributedDataParallel(model, **{"uneven_inputs": True, **options}),
        EpochTrainLoop(
            _data(rank),
            max_epochs=EPOCHS,
            log_every_steps=2,
            val_loop=ValLoop(_data(rank)),
            val_begin=EPOCHS - 1,
        ),
        optim_wrapper=OptimWrapper(optimizer, clip_grad={"max_norm": 5.0}),
        hooks={
            "schedulers": SchedulerHook([(by_step, "step")]),
            "ema": EMAHook(decay=DECAY),
            "nan": NanGuardHook(every_steps=1),
            "stop": stop or Hook(),
        },
        run_dir=run_dir,
    )


def _result(runner: Runner) -> dict[str, Any]:
    state = runner.state
    assert state.optim_wrapper is not None
    optimizer = state.optim_wrapper.optimizer  # type: ignore[attr-defined]
    momentum = [optimizer.state[p]["momentum_buffer"] for p in state.model.parameters()]
    ema = state.stateful["hooks.ema"]
    assert isinstance(ema, Stateful)
    return {
        "weights": torch.cat([p.detach().flatten() for p in state.model.parameters()]),
        "momentum": torch.cat([m.flatten() for m in momentum]),
        "ema": torch.cat([v.flatten() for v in ema.state_dict()["model"].values()]),
        "rate": optimizer.param_groups[0]["lr"],
        "counts": (state.epoch, state.batch, state.iteration, state.step, state.max_steps),
        "together": state.together,
    }


def _train(run_dir: Path | None = None, **options: Any) -> dict[str, Any]:
    runner = _split_batches(run_dir, **options)
    runner.train(resume=run_dir is not None)
    return _result(runner)


def _plain(by_all: bool) -> dict[str, Any]:
    """Train in one process on the mean over the ranks' batches of each update."""
    net = _net()
    optimizer = _optimizer(net)
    average = [p.detach().clone() for p in net.parameters()]
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    data = [_data(0), _data(1)]
    for _ in range(EPOCHS):
        for index in range(max(COUNTS)):
            present = [batches[index] for batches in data if index < len(batches)]
            losses = [nn.functional.cross_entropy(net(x), y) for x, y in present]
            total = torch.stack(losses).sum() / (len(COUNTS) if by_all else len(present))
            optimizer.zero_grad()
            total.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            rate.step()
            for average_param, parameter in zip(average, net.parameters(), strict=True):
                average_param.lerp_(parameter.detach(), 1 - DECAY)
    buffers = [optimizer.state[p]["momentum_buffer"] for p in net.parameters()]
    return {
        "weights": torch.cat([p.detach().flatten() for p in net.parameters()]),
        "momentum": torch.cat([b.flatten() for b in buffers]),
        "ema": torch.cat([average_param.flatten() for average_param in average]),
        "rate": optimizer.param_groups[0]["lr"],
    }


@pytest.mark.parametrize("by_all", [True, False])
def test_several_epochs_equal_plain_pytorch(by_all: bool) -> None:
    """Gradients are divided by the number of all or of the remaining ranks, as torch documents."""
    expected = _plain(by_all)
    options = {"divide_by_initial_world_size": by_all}
    results = run_ranks(_train, 2, uneven_inputs=True if by_all else options)
    for result in results:
        for name in ("weights", "momentum", "ema"):
            assert (result[name] - expected[name]).abs().max().item() <= 1e-12, name
        assert result["rate"] == pytest.approx(expected["rate"], rel=1e-12)
        steps = EPOCHS * max(COUNTS)
        assert result["counts"] == (EPOCHS, 0, steps, steps, steps)
        assert result["together"]


def _interrupted(run_dir: Path, at: int) -> tuple[int, str]:
    runner = _split_batches(run_dir, stop_at(at))
    runner.train()
    return runner.state.step, runner.state.stop_reason


@pytest.mark.parametrize("at", [2, 3, 5, 7, 9])
def test_resume(tmp_path: Path, at: int) -> None:
    """Also from a stop requested by a rank while the others have no batches left (9)."""
    expected = _plain(True)
    stopped = run_ranks(_interrupted, 2, tmp_path / "run", at)
    assert stopped == [(at, "enough")] * 2
    for result in run_ranks(_train, 2, tmp_path / "run"):
        assert (result["weights"] - expected["weights"]).abs().max().item() <= 1e-12
        assert (result["momentum"] - expected["momentum"]).abs().max().item() <= 1e-12


def _zero(net: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)


def _refusals() -> list[str]:
    texts = []
    data = _data(dist.get_rank())
    epochs, steps = EpochTrainLoop(data, max_epochs=1), IterTrainLoop(data, max_steps=4)
    for loop, make, window in (
        *((epochs, _optimizer, 2), (steps, _optimizer, 1)),
        (epochs, _zero, 1),
    ):
        model = SupervisedModel(_net(), nn.CrossEntropyLoss())
        wrapper = StepDistributedDataParallel(model, uneven_inputs=True)
        runner = Runner(wrapper, loop, optim_wrapper=OptimWrapper(make(model), window))
        with pytest.raises(ValueError, match="uneven_inputs") as refused:
            runner.train()
        texts.append(str(refused.value))
    with pytest.raises(ValueError, match="cannot be combined"):
        StepDistributedDataParallel(model, uneven_inputs=True, sync_batchnorm=True)
    with pytest.raises(TypeError, match="did you mean divide_by_initial_world_size"):
        StepDistributedDataParallel(model, uneven_inputs={"divide_by_world_size": True})
    return texts


def test_combinations_that_are_refused() -> None:
    for window, by_steps, optimizer in run_ranks(_refusals, 2):
        assert "needs accumulative_counts=1" in window
        assert "needs an EpochTrainLoop" in by_steps
        assert "cannot be combined with ZeroRedundancyOptimizer" in optimizer


def _even_only() -> None:
    _train(uneven_inputs=False)


def test_without_the_option() -> None:
    with pytest.raises(RanksError, match=r"got \[5, 3\] \(by rank\)"):
        run_ranks(_even_only, 2)


def _train_unknown(counts: tuple[int, ...], by_epoch: bool, uneven: bool) -> tuple[str, int]:
    """Return the error and the steps of this rank, whose loader has no length."""
    model = SupervisedModel(_net(), nn.CrossEntropyLoss())
    loader = Unsized(_batches(dist.get_rank(), counts[dist.get_rank()]))
    runner = Runner(
        StepDistributedDataParallel(model, uneven_inputs=uneven),
        EpochTrainLoop(loader, max_epochs=2) if by_epoch else IterTrainLoop(loader, max_steps=20),
        optim_wrapper=OptimWrapper(_optimizer(model)),
    )
    try:
        runner.train()
    except ValueError as error:
        return str(error), runner.state.step
    return "", runner.state.step


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((5, 3, 5), "rank 1 ran out after 3 batches in epoch 1, and ranks 0, 2 did not"),
        ((0, 2, 0), "ranks 0, 2 ran out after 0 batches in epoch 1, and rank 1 did not"),
    ],
)
def test_loaders_without_a_length_that_end_apart(
    counts: tuple[int, ...], message: str, by_epoch: bool
) -> None:
    for text, steps in run_ranks(_train_unknown, 3, counts, by_epoch, False):
        assert message in text
        assert steps == min(counts)


def test_loaders_without_a_length_that_end_together_or_with_uneven_inputs() -> None:
    """Several passes of a loop by steps, and a pass that ends apart with `uneven_inputs`."""
    assert run_ranks(_train_unknown, 2, (3, 3), False, False) == [("", 20)] * 2
    assert run_ranks(_train_unknown, 2, (3, 3), True, False) == [("", 6)] * 2
    assert run_ranks(_train_unknown, 2, (5, 3), True, True) == [("", 10)] * 2
