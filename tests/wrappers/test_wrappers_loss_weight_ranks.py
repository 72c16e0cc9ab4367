"""With loss weights every split of a global batch gives the same gradients on every wrapper."""

from pathlib import Path
from typing import Any

import pytest
import torch
from marks import nightly, slow
from on_ranks import gathered, on_ranks
from parity_cells import make_mesh, whole_weights
from ranks import run_ranks
from step_models import classifier
from torch import Tensor, nn
from weighted_models import (
    Tagger,
    Weighted,
    all_cells,
    difference,
    get_micro_batches,
    get_optimizer,
    global_batch,
    run_weighted,
    split,
    train,
    train_whole,
)

from stepwrap.loops import LoopState, find_checkpoint, load_checkpoint, save_checkpoint
from stepwrap.wrappers import (
    CommHook,
    OptimWrapper,
    OptimWrapperDict,
    PostLocalSGD,
    SeparateDistributedDataParallel,
    SingleDevice,
    StepDistributedDataParallel,
    with_train_step,
)

QUICK = [("single", 1), ("dp, 2 replicas", 1), ("ddp", 2), ("fsdp", 2), ("separate", 2)]
FOURS = [("ddp", 4), ("hsdp", 4), ("ddp x tp", 4), ("fsdp x tp", 4), ("tp 2", 2)]
# One setting of each kind, because the whole product is slow.
FEW = [
    Weighted("tokens", "fp64", 3, True),
    Weighted("samples", "fp32", 1, False),
    Weighted("mask", "fp64", 1, True),
    Weighted("tokens", "fp16", 3, True),
    Weighted("own", "bf16", 1, False),
]


@pytest.mark.parametrize(
    ("kind", "world", "cells"),
    [
        *((*row, FEW) for row in QUICK[1:]),
        *slow(*((*row, FEW) for row in FOURS)),
        ("single", 1, all_cells()),
        *nightly(*((*row, all_cells()) for row in QUICK[1:] + FOURS)),
    ],
)
@on_ranks("world")
def test_pieces_are_a_whole(kind: str, world: int, cells: list[Weighted]) -> None:
    assert [str(cell) for cell in run_weighted(kind, cells) if not cell.is_within] == []


