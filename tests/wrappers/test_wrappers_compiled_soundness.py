"""Compiled steps equal eager steps after any change between steps, or are not compiled."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from compiled_runs import (
    CHANGED_AT,
    CHANGES,
    STEPS,
    Change,
    ConvNet,
    Net,
    adamw,
    assert_same,
    at,
    batch_at,
    moved,
    orthonormal,
    other_attribute,
    sgd,
    steps_compiled,
    train,
    transposed,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marks import slow
from torch import Tensor, nn

from stepwrap.wrappers import AmpOptimWrapper, OptimWrapper
from stepwrap.wrappers.compiled.verifier import StepMismatchError

# torch warns once per process about weights whose strides have changed.
pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey")


@pytest.mark.parametrize(
    "change", [transposed, *slow(*(change for change in CHANGES if change is not transposed))]
)
def test_a_change_between_steps(change: Change) -> None:
    assert_same(1e-10, Net, sgd, at({CHANGED_AT: change}))


@pytest.mark.slow
@pytest.mark.parametrize("change", [orthonormal, transposed, moved, other_attribute])
def test_a_change_before_each_step(change: Change) -> None:
    assert_same(1e-10, Net, adamw, at(dict.fromkeys(range(STEPS), change)))


@pytest.mark.slow
def test_another_layout_of_memory() -> None:
    def change(model: Any, _: OptimWrapper) -> None:
        model.to(memory_format=torch.channels_last)

    wrapper = assert_same(1e-10, ConvNet, adamw, at({CHANGED_AT: change}))
    assert len(wrapper.batch_runner.programs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_some_changes(change: Change) -> None:
    """Four cases of each change, drawn alike in every run; `test_any_changes` draws more."""
    drawn = random.Random(CHANGES.index(change))
    for case in range(4):
        others = {drawn.randrange(3, STEPS): drawn.choice(CHANGES) for _ in range(case % 3)}
        # Early, late, early and late; twice with each optimizer.
        step = drawn.randrange(3, STEPS // 2) + case % 2 * STEPS // 2
        optimizer = (sgd, adamw)[case // 2]
        assert_same(1e-10, Net, optimizer, at({**others, step: change}))


@pytest.mark.nightly
@pytest.mark.parametrize("change", CHANGES)
@settings(max_examples=22, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    step=st.integers(3, STEPS - 1),
    other_changes=st.dictionaries(st.integers(3, STEPS - 1), st.sampled_from(CHANGES), max_size=2),
    optimizer=st.sampled_from([sgd, adamw]),
)
def test_any_changes(
    change: Change, step: int, other_changes: dict[int, Change], optimizer: Any
) -> None:
    assert_same(1e-10, Net, optimizer, at({**other_changes, step: change}))


class Lookahead(torch.optim.SGD):
    """An optimizer whose slow weights depend on a plain counter, which a program does not see."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.t, self.slow = 0, [param.detach().clone() for param in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.t += 1
        for param, slow_weight in zip(self.param_groups[0]["params"], self.slow, strict=True):
            if self.t % 5 == 0:
                param.copy_(slow_weight.lerp_(param, 0.5))


class Decaying(torch.optim.Optimizer):
    """An optimizer that keeps a schedule in the parameter group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["k"] += 1
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.1 / self.param_groups[0]["k"])


class Signs(torch.optim.Optimizer):
    """An optimizer that updates by signs times the learning rate in full precision."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.add_(param.grad.sign(), alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("kind", [Lookahead, Decaying, Signs])
def test_custom_optimizers_are_not_compiled(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    wrapper = assert_same(0.0, Net, kind)
    assert not wrapper.batch_runner.programs
    assert caplog.text.count("is not part of torch") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Lookahead, Decaying, Signs])
def test_allowed_custom_optimizers_are_verified(kind: Any) -> None:
    usual, _, _ = train(False, Net, kind)
    compiled, _, _ = train(True, Net, kind, custom_optimizer=True)
    torch.testing.assert_close(compiled, usual, rtol=1e-10, atol=1e-10)


class Odd(Net):
    """A model that draws random numbers or reads values outside the model and the batch."""

    def __init__(self, oddity: str) -> None:
        super().__init__()
        self.what, self.temperature = oddity, torch.tensor(1.0)
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)
        self.table = np.ones(6)

    def forward(self, x: Tensor) -> Tensor:
        factor = {
            "numpy": lambda: self.numpy.random(),
            "python": lambda: self.python.random(),
            "global": lambda: random.random(),
            "tensor": lambda: self.temperature,
            "item": lambda: self.temperature.item(),
            "table": lambda: torch.as_tensor(self.table),
        }[self.what]()
        return super().forward(x * factor)


