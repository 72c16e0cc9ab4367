"""Weighted losses in loops: stand-in batches, records, validations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_runs import make_net, make_optimizer, wrapped
from hypothesis import given, settings
from hypothesis import strategies as st
from listeners import Records
from loop_parts import Unsized
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn

from stepwrap.loops import (
    EpochTrainLoop,
    HookList,
    IterTrainLoop,
    LoopState,
    MeanLoss,
    ShardedBatchSampler,
    ValLoop,
)
from stepwrap.loops.checkpoints.weights import get_weights
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel

EPOCHS = 2
WINDOW = 2
IGNORED = -100


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 60),
    size=st.integers(1, 20),
    batch=st.integers(1, 5),
    world=st.integers(1, 4),
)
def test_weighted_shares_have_each_sample_once(
    samples: int, size: int, batch: int, world: int
) -> None:
    """Updates follow the global order of samples, with equally many batches on each rank."""
    micro = -(-size // (batch * world))
    order_sampler = ShardedBatchSampler(samples, 1, shuffle=True, seed=5)
    order = [index for batch in order_sampler for index in batch]
    by_update: dict[int, list[int]] = {}
    lengths = set()
    for rank in range(world):
        sampler = ShardedBatchSampler(
            samples, batch, shuffle=True, seed=5, rank=rank, world_size=world
        )
        sampler.cut(size, micro, weighted=True)
        lengths.add(len(sampler))
        for index, indices in enumerate(sampler):
            assert len(indices) <= batch
            if sampler.counts(index):
                by_update.setdefault(index // micro, []).extend(indices)
            else:
                assert len(indices) == 1
    assert len(lengths) == 1
    updates = [sorted(order[at : at + size]) for at in range(0, samples, size)]
    assert [sorted(by_update[k]) for k in range(len(updates))] == updates


def test_a_cut_that_leaves_batches_empty_is_refused() -> None:
    sampler = ShardedBatchSampler(10, 2, shuffle=False)
    with pytest.raises(ValueError, match="got 4 .*batch of 5"):
        sampler.cut(5, 4)


def _batches(count: int, rank: int) -> list[list[Tensor]]:
    """Return batches of 1 to 3 samples with some ignored targets."""
    generator = torch.Generator().manual_seed(10 + rank)
    batches = []
    for index in range(count):
        size = 1 + index % 3
        inputs = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        target = torch.randint(0, 3, (size,), generator=generator)
        target[1:2] = IGNORED
        batches.append([inputs, target])
    return batches


def _train(
    kind: str, counts: tuple[int, ...], sized: bool, by_steps: int | None = None
) -> dict[str, Any]:
    model: Any = SupervisedModel(make_net(), nn.CrossEntropyLoss())
    rank = 0
    if dist.is_initialized():
        model = wrapped(kind, model)
        rank = dist.get_rank(model.data_group)
    else:
        model = SingleDevice(model)
    optim = OptimWrapper(make_optimizer(model), WINDOW, loss_weight="tokens")
    state, records = LoopState(model, optim), Records()
    rank_batches = _batches(counts[rank], rank)
    loader: Any = rank_batches if sized else Unsized(rank_batches)
    val_loop = ValLoop(rank_batches, {"loss": MeanLoss()})
    if by_steps is None:
        loop: Any = EpochTrainLoop(loader, max_epochs=EPOCHS, val_loop=val_loop, log_every_steps=2)
    else:
        loop = IterTrainLoop(loader, max_steps=by_steps, val_loop=val_loop, log_every_steps=2)
    loop.run(state, HookList([records]))
    full = {
        n: getattr(w, "full_tensor", lambda w=w: w)() for n, w in get_weights(model.module).items()
    }
    return {
        "weights": full,
        "step": (state.step, state.max_steps, state.epoch),
        "records": [record["loss"] for record in records.records],
        "validated": [record["loss"] for record in records.evaluated],
    }


def _plain(counts: tuple[int, ...]) -> dict[str, Any]:
    """Train in plain PyTorch with all batches of a window as one batch."""
    net, records = make_net(), []
    optimizer = make_optimizer(net)
    data = [_batches(count, rank) for rank, count in enumerate(counts)]
    sums, validated, step = [0.0, 0], [], 0
    for _ in range(EPOCHS):
        for start in range(0, max(counts), WINDOW):
            window = [b for rank_data in data for b in rank_data[start : start + WINDOW]]
            inputs, target = (torch.cat([batch[i] for batch in window]) for i in (0, 1))
            loss = nn.functional.cross_entropy(net(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tokens = int((target != IGNORED).sum())
            sums, step = [sums[0] + loss.item() * tokens, sums[1] + tokens], step + 1
            if step % 2 == 0:
                records.append(sums[0] / sums[1])
                sums = [0.0, 0]
        every = [b for rank_data in data for b in rank_data]
        inputs, target = (torch.cat([batch[i] for batch in every]) for i in (0, 1))
        with torch.no_grad():
            validated.append(nn.functional.cross_entropy(net(inputs), target).item())
    if step % 2:
        records.append(sums[0] / sums[1])
    weights = {f"net.{name}": w.detach() for name, w in net.state_dict().items()}
    return {"weights": weights, "step": step, "records": records, "validated": validated}


def _assert_equal(got: dict[str, Any], expected: dict[str, Any], *, sized: bool) -> None:
    for name, value in expected["weights"].items():
        assert (got["weights"][name] - value).abs().max().item() <= 1e-12, name
    steps = expected["step"]
    assert got["step"] == (steps, steps if sized else None, EPOCHS)
    assert got["records"] == pytest.approx(expected["records"], abs=1e-12)
    assert got["validated"] == pytest.approx(expected["validated"], abs=1e-12)


@pytest.mark.parametrize("sized", [True, False])
def test_windows_end_with_a_pass(sized: bool) -> None:
    """The last window of 5 batches has one batch, which is used also if the length is unknown."""
    got = _train("", (5,), sized)
    _assert_equal(got, _plain((5,)), sized=sized)


@pytest.mark.parametrize("by_steps", [2, 3, 5, 6])
def test_updates_are_counted_by_passes(by_steps: int) -> None:
    got = _train("", (5,), True, by_steps)
    assert got["step"] == (by_steps, by_steps, (by_steps - 1) // 3)


@pytest.mark.parametrize(
    ("kind", "counts", "sized"),
    [
        ("ddp", (5, 2), True),
        ("ddp", (3, 0), False),
        *slow(
            ("ddp", (1, 5, 4), True),
            ("fsdp", (5, 2), True),
            ("fsdp", (0, 5, 4), False),
            ("hsdp", (5, 2), False),
            ("hsdp", (1, 5, 4, 2), True),
            ("tensor", (5, 2), True),
            ("tensor", (5, 2), False),
        ),
    ],
)
def test_ranks_with_different_numbers_of_batches(
    kind: str, counts: tuple[int, ...], sized: bool
) -> None:
    """A rank without batches continues with a batch of weight zero."""
    expected = _plain(counts)
    ranks = len(counts) * (2 if kind == "tensor" else 1)
    for got in run_ranks(_train, ranks, kind, counts, sized):
        _assert_equal(got, expected, sized=sized)


class WithWeightLog(SingleDevice):
    """Also logs a value under a name that could be meant as the weight of the loss."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        return {**super().train_step(data, optim_wrapper), "loss weight": 0.25}


def test_logs_may_have_any_names() -> None:
    model = WithWeightLog(SupervisedModel(make_net(), nn.CrossEntropyLoss()))
    optim = OptimWrapper(make_optimizer(model), loss_weight="tokens")
    records = Records()
    loop = EpochTrainLoop(_batches(2, 0), max_epochs=1, log_every_steps=1)
    loop.run(LoopState(model, optim), HookList([records]))
    assert [sorted(record) for record in records.records] == [["loss", "loss weight"]] * 2
    assert [record["loss weight"] for record in records.records] == [0.25, 0.25]
