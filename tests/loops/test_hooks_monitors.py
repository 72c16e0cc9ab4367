"""Speed and gradient norms in the log records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hook_runs import data, loader, new_state, train
from listeners import Records
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from stepwrap.loops import GradNormHook, ThroughputHook
from stepwrap.loops.data.loaders import build_loader
from stepwrap.loops.hook import Hook, Scalars
from stepwrap.loops.state import LoopState
from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    Preparation,
    SingleDevice,
    StepDataParallel,
    SupervisedModel,
    build_mesh,
    with_train_step,
    wrap_model,
)


def norms_by_hand(batches: list[tuple[Tensor, Tensor]], lr: float = 0.05) -> list[float]:
    """Return the gradient norm before each update of a plain loop."""
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
    records = Records()
    train(new_state(), [GradNormHook(), records], epochs=1)
    norms = norms_by_hand(batches())
    expected = [sum(norms[:2]) / 2, sum(norms[2:]) / 2]
    assert [r["grad_norm"] for r in records.records] == pytest.approx(expected, rel=1e-6)


def test_gradient_norm_of_the_clipping_wrapper_is_before_clipping() -> None:
    records, state = Records(), new_state(clip_grad={"max_norm": 0.01})
    train(state, [GradNormHook(), records], epochs=1, log_every_steps=1)
    assert records.records[0]["grad_norm"] == pytest.approx(norms_by_hand(batches())[0], rel=1e-6)


@pytest.mark.parametrize(
    "clip",
    [
        {"type": "value", "clip_value": 0.01},
        {"max_norm": 0.01, "norm_type": 1.0},
        {"max_norm": 0.01, "norm_type": float("inf")},
    ],
)
def test_gradient_norm_is_the_l2_norm_before_any_clipping(clip: dict[str, Any]) -> None:
    records, state = Records(), new_state(clip_grad=clip)
    train(state, [GradNormHook(), records], epochs=1, log_every_steps=1)
    assert records.records[0]["grad_norm"] == pytest.approx(norms_by_hand(batches())[0], rel=1e-6)


def test_gradient_norm_is_of_the_whole_accumulation_window() -> None:
    records, state = Records(), new_state(accumulative_counts=2)
    train(state, [GradNormHook(), records], epochs=1, log_every_steps=1)
    pairs = batches()
    windows = [tuple(map(torch.cat, zip(*pairs[i : i + 2], strict=True))) for i in (0, 2)]
    expected = norms_by_hand(windows)
    assert [r["grad_norm"] for r in records.records] == pytest.approx(expected, rel=1e-6)


def test_gradient_norm_of_each_optimizer() -> None:
    records, state = Records(), new_state(net=nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    layers = state.model.module.net
    members = {
        name: OptimWrapper(torch.optim.SGD(layer.parameters(), lr=0.1))
        for name, layer in zip(("head", "tail"), layers, strict=True)
    }
    hook = GradNormHook()
    state.optim_wrapper = OptimWrapperDict(**members)
    hook.on_train_start(state)
    for param in layers.parameters():
        param.grad = torch.full_like(param, 2.0)
    for member in members.values():
        member.step()
    scalars: Scalars = {}
    hook.collect_logs(state, scalars)
    assert {k: float(v) for k, v in scalars.items()} == pytest.approx(
        {"grad_norm/head": 2 * 8**0.5, "grad_norm/tail": 2 * 3**0.5}
    )
    assert records.records == []


@pytest.mark.parametrize("clip", [None, {"max_norm": 0.01}], ids=["plain", "clip"])
@pytest.mark.parametrize("fused", [False, True])
def test_gradient_norm_leaves_out_updates_that_a_scaler_skips(
    fused: bool, clip: dict[str, float] | None
) -> None:
    records, state = Records(), new_state()
    state.optim_wrapper = AmpOptimWrapper(
        torch.optim.SGD(state.model.parameters(), lr=0.0, fused=fused),
        dtype=torch.float16,
        device="cpu",
        loss_scale={"init_scale": 2.0**17, "growth_interval": 1000},
        clip_grad=clip,
    )
    train(state, [GradNormHook(), records], epochs=3, log_every_steps=12)
    expected = norms_by_hand(batches(), lr=0.0)
    assert min(expected) * 0.9 < records.records[0]["grad_norm"] < max(expected) * 1.1


def _closed_step(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
    loss = lambda: wrapper(*data, mode="loss")["loss"]  # noqa: E731
    return {"loss": optim_wrapper.update_by_closure(loss, wrapper)}


@pytest.mark.parametrize(
    ("kind", "options"), [("LBFGS", {"max_iter": 3}), ("SGD", {}), ("Adam", {"fused": True})]
)
def test_gradient_norm_of_a_closure_is_that_of_its_first_evaluation(
    kind: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    net, norms = nn.Linear(3, 1), []
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.05, **options)
    for inputs, targets in batches():
        evaluated = []

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            evaluated.append(get_total_norm([p.grad for p in net.parameters()]).item())  # noqa: B023
            return loss

        optimizer.step(closure)
        assert len(evaluated) == (3 if kind == "LBFGS" else 1)
        norms.append(evaluated[0])
    records, state = Records(), new_state()
    state.model = with_train_step(SingleDevice, _closed_step)(state.model.module)
    optimizer = getattr(torch.optim, kind)(state.model.parameters(), lr=0.05, **options)
    state.optim_wrapper = OptimWrapper(optimizer)
    train(state, [GradNormHook(), records], epochs=1, log_every_steps=1)
    assert [r["grad_norm"] for r in records.records] == pytest.approx(norms, rel=1e-6)
    assert torch.equal(state.model.module.net.weight, net.weight)


def test_a_closure_may_be_a_keyword() -> None:
    state, hook, scalars = new_state(), GradNormHook(), {}
    hook.on_train_start(state)

    def closure() -> Tensor:
        for param in state.model.parameters():
            param.grad = torch.full_like(param, 2.0)
        return torch.zeros(())

    state.optim_wrapper.optimizer.step(closure=closure)
    hook.collect_logs(state, scalars)
    assert float(scalars["grad_norm"]) == 4.0


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


class Clock(Hook):
    """A simulated clock: 1 s per step, 3 s per batch, 100 s per evaluation batch."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def read(self, batches: list[Any]) -> Iterator[Any]:
        for batch in batches:
            self.now_s += 3
            yield batch

    def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Tensor]) -> None:
        self.now_s += 1

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        self.now_s += 100

    def on_save_point(self, state: LoopState) -> None:
        self.now_s += 4