@pytest.mark.parametrize("oddity", ["numpy", "item", *slow("python", "global", "tensor", "table")])
def test_state_that_no_program_follows(oddity: str, caplog: pytest.LogCaptureFixture) -> None:
    def anneal(index: int, model: Any, optim: OptimWrapper) -> None:
        model.net.temperature.mul_(0.9)
        model.net.table *= 0.9

    assert_same(0.0, lambda: Odd(oddity), sgd, anneal)
    assert caplog.text.count("not compiled") == 1


@pytest.mark.parametrize("wrap", [OptimWrapper, *slow(AmpOptimWrapper)])
def test_autocast_around_later_steps(wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    def around(index: int) -> AbstractContextManager[Any]:
        on = torch.autocast("cpu", dtype=torch.bfloat16)
        return on if index >= CHANGED_AT else nullcontext()

    assert_same(1e-5, Net, sgd, around=around, dtype=torch.float32, wrap=wrap)
    assert caplog.text.count("use AmpOptimWrapper") == 1


class DictModel(nn.Module):
    """A model that takes dicts with tensors and other values."""

    losses = ("loss",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor, *, mode: str, **options: Any) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layer(x), y)}


def test_other_entries_of_a_batch_cost_no_programs() -> None:
    def make_batch(index: int, dtype: torch.dtype) -> Any:
        inputs, targets = batch_at(index, dtype)
        names = [f"{index}-{at}.png" for at in range(8)]
        return {"x": inputs, "y": targets, "names": names, "array": np.arange(3) + index}

    wrapper = assert_same(1e-12, DictModel, sgd, make_batch=make_batch)
    assert steps_compiled(wrapper) == STEPS - 3
    assert len(wrapper.batch_runner.programs) == 1


class Tokens(nn.Sequential):
    """A model of integer inputs, whose dtype does not depend on the weights."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(12, 3))


def test_another_type_of_weights_with_integer_inputs() -> None:
    def make_batch(index: int, dtype: torch.dtype) -> Any:
        generator = torch.Generator().manual_seed(index)
        shape = (8, 2)
        tokens = torch.randint(9, shape, generator=generator)
        return tokens, torch.randint(3, shape[:1], generator=generator)

    options = {"dtype": torch.float32, "make_batch": make_batch}
    plain = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    wrapper = assert_same(
        1e-6, Tokens, plain, at({CHANGED_AT: lambda model, _: model.double()}), **options
    )
    assert steps_compiled(wrapper) == STEPS - 3


def recurrent(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(2, 4, batch_first=True, **options)
            self.last = nn.Linear(8 if "bidirectional" in options else 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layer(x.view(-1, 3, 2))[0][:, -1])

    return Recurrent


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return nn.functional.dropout(torch.tanh(self.first(x)), 0.2)

        return self.last(torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)
        self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 3)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(self.first(x.view(-1, 3, 2))).mean(1))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("net", "optimizer"),
    [
        (recurrent(nn.LSTM, num_layers=2, dropout=0.3), adamw),
        (recurrent(nn.GRU, bidirectional=True), adamw),
        (Checkpointed, adamw),
        # The gradient of a key's bias is only rounding noise, which AdamW would amplify.
        (Attention, sgd),
    ],
    ids=["LSTM", "GRU", "Checkpointed", "Attention"],
)
def test_models_that_are_compiled(net: Any, optimizer: Any, backend: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        usual, _, _ = train(False, net, optimizer, dtype=dtype)
        compiled, _, wrapper = train(True, net, optimizer, dtype=dtype, backend=backend)
        assert steps_compiled(wrapper) == STEPS - 3
        torch.testing.assert_close(compiled, usual, rtol=tolerance, atol=tolerance)


def test_a_refused_step_restores_all_generators() -> None:
    def states(compiled: bool) -> Any:
        _, _, wrapper = train(compiled, lambda: Odd("numpy"))
        net: Any = wrapper.module.net
        return net.numpy.bit_generator.state, net.python.getstate(), random.getstate()

    assert states(False) == states(True)


def test_a_difference_that_appears_later_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program keeps a number returned by a method of another class that is then replaced."""

    class Rule:
        def factor(self) -> float:
            return 1.0

    class Ruled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rule = Rule()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.rule.factor()

    def halve(*_: Any) -> None:
        monkeypatch.setattr(Rule, "factor", lambda self: 0.5)

    with pytest.raises(StepMismatchError, match="differs .* step 10: .*equal at step 2"):
        train(True, Ruled, sgd, at({CHANGED_AT: halve}))


def test_short_runs_are_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    def begin(model: Any, optim: OptimWrapper) -> None:
        optim.initialize_count_status(model, 0, STEPS)

    _, _, wrapper = train(True, Net, sgd, at({0: begin}), min_steps=25)
    assert not wrapper.batch_runner.programs
    assert "24 updates, fewer than min_steps=25" in caplog.text