def _own_step(wrapper: Any, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
    with optim_wrapper.optim_context(wrapper):
        optim_wrapper.weigh(data)
        losses = wrapper(**data, mode="loss")
    optim_wrapper.update_params(losses["loss"])
    return losses


def _forgetful(wrapper: Any, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
    with optim_wrapper.optim_context(wrapper):
        losses = wrapper(**data, mode="loss")
    optim_wrapper.update_params(losses["loss"])
    return losses


def _weighs_outside(wrapper: Any, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
    losses = wrapper(**data, mode="loss")
    optim_wrapper.weigh(data)
    optim_wrapper.update_params(losses["loss"])
    return losses


def _train_whole(updates: int = Weighted().updates) -> dict[str, Tensor]:
    return train_whole("tokens", updates)[0]


def _train_by_step(step: Any) -> Any:
    wrapper = with_train_step(StepDistributedDataParallel, step)(Tagger())
    train(wrapper, get_optimizer(wrapper, Weighted()), Weighted(), make_mesh("ddp", 2))
    return wrapper


@on_ranks(2)
def test_a_custom_step() -> None:
    assert difference(whole_weights(_train_by_step(_own_step)), _train_whole()) <= 1e-12


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (_forgetful, r"call optim_wrapper.weigh\(batch\) with the preprocessed batch"),
        (_weighs_outside, r"in optim_wrapper.optim_context\(self\), .* optim_wrapper.weigh"),
    ],
)
@on_ranks(2)
def test_steps_that_do_not_weigh_are_refused(step: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        _train_by_step(step)


@on_ranks(1)
def test_one_rank_may_weigh_outside_the_context() -> None:
    wrapper = with_train_step(SingleDevice, _weighs_outside)(Tagger())
    train(wrapper, get_optimizer(wrapper, Weighted()), Weighted(), make_mesh("single", 1))
    assert difference(whole_weights(wrapper), _train_whole()) <= 1e-12


class _TwoOptimizers(Tagger):
    """A model with an optimizer for each layer; the second steps after every micro-batch."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        optim_a, second = optim_wrapper["first"], optim_wrapper["second"]
        with optim_a.optim_context(self.first), second.optim_context(self.second):
            data = self.data_preprocessor(data, training=True)
            optim_wrapper.weigh(data)
            losses = self(**data, mode="loss")
        total, logs = self.parse_losses(losses)
        optim_a.backward(
            optim_a.scale_loss(total), inputs=list(self.first.parameters()), retain_graph=True
        )
        second.backward(second.scale_loss(total), inputs=list(self.second.parameters()))
        for member in (optim_a, second):
            if member.should_update():
                member.step()
                member.zero_grad()
        return logs


@on_ranks(2)
def test_several_optimizers() -> None:
    mesh, cell = make_mesh("separate", 2), Weighted()
    wrapper = SeparateDistributedDataParallel(_TwoOptimizers())
    members = {"first": wrapper.module.first, "second": wrapper.module.second}
    optim_wrapper: Any = OptimWrapperDict(
        **{name: get_optimizer(member, cell) for name, member in members.items()}
    )
    train(wrapper, optim_wrapper, cell, mesh)
    assert difference(whole_weights(wrapper), _train_whole()) <= 1e-12


@on_ranks(2)
def test_under_the_wrapper_of_torch() -> None:
    mesh, cell = make_mesh("ddp", 2), Weighted()
    wrapper = nn.parallel.DistributedDataParallel(Tagger())
    optim_wrapper = get_optimizer(wrapper, cell)
    for update in range(cell.updates):
        for batch in get_micro_batches(cell, update, mesh):
            _own_step(wrapper, batch, optim_wrapper)
    assert difference(wrapper.module.state_dict(), _train_whole()) <= 1e-12


@on_ranks(2)
def test_ranks_that_train_separately() -> None:
    """A wrapper for one device divides by this rank's weights only."""
    rank, cell = torch.distributed.get_rank(), Weighted(accumulate=2, updates=1)
    rank_parts = split(global_batch(0), 5, seed=0)[2 * rank : 2 * rank + 2]
    wrapper, plain = SingleDevice(Tagger()), Tagger()
    optim_wrapper = get_optimizer(wrapper, cell)
    for micro_batch in rank_parts:
        wrapper.train_step(micro_batch, optim_wrapper)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    plain(
        **{
            key: torch.cat([micro_batch[key] for micro_batch in rank_parts])
            for key in rank_parts[0]
        }
    )["loss"].backward()
    optimizer.step()
    assert difference(whole_weights(wrapper), plain.state_dict()) <= 1e-12


@on_ranks(2)
def test_ranks_with_weight_0() -> None:
    """One update has no weight on any rank, another has none on one rank."""
    cell = Weighted("mask", accumulate=1)
    wrapper = StepDistributedDataParallel(Tagger("mask", torch.float64))
    optim_wrapper = get_optimizer(wrapper, cell)
    before, steps = wrapper.module.second.bias.detach().clone(), []
    (batch,) = get_micro_batches(cell, 0, make_mesh("ddp", 2))[:1]
    for counts in ((), (1,)):
        optim_wrapper.batch_counts = wrapper.process_group.rank() in counts
        wrapper.train_step(batch, optim_wrapper)
        steps.append((wrapper.module.second.bias - before).abs().max().item())
    assert gathered(steps) == [steps] * 2
    assert steps[0] == 0
    assert 0 < steps[1] < 1


class _OwnMean(CommHook):
    averages = True

    def bind(self, group: Any) -> Any:
        return group, _mean


def _mean(state: Any, bucket: Any) -> Any:
    work = torch.distributed.all_reduce(bucket.buffer().div_(2), group=state, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


LOCAL = {"type": "post_localSGD", "start_localSGD_iter": 2}


@pytest.mark.parametrize("kind", [StepDistributedDataParallel, SeparateDistributedDataParallel])
@pytest.mark.parametrize(
    ("hook", "refused"),
    [
        (None, None),
        ("bf16_compress", None),
        (_OwnMean(), None),
        ({"type": "powerSGD"}, "powerSGD_hook"),
        (LOCAL, "post_localSGD_hook"),
        (_mean, "_mean"),
    ],
)
@on_ranks(2)
def test_hooks_that_do_not_average_are_refused(kind: Any, hook: Any, refused: str | None) -> None:
    wrapper = kind(Tagger(), comm_hook=hook)
    optim_wrapper = get_optimizer(wrapper, Weighted())
    # The error is not raised only once.
    for _ in range(2):
        if refused is None:
            optim_wrapper.optim_context(wrapper)
        else:
            with pytest.raises(ValueError, match=f"comm_hook {refused} may"):
                optim_wrapper.optim_context(wrapper)


@on_ranks(2)
def test_local_sgd_and_join_are_refused() -> None:
    options: Any = {"period": 2, "optimizer_class": "SGD", "lr": 0.1}
    optimizer = PostLocalSGD(classifier().parameters(), **options)
    with pytest.raises(ValueError, match="PostLocalSGD .*loss_weight"):
        OptimWrapper(optimizer, loss_weight="samples")
    wrapper = StepDistributedDataParallel(Tagger())
    with wrapper.join():
        optim_wrapper = get_optimizer(wrapper, Weighted())
        with pytest.raises(ValueError, match=r"loss_weight cannot .*join\(\)"):
            optim_wrapper.optim_context(wrapper)
    with pytest.raises(ValueError, match=r"loss_weight cannot .*join\(\)"):
        wrapper.join().__enter__()


def _begin_window(folder: Path) -> None:
    mesh, cell = make_mesh("ddp", 2), Weighted()
    wrapper = StepDistributedDataParallel(Tagger())
    optim_wrapper = get_optimizer(wrapper, cell)
    for batch in get_micro_batches(cell, 0, mesh)[:2]:
        wrapper.train_step(batch, optim_wrapper)
    save_checkpoint(folder, LoopState(wrapper, optim_wrapper, iteration=2))


def _end_window(folder: Path, world: int) -> float:
    micro_batches = split(global_batch(0), 6, seed=0)[4:]
    wrapper: Any = StepDistributedDataParallel(Tagger()) if world > 1 else SingleDevice(Tagger())
    optim_wrapper = get_optimizer(wrapper, Weighted())
    state = LoopState(wrapper, optim_wrapper)
    path = find_checkpoint(folder)
    assert path is not None
    load_checkpoint(path).restore(state)
    if world == 1:
        micro_batches = [
            {
                key: torch.cat([micro_batch[key] for micro_batch in micro_batches])
                for key in micro_batches[0]
            }
        ]
    wrapper.train_step(micro_batches[torch.distributed.get_rank()], optim_wrapper)
    assert optim_wrapper.window_weight == 0
    return difference(whole_weights(wrapper), _train_whole(1))


@pytest.mark.parametrize("world", [2, 1])
def test_a_window_continues_from_a_checkpoint(tmp_path: Path, world: int) -> None:
    run_ranks(_begin_window, 2, tmp_path)
    assert max(run_ranks(_end_window, world, tmp_path, world)) <= 1e-12