class ClockedLoader(list[Any]):
    def __init__(self, batches: list[Any], clock: Clock) -> None:
        super().__init__(batches)
        self._clock = clock

    def __iter__(self) -> Iterator[Any]:
        return self._clock.read(list(super().__iter__()))


def test_speed_without_evaluations_and_the_share_of_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, records = Clock(), Records()
    monkeypatch.setattr("stepwrap.loops.hooks.monitors.perf_counter", clock)
    train(
        new_state(), [clock, ThroughputHook(), records], dataloader=ClockedLoader(batches(), clock)
    )
    # An interval has two steps of 3 + 1 s and two save points of 4 s, fewer at the start and more
    # after the end of an epoch.
    for record, seconds in zip(records.records, [12, 16, 20, 16], strict=True):
        assert record["steps_per_s"] == pytest.approx(2 / seconds)
        assert record["samples_per_s"] == pytest.approx(8 / seconds)
        assert record["data_share"] == pytest.approx(6 / seconds)


def measure_speed(batches: list[Any], model: nn.Module, **counts: float) -> dict[str, float]:
    """Train one update per batch and return the record."""
    hook, state = ThroughputHook(**counts), LoopState(model=model)
    hook.on_train_start(state)
    for batch in batches:
        hook.on_batch_start(state, batch)
        hook.on_batch_end(state, batch, {})
    state.step = len(batches)
    scalars: Scalars = {}
    hook.collect_logs(state, scalars)
    return {name: float(value) for name, value in scalars.items()}


