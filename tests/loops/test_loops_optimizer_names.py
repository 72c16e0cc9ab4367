"""Checkpoints pair the state of optimizers with parameters by name, not by position."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn

from stepwrap.loops import (
    CheckpointError,
    LoopState,
    SchedulerHook,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.loops.checkpoints import checkpoint as format_of_checkpoints
from stepwrap.loops.checkpoints.tensor_files import pack
from stepwrap.loops.checkpoints.weights import get_weights
from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    PostLocalSGD,
    SeparateDistributedDataParallel,
    SingleDevice,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
    ZeroRedundancyOptimizer,
)

SIZE = 8
Weights = dict[str, Tensor]


class Ordered(nn.Module):
    """A chain of equal layers, which are registered in any order."""

    def __init__(self, order: str, tie: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {name: nn.Linear(SIZE, SIZE) for name in "abc"}
        for name in order:
            setattr(self, name, layers[name])
        if tie:
            self.c.weight = self.a.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.c(self.b(self.a(inputs).tanh()).tanh())


def batch(index: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(index)
    inputs, target = (torch.randn(8, SIZE, generator=generator) for _ in "xy")
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        inputs, target = inputs.chunk(size)[rank], target.chunk(size)[rank]
    return [inputs, target]


def whole(state: LoopState) -> Weights:
    weights = get_weights(state.model.module)
    wholes = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in weights.items()}
    return {name: value.detach().clone() for name, value in wholes.items()}


def train(state: LoopState, steps: range) -> Weights:
    for at in steps:
        state.model.train_step(batch(at), state.optim_wrapper)
        state.step += 1
    return whole(state)


KINDS: dict[str, Callable[..., Any]] = {
    "single": SingleDevice,
    "ddp": StepDistributedDataParallel,
    "fsdp": lambda model: StepFullyShardedDataParallel(model, shard=["net.a", "net.b"]),
    "separate": SeparateDistributedDataParallel,
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "zero": lambda params: ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.05),
    "local": lambda params: PostLocalSGD(params, torch.optim.AdamW, lr=0.05, period=2),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
}


class ByClosure(SingleDevice):
    """Trains with LBFGS, whose state is one vector over all parameters."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        def closure() -> Tensor:
            return self(*data, mode="loss")["loss"]

        return {"loss": optim_wrapper.update_by_closure(closure, self)}


def make_run(kind: str, optimizer: str, order: str, tie: bool = False) -> LoopState:
    wrap = ByClosure if optimizer == "lbfgs" else KINDS[kind]
    wrapper = wrap(SupervisedModel(Ordered(order, tie), nn.MSELoss()))
    return LoopState(wrapper, OptimWrapper(OPTIMIZERS[optimizer](wrapper.parameters())))


def resumed(kind: str, optimizer: str, folder: Path, tie: bool = False) -> tuple[Weights, Weights]:
    """Return the weights without interruption, and of a resumed model with another order."""
    state = make_run(kind, optimizer, "abc", tie)
    train(state, range(3))
    path = save_checkpoint(folder, state)
    expected = train(state, range(3, 6))
    state = make_run(kind, optimizer, "cba", tie)
    load_checkpoint(path).restore(state)
    return expected, train(state, range(3, 6))


def assert_same(pair: tuple[Weights, Weights]) -> None:
    expected, weights = pair
    assert expected.keys() == weights.keys()
    for name, value in expected.items():
        assert torch.equal(value, weights[name]), name


CASES = [
    *(("single", "adamw"), ("single", "lbfgs"), ("ddp", "zero"), ("fsdp", "adamw")),
    *(("separate", "momentum"), ("ddp", "local")),
    *slow(
        *((kind, name) for kind in KINDS for name in ("momentum", "rmsprop", "adagrad")),
    ),
]


@pytest.mark.parametrize(("kind", "optimizer"), CASES)
def test_layers_may_be_registered_in_another_order(
    kind: str, optimizer: str, tmp_path: Path
) -> None:
    if kind == "single":
        return assert_same(resumed(kind, optimizer, tmp_path))
    for pair in run_ranks(resumed, 2, kind, optimizer, tmp_path):
        assert_same(pair)
    return None


def test_tied_weights_may_change_their_first_name(tmp_path: Path) -> None:
    assert_same(resumed("single", "adamw", tmp_path, tie=True))


