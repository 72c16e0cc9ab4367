"""Speed and gradient norms in the log records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hook_runs import loader, new_state, train
from ranks import run_ranks
from stepwrap.loops.hook import Hook, Scalars
from stepwrap.loops.hooks import GradNormHook, ThroughputHook
from stepwrap.loops.state import LoopState
from stepwrap.wrappers import OptimWrapper, OptimWrapperDict
from torch import Tensor, nn
from torch.nn.utils import get_total_norm


class RecordsHook(Hook):
    """Keeps the log records."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self.records.append(dict(record))


def norms_by_hand(batches: list[tuple[Tensor, Tensor]], lr: float = 0.05) -> list[float]:
    """Return the gradients' norm before each update of a plain loop."""
    torch.manual_seed(0)
    net, norms = nn.Linear(3, 1), []
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        norms.append(get_total_norm([p.grad for p in net.parameters()]).item())
        optimizer.step()
    return norms


def batches() -> list[Any]:
    return list(loader())


def test_gradient_norm_is_the_mean_over_the_interval() -> None:
    seen = RecordsHook()
    train(new_state(), [GradNormHook(), seen], epochs=1)
    norms = norms_by_hand(batches())
    expected = [sum(norms[:2]) / 2, sum(norms[2:]) / 2]
    assert [r["grad_norm"] for r in seen.records] == pytest.approx(expected, rel=1e-6)


def test_gradient_norm_of_the_clipping_wrapper_is_before_clipping() -> None:
    seen, state = RecordsHook(), new_state(clip_grad={"max_norm": 0.01})
    train(state, [GradNormHook(), seen], epochs=1, log_every_steps=1)
    assert seen.records[0]["grad_norm"] == pytest.approx(norms_by_hand(batches())[0], rel=1e-6)


def test_gradient_norm_under_accumulation_is_that_of_the_whole_window() -> None:
    seen, state = RecordsHook(), new_state(accumulative_counts=2)
    train(state, [GradNormHook(), seen], epochs=1, log_every_steps=1)
    pairs = batches()
    windows = [tuple(map(torch.cat, zip(*pairs[i : i + 2], strict=True))) for i in (0, 2)]
    expected = norms_by_hand(windows)
    assert [r["grad_norm"] for r in seen.records] == pytest.approx(expected, rel=1e-6)


def test_gradient_norm_of_each_optimizer() -> None:
    seen, state = RecordsHook(), new_state(net=nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    parts = state.model.module.net
    members = {
        name: OptimWrapper(torch.optim.SGD(part.parameters(), lr=0.1))
        for name, part in zip(("head", "tail"), parts, strict=True)
    }
    hook = GradNormHook()
    state.optim_wrapper = OptimWrapperDict(**members)
    hook.on_train_start(state)
    for param in parts.parameters():
        param.grad = torch.full_like(param, 2.0)
    for member in members.values():
        member.step()
    scalars: Scalars = {}
    hook.collect_logs(state, scalars)
    assert {k: float(v) for k, v in scalars.items()} == pytest.approx(
        {"grad_norm/head": 2 * 8**0.5, "grad_norm/tail": 2 * 3**0.5}
    )
    assert seen.records == []


def test_nothing_is_left_on_the_optimizer() -> None:
    state, hook = new_state(), GradNormHook()
    train(state, [hook], epochs=1)
    assert isinstance(state.optim_wrapper, OptimWrapper)
    for param in state.model.parameters():
        param.grad = torch.ones_like(param)
    state.optim_wrapper.step()
    scalars: Scalars = {}
    hook.collect_logs(state, scalars)
    assert scalars == {}


def test_speed_is_logged() -> None:
    seen = RecordsHook()
    train(new_state(), [ThroughputHook(), seen])
    for record in seen.records:
        assert record["samples_per_s"] == pytest.approx(4 * record["steps_per_s"])
        assert record["steps_per_s"] > 0
        assert 0 <= record["data_share"] <= 1


class SlowLoader(list[Any]):
    """A loader that sleeps before each batch."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            _sleep()
            yield batch


def _sleep() -> None:
    torch.cuda.is_available()
    import time

    time.sleep(0.02)


def test_waiting_for_data_is_told_from_working() -> None:
    class SlowStepHook(Hook):
        def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Tensor]) -> None:
            _sleep()

    waiting, working = RecordsHook(), RecordsHook()
    train(new_state(), [ThroughputHook(), waiting], dataloader=SlowLoader(batches()), epochs=1)
    train(new_state(), [ThroughputHook(), SlowStepHook(), working], epochs=1)
    assert all(record["data_share"] > 0.5 for record in waiting.records)
    assert all(record["data_share"] < 0.5 for record in working.records)


def test_evaluations_do_not_count_as_training() -> None:
    class SlowEvalHook(Hook):
        def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
            for _ in range(10):
                _sleep()

    seen = RecordsHook()
    train(new_state(), [ThroughputHook(), SlowEvalHook(), seen])
    assert all(record["steps_per_s"] > 2 / 0.2 for record in seen.records)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        ([torch.zeros(6, 2), torch.zeros(6)], 6),
        ({"id": "x", "scale": torch.tensor(1.0), "image": (torch.zeros(7, 1),)}, 7),
        ({"names": ["a", "b"]}, 0),
    ],
    ids=["tensor", "pair", "nested", "none"],
)
def test_size_of_a_batch(batch: Any, size: int) -> None:
    hook, state = ThroughputHook(), LoopState(model=nn.Identity())
    hook.on_train_start(state)
    for _ in range(2):
        hook.on_batch_start(state, batch)
        hook.on_batch_end(state, batch, {})
    state.step = 2
    scalars: Scalars = {}
    hook.collect_logs(state, scalars)
    assert float(scalars["samples_per_s"]) == pytest.approx(size * float(scalars["steps_per_s"]))


def test_a_batch_of_another_shape() -> None:
    hook, state = ThroughputHook(), LoopState(model=nn.Identity(), step=0)
    hook.on_train_start(state)
    hook.on_batch_start(state, {"a": torch.zeros(3, 1)})
    hook.on_batch_start(state, [torch.zeros(2, 1)])
    state.step = 1
    scalars: Scalars = {}
    hook.collect_logs(state, scalars)
    assert float(scalars["samples_per_s"]) == pytest.approx(5 * float(scalars["steps_per_s"]))


def _records_of_rank() -> list[dict[str, float]]:
    seen = RecordsHook()
    train(new_state(), [ThroughputHook(), GradNormHook(), seen], epochs=1, log_every_steps=1)
    return seen.records


def test_samples_are_summed_over_ranks_and_norms_equal_one_process() -> None:
    first, second = run_ranks(_records_of_rank, 2)
    assert first == second
    for record in first:
        assert record["samples_per_s"] == pytest.approx(2 * 4 * record["steps_per_s"], rel=0.3)
    pairs = batches()
    windows = [tuple(map(torch.cat, zip(*pairs[i : i + 2], strict=True))) for i in (0, 2)]
    assert [r["grad_norm"] for r in first] == pytest.approx(norms_by_hand(windows), rel=1e-5)