@pytest.mark.parametrize(
    ("batches", "size"),
    [
        ([torch.zeros(5, 2)] * 2, 5),
        ([[torch.zeros(6, 2), torch.zeros(6)]] * 2, 6),
        ([{"id": "x", "scale": torch.tensor(1.0), "image": (torch.zeros(7, 1),)}] * 2, 7),
        ([{"names": ["a", "b"]}] * 2, 0),
        ([{"a": torch.zeros(3, 1)}, [torch.zeros(2, 1)]], 2.5),
    ],
    ids=["tensor", "pair", "nested", "none", "other"],
)
def test_size_of_a_batch(batches: list[Any], size: float) -> None:
    record = measure_speed(batches, nn.Identity())
    assert record["samples_per_s"] == pytest.approx(size * record["steps_per_s"])


class Described(nn.Linear):
    """A network with attributes for its tokens and operations."""

    tokens_per_sample = 6
    flops_per_token = 1e3
    flops_per_sample = 7e3


PEAK = 1e9
IN_MODEL = SingleDevice(Described(3, 1))
IN_NET = SingleDevice(SupervisedModel(Described(3, 1), nn.MSELoss()))


@pytest.mark.parametrize(
    ("model", "counts", "tokens", "flops"),
    [
        (nn.Identity(), {"tokens_per_sample": 4, "flops_per_token": 100.0}, 4, 400),
        (nn.Identity(), {"flops_per_sample": 50.0}, None, 50),
        (IN_MODEL, {}, 6, 6e3),
        (IN_NET, {}, 6, 6e3),
        # The hook's arguments take precedence over the model's attributes.
        (IN_MODEL, {"tokens_per_sample": 2, "flops_per_sample": 10.0}, 2, 10),
        # Two replicas on one device count as one device.
        (StepDataParallel(Described(3, 1), device_ids=["cpu", "cpu"]), {}, 6, 6e3),
    ],
)
def test_tokens_and_mfu(
    model: nn.Module, counts: dict[str, float], tokens: int | None, flops: float
) -> None:
    record = measure_speed([torch.zeros(5, 3)] * 2, model, **counts, peak_flops=PEAK)
    samples = record["samples_per_s"]
    assert record["mfu"] == pytest.approx(flops * samples / PEAK)
    if tokens is None:
        assert "tokens_per_s" not in record
    else:
        assert record["tokens_per_s"] == pytest.approx(tokens * samples)


@pytest.mark.parametrize("model", [IN_MODEL, IN_NET])
def test_mfu_is_not_logged_without_a_peak(model: nn.Module) -> None:
    assert "mfu" not in measure_speed([torch.zeros(5, 3)] * 2, model)


def test_only_tokens_that_the_loss_counts_are_counted() -> None:
    records, state = Records(), new_state(loss_weight="tokens")
    ragged = [(inputs, targets.clone()) for inputs, targets in batches()]
    for count, (_, targets) in enumerate(ragged):
        targets[:count] = -100
    speed = ThroughputHook(flops_per_token=10.0, peak_flops=1e6)
    train(state, [speed, records], epochs=1, log_every_steps=1, dataloader=ragged)
    for count, record in enumerate(records.records):
        assert record["samples_per_s"] == pytest.approx(4 * record["steps_per_s"])
        assert record["tokens_per_s"] == pytest.approx((4 - count) * record["steps_per_s"])
        assert record["mfu"] == pytest.approx(10 * record["tokens_per_s"] / 1e6)


