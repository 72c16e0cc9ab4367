"""Skipped steps: the same as without their batches, but the steps are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from listeners import on
from ranks import run_ranks
from spiky_runs import (
    Spiky,
    differing,
    flatten,
    get_samples,
    make_loader,
    make_state,
    sample_at,
    train,
)
from torch import nn

from stepwrap.loops import (
    CheckpointHook,
    EMAHook,
    EpochTrainLoop,
    HookList,
    IterTrainLoop,
    SchedulerHook,
    find_checkpoint,
    load_checkpoint,
)
from stepwrap.wrappers import OptimWrapper, OptimWrapperDict

STEPS = 12
LEFT_OUT = {1, 4, 9, 10}
SKIPS = [4, "9-10", 1]


def get_size(world_size: int, accumulate: int = 1) -> int:
    return len(get_samples(range(1, STEPS + 1), world_size, accumulate))


def compare(world_size: int, kind: str = "ddp", accumulate: int = 1) -> list[str]:
    """Return the differences between a run with skipped steps and one without their samples."""
    size = get_size(world_size, accumulate)
    # If these samples were used in any way, NaN would remain.
    gone = get_samples(LEFT_OUT, world_size, accumulate)
    wild = Spiky(size, dict.fromkeys(gone, float("nan")))
    state = make_state(kind, accumulative_counts=accumulate)
    train(state, wild, skip_steps=SKIPS)
    assert (state.step, state.iteration) == (STEPS, STEPS * accumulate)
    other = make_state(kind, accumulative_counts=accumulate)
    train(other, Spiky(size, without=gone))
    assert other.step == STEPS - len(LEFT_OUT)
    return differing(flatten(state), flatten(other))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_weights_buffers_and_streams_equal_a_run_without_the_samples(
    accumulate: int,
) -> None:
    assert not compare(1, accumulate=accumulate)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_same_on_two_ranks(kind: str) -> None:
    assert run_ranks(compare, 2, 2, kind, 2) == [[], []]


def test_the_same_as_plain_pytorch() -> None:
    data = Spiky(get_size(1))
    state = make_state()
    net = make_state().model.module.net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    train(state, data, skip_steps=SKIPS)
    make_state()
    batches = iter(make_loader(data))
    for step in range(1, STEPS + 1):
        stream = torch.get_rng_state()
        inputs, targets = next(batches)
        if step in LEFT_OUT:
            torch.set_rng_state(stream)
            continue
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = state.model.module.net.state_dict()
    assert not differing(dict(trained), dict(net.state_dict()))


def test_events_counters_and_rates_continue() -> None:
    updates: list[tuple[int, bool, float]] = []

    def on_update(state: Any) -> None:
        rate = state.optim_wrapper.get_lr()["lr"][0]
        updates.append((state.step, state.skipped, rate))

    state = make_state()
    schedule = torch.optim.lr_scheduler.ExponentialLR(state.optim_wrapper.optimizer, 0.5)
    hooks = [SchedulerHook([(schedule, "step")]), on(on_update=on_update)]
    train(state, Spiky(get_size(1)), hooks, skip_steps=[4])
    assert [step for step, _, _ in updates] == list(range(1, STEPS + 1))
    assert [step for step, skipped, _ in updates if skipped] == [4]
    assert [rate for _, _, rate in updates] == pytest.approx([1e-3 * 0.5**n for n in range(1, 13)])


def test_an_average_of_the_weights_does_not_move() -> None:
    gone = get_samples(LEFT_OUT, 1)
    averages = []
    for data, skips in ((Spiky(get_size(1)), SKIPS), (Spiky(get_size(1), without=gone), [])):
        ema = EMAHook(0.5)
        train(make_state(), data, [ema], skip_steps=skips)
        averages.append(ema.state_dict()["model"])
    assert not differing(*averages)


def test_an_iteration_loop_leaves_them_out_in_each_pass_by_their_numbers() -> None:
    data = Spiky(get_samples({5}, 1)[-1] + 1)
    loader = make_loader(data)
    state = make_state()
    IterTrainLoop(loader, max_steps=13, skip_steps=[7]).run(state, HookList())
    other = make_state()
    weights = {}
    keep = on(on_update=lambda state: weights.update({state.step: flatten(state)}))
    IterTrainLoop(loader, max_steps=8, skip_steps=["7-8"]).run(other, HookList([keep]))
    assert (state.step, state.epoch, state.batch) == (13, 2, 3)
    assert not differing(weights[6], weights[8])
    assert differing(weights[6], weights[5])


def test_a_resumed_run_leaves_them_out_as_well(tmp_path: Path) -> None:
    data = Spiky(get_size(1, 2))
    uninterrupted = train(make_state(accumulative_counts=2), data, skip_steps=SKIPS)
    hooks = [CheckpointHook(every_steps=3, keep_last=None)]
    stopped = make_state(run_dir=tmp_path, accumulative_counts=2)
    train(stopped, data, hooks, skip_steps=SKIPS)
    path = find_checkpoint(tmp_path, before=9)
    assert path is not None
    assert path.name == "step_00000006"
    second = make_state(accumulative_counts=2)
    load_checkpoint(path).restore(second)
    train(second, data, skip_steps=SKIPS)
    assert not differing(flatten(uninterrupted), flatten(second))


@pytest.mark.parametrize("wrong", [0, -3, True, "7-5", "a-b", "3-", 1.5])
def test_wrong_values_of_skip_steps_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="skip_steps must .*step numbers >= 1 .*got "):
        EpochTrainLoop([1], max_epochs=1, skip_steps=[2, wrong])


def grouped(accumulate: int) -> Any:
    state = make_state()
    params = list(state.model.parameters())
    members = {
        name: OptimWrapper(torch.optim.SGD(group, lr=0.01), accumulative_counts=accumulate)
        for name, group in (("low", params[:2]), ("high", params[2:]))
    }
    state.optim_wrapper = OptimWrapperDict(**members)

    def step(data: Any, optim: Any) -> dict[str, Any]:
        for member in optim.values():
            loss = state.model(*data, mode="loss")["loss"]
            member.update_params(loss)
        optim.zero_grad()
        return {"loss": loss.detach()}

    state.model.train_step = step
    return state


def test_steps_of_several_optimizers_are_left_out() -> None:
    gone = get_samples(LEFT_OUT, 1)
    wild = Spiky(get_size(1), dict.fromkeys(gone, float("nan")))
    state = train(grouped(1), wild, skip_steps=SKIPS)
    other = train(grouped(1), Spiky(get_size(1), without=gone))
    assert state.step == STEPS
    pairs = zip(state.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(actual, expected) for actual, expected in pairs)


def test_windows_of_several_optimizers_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match=r"accumulative_counts=1 .*, got \[2, 2\]"):
        train(grouped(2), Spiky(get_size(1)), skip_steps=[3])


def test_the_helpers_locate_samples_correctly() -> None:
    """Otherwise the other tests would compare runs of the same data."""
    assert sample_at(3, 1, 2, accumulate=2, batch=1) in get_samples({3}, 2, 2)
    assert len(make_loader(Spiky(get_size(1)))) == STEPS