def grouped(order: str, groups: Sequence[str], **settings: Any) -> tuple[LoopState, Any]:
    """Return a run with a group per text of layers, the first with a tenth of the rate."""
    wrapper = SingleDevice(SupervisedModel(Ordered(order), nn.MSELoss()))
    net: Any = wrapper.module.net
    params = [
        {
            "params": [p for layer in text for p in getattr(net, layer).parameters()],
            "lr": 0.05 * (0.1 if at == 0 else 1),
        }
        for at, text in enumerate(groups)
    ]
    state = LoopState(wrapper, OptimWrapper(torch.optim.AdamW(params, **settings)))
    schedule = torch.optim.lr_scheduler.LambdaLR(state.optim_wrapper.optimizer, lambda n: 0.9**n)
    state.stateful["schedule"] = SchedulerHook([(schedule, "step")])
    return state, schedule


def train_scheduled(state: LoopState, schedule: Any, steps: range) -> Weights:
    for at in steps:
        train(state, range(at, at + 1))
        schedule.step()
    return whole(state)


@pytest.mark.parametrize("groups", [["b", "ac"], ["ac", "b"], ["abc"], ["a", "b", "c"]])
def test_the_groups_of_the_checkpoint_are_used(
    groups: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rates, schedules and moments stay with their parameters when the groups change."""
    state, schedule = grouped("abc", ["c", "ab"])
    train_scheduled(state, schedule, range(3))
    path = save_checkpoint(tmp_path, state)
    expected = train_scheduled(state, schedule, range(3, 6))
    state, schedule = grouped("bca", groups)
    load_checkpoint(path).restore(state)
    sizes = [len(group["params"]) for group in state.optim_wrapper.optimizer.param_groups]
    assert sizes == [2, 4]
    assert (state.optim_wrapper.base_param_settings is None) == (len(sizes) == 1)
    assert "other parameter groups than" in caplog.text
    assert_same((expected, train_scheduled(state, schedule, range(3, 6))))


def test_what_does_not_fit_is_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, _ = grouped("abc", ["ab"])
    train(state, range(3))
    path = save_checkpoint(tmp_path, state)
    state, _ = grouped("abc", ["bc"])
    with caplog.at_level(logging.WARNING):
        load_checkpoint(path).restore(state)
    rows = [line.split() for line in caplog.text.splitlines() if "net." in line]
    assert rows == [
        ["without", "state", "net.c.weight", "yes", "-"],
        ["without", "state", "net.c.bias", "yes", "-"],
        ["unused", "net.a.weight", "-", "yes"],
        ["unused", "net.a.bias", "-", "yes"],
    ]
    net: Any = state.model.module.net
    states = state.optim_wrapper.optimizer.state
    assert net.b.weight in states
    assert net.c.weight not in states
    train(state, range(2))
    state, _ = grouped("abc", ["ab", "c"])
    with pytest.raises(CheckpointError, match=r"no parameter .*group of 'net\.c\.weight'"):
        load_checkpoint(path).restore(state)


def strip_names(path: Path) -> Path:
    """Make a checkpoint look like one of a version that stored no names."""
    content = load_checkpoint(path).read("optim")
    for group in content["param_groups"]:
        del group["param_names"]
    meta = json.loads((path / "checkpoint.json").read_text())
    meta["files"]["optim.safetensors"] = pack("optim", content).write(path)
    meta["sha256"] = format_of_checkpoints._digest(meta)
    (path / "checkpoint.json").write_text(format_of_checkpoints._meta_text(meta))
    return path


@pytest.mark.parametrize("order", ["abc", "cba"])
def test_a_checkpoint_without_names_uses_the_order_of_its_weights(
    order: str, tmp_path: Path
) -> None:
    state = make_run("single", "adamw", "abc")
    train(state, range(3))
    path = strip_names(save_checkpoint(tmp_path, state))
    expected = train(state, range(3, 6))
    state = make_run("single", "adamw", order)
    load_checkpoint(path).restore(state)
    assert_same((expected, train(state, range(3, 6))))


def test_a_checkpoint_without_names_is_refused_if_they_are_unknown(tmp_path: Path) -> None:
    state, _ = grouped("abc", ["ab", "c"])
    path = strip_names(save_checkpoint(tmp_path, state))
    for order, groups in (("abc", ["c", "ab"]), ("cab", ["ba", "c"])):
        state, _ = grouped(order, groups)
        with pytest.raises(CheckpointError, match="not store the names"):
            load_checkpoint(path).restore(state)


def test_several_optimizers_and_a_checkpoint_of_another_precision(tmp_path: Path) -> None:
    def make(order: str, kind: Any) -> LoopState:
        wrapper = SingleDevice(SupervisedModel(Ordered(order), nn.MSELoss()))
        net: Any = wrapper.module.net
        shares = {
            name: [p for layer in order if layer in text for p in getattr(net, layer).parameters()]
            for name, text in (("first", "ac"), ("second", "b"))
        }
        return LoopState(
            wrapper,
            OptimWrapperDict(
                **{k: kind(torch.optim.AdamW(share, lr=0.05)) for k, share in shares.items()}
            ),
        )

    def step(state: LoopState, steps: range) -> Weights:
        for at in steps:
            state.model(*batch(at), mode="loss")["loss"].backward()
            for member in state.optim_wrapper.values():
                member.step()
            state.optim_wrapper.zero_grad()
        return whole(state)

    state = make("abc", OptimWrapper)
    step(state, range(3))
    path = save_checkpoint(tmp_path, state)
    expected = step(state, range(3, 6))
    state = make("cba", AmpOptimWrapper)
    load_checkpoint(path).restore(state)
    assert_same((expected, step(state, range(3, 6))))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedules_and_window_weights_follow_their_optimizers(tmp_path: Path) -> None:
    """The order of the optimizers and of the schedulers in the settings may change."""

    def make(names: str) -> LoopState:
        wrapper = SingleDevice(SupervisedModel(Ordered("abc"), nn.MSELoss()))
        net: Any = wrapper.module.net
        members: dict[str, Any] = {
            name: OptimWrapper(
                torch.optim.SGD(getattr(net, name).parameters(), lr=1.0),
                accumulative_counts=2,
                loss_weight=lambda _, weight=weight: weight,
            )
            for name, weight in (("a", 3.0), ("b", 5.0))
        }
        group = OptimWrapperDict(**{name: members[name] for name in names})
        named = {name: one.optimizer for name, one in members.items()}
        gammas = {"a": 0.5, "b": 0.1}
        pairs: Any = [
            (torch.optim.lr_scheduler.ExponentialLR(named[name], gammas[name]), "step")
            for name in names
        ]
        state = LoopState(wrapper, group)
        state.stateful["schedule"] = SchedulerHook(pairs, optimizers=named)
        schedulers[:] = [scheduler for scheduler, _ in pairs]
        return state

    def step_schedules() -> None:
        for scheduler in schedulers:
            scheduler.step()

    schedulers: list[Any] = []
    state = make("ab")
    for member in state.optim_wrapper.values():
        member.weigh(batch(0), state.model)
        member.backward(member.scale_loss(state.model(*batch(0), mode="loss")["loss"]))
    step_schedules()
    path = save_checkpoint(tmp_path, state)
    state = make("ba")
    load_checkpoint(path).restore(state)
    weights = {name: one.window_weight for name, one in state.optim_wrapper.items()}
    assert weights == {"a": 3.0, "b": 5.0}
    step_schedules()
    rates = {name: one.get_lr()["lr"] for name, one in state.optim_wrapper.items()}
    assert rates == {"a": [0.25], "b": [pytest.approx(0.01)]}


def test_torchs_names_pair_states_in_memory() -> None:
    def make(order: str) -> tuple[Ordered, OptimWrapper]:
        net = Ordered(order)
        return net, OptimWrapper(torch.optim.AdamW(net.named_parameters(), lr=0.05))

    def step(net: Ordered, optim: OptimWrapper, steps: range) -> Weights:
        for at in steps:
            inputs, target = batch(at)
            optim.update_params((net(inputs) - target).square().mean())
        return {name: param.detach().clone() for name, param in net.named_parameters()}

    first, optim = make("abc")
    start = step(first, optim, range(3))
    saved = deepcopy(optim.state_dict())
    expected = step(first, optim, range(3, 6))
    second, resumed_optim = make("cba")
    second.load_state_dict(start)
    resumed_optim.load_state_dict(saved)
    assert_same((expected, step(second, resumed_optim, range(3, 6))))


def test_a_state_of_other_shapes_is_refused_when_it_is_loaded() -> None:
    def make(*sizes: tuple[int, int]) -> OptimWrapper:
        weights = [nn.Parameter(torch.ones(size)) for size in sizes]
        return OptimWrapper(torch.optim.SGD(weights, lr=0.1, momentum=0.9))

    first = make((2, 3), (3, 2))
    first.update_params(sum(p.sum() for p in first.optimizer.param_groups[0]["params"]))
    with pytest.raises(ValueError, match=r"momentum_buffer of parameter 0 has shape \(2, 3\)"):
        make((3, 2), (2, 3)).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        make((3, 2), (2, 3)).load_state_dict(first.optimizer.state_dict())