def test_samples_and_tokens_of_skipped_steps_do_not_count() -> None:
    records, state = Records(), new_state(loss_weight="tokens")
    hooks = [ThroughputHook(), records]
    train(state, hooks, epochs=1, log_every_steps=1, dataloader=batches(), skip_steps=[1, 3])
    for record, count in zip(records.records, [0, 4, 0, 4], strict=True):
        assert record["samples_per_s"] == pytest.approx(count * record["steps_per_s"])
        assert record["tokens_per_s"] == pytest.approx(count * record["steps_per_s"])


def test_stand_in_batches_do_not_count_as_samples() -> None:
    hook, state = ThroughputHook(), new_state(loss_weight="samples")
    hook.on_train_start(state)
    for counts in (True, False):
        state.optim_wrapper.batch_counts = counts
        hook.on_batch_start(state, torch.zeros(5, 3))
    state.step = 1
    scalars: Scalars = {}
    hook.collect_logs(state, scalars)
    assert float(scalars["samples_per_s"]) == pytest.approx(5 * float(scalars["steps_per_s"]))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"tokens_per_sample": 0}, "tokens_per_sample must be more than 0, got 0"),
        ({"peak_flops": float("nan")}, "peak_flops must be more than 0, got nan"),
        ({"flops_per_sample": 1.0}, "mfu needs peak_flops"),
        ({"peak_flops": 1.0}, "mfu needs flops_per_token or flops_per_sample"),
        ({"peak_flops": 1.0, "flops_per_token": 1.0}, "flops_per_token needs tokens_per_sample"),
        ({"peak_flops": 1.0, "flops_per_token": 1.0, "flops_per_sample": 1.0}, "got both"),
    ],
)
def test_counts_that_are_wrong_or_missing(counts: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThroughputHook(**counts).on_train_start(LoopState(model=nn.Identity()))


def _records_of_rank() -> list[dict[str, float]]:
    records = Records()
    speed = ThroughputHook(tokens_per_sample=3, flops_per_token=10.0, peak_flops=1e6)
    train(new_state(), [speed, GradNormHook(), records], epochs=1, log_every_steps=1)
    return records.records


def test_samples_are_summed_over_ranks_and_norms_equal_one_process() -> None:
    rank_0, second = run_ranks(_records_of_rank, 2)
    assert rank_0 == second
    for record in rank_0:
        assert record["samples_per_s"] == pytest.approx(2 * 4 * record["steps_per_s"])
        assert record["tokens_per_s"] == pytest.approx(3 * record["samples_per_s"])
        assert record["mfu"] == pytest.approx(10 * record["tokens_per_s"] / (2 * 1e6))
    pairs = batches()
    windows = [tuple(map(torch.cat, zip(*pairs[i : i + 2], strict=True))) for i in (0, 2)]
    assert [r["grad_norm"] for r in rank_0] == pytest.approx(norms_by_hand(windows), rel=1e-5)


def _records_of_a_split_model() -> list[dict[str, float]]:
    records = Records()
    model = SupervisedModel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), nn.MSELoss())
    plan = Preparation(tensor_parallel={"net.0": "colwise", "net.1": "rowwise"})
    wrapped = wrap_model(None, model, mesh=build_mesh({"tensor": 2}), prepare=plan)
    state = LoopState(wrapped, OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1)))
    loader_of_all = build_loader(data(), batch_size=4, shard=(0, 1))
    speed = ThroughputHook(flops_per_sample=10.0, peak_flops=1e6)
    train(state, [speed, records], epochs=1, val_loop=None, dataloader=loader_of_all)
    return records.records


def test_samples_that_ranks_of_a_tensor_axis_share_count_once() -> None:
    for record in run_ranks(_records_of_a_split_model, 2)[0]:
        assert record["samples_per_s"] == pytest.approx(4 * record["steps_per_s"])
        # Two devices share the work on each sample.
        assert record["mfu"] == pytest.approx(10 * record["samples_per_s"] / (2 * 1e6))
