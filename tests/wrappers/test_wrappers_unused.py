"""Parameters that some steps do not use, under DistributedDataParallel."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gan_models import Gan, gan_batches, optimizers
from on_ranks import assert_near, on_ranks, raises_with, same_on_ranks
from step_models import HalfUsed, batches, classifier, flat, sgd, train
from torch import Tensor, nn

from stepwrap.wrappers import (
    BaseModel,
    SeparateDistributedDataParallel,
    SingleDevice,
    StepDistributedDataParallel,
    UnusedParametersError,
    compile_step,
)

Steps = list[bool]


class Switched(BaseModel):
    """A model that uses `spare` only in some steps; `frozen` shifts the indices of the others."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.used = nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6)
        self.steps = iter(steps)

    def forward(self, inputs: Tensor, target: Tensor, mode: str = "loss") -> Any:
        scores = self.used(self.frozen(inputs))
        if next(self.steps):
            scores = self.spare(scores)
        return {"loss": scores.square().mean()}


def train_until_error(steps: Steps, **options: Any) -> tuple[int, RuntimeError | None]:
    model = StepDistributedDataParallel(Switched(steps), **options)
    optim = sgd(model)
    for index, batch in enumerate(batches(len(steps), seed=dist.get_rank())):
        try:
            model.train_step(batch, optim)
        except RuntimeError as error:
            return index, error
    return len(steps), None


@pytest.mark.parametrize(
    ("steps", "static", "at"),
    [([False] * 3, False, 0), ([True, True, False, True], False, 3)]
    + [([True, True, False, True], True, 3)],
)
@on_ranks(2)
def test_the_next_forward_names_them(steps: Steps, static: bool, at: int) -> None:
    index, error = train_until_error(steps, static_graph=static)
    assert index == at
    assert type(error) is UnusedParametersError
    assert error.names == ("spare.weight", "spare.bias")
    assert "not depend on spare.weight, spare.bias" in str(error)
    assert "find_unused_parameters: true" in str(error)
    assert "freeze" in str(error)


@on_ranks(2)
def test_a_static_graph_that_grows() -> None:
    index, error = train_until_error([False, False, True], static_graph=True)
    assert (index, type(error)) == (2, RuntimeError)
    assert re.search("static_graph .*must .*same parameters", str(error))
    assert "find_unused_parameters: true" in str(error)


@on_ranks(2)
def test_the_remedies_work() -> None:
    assert train_until_error([False, True, False], find_unused_parameters=True)[0] == 3
    assert train_until_error([False] * 3, static_graph=True)[0] == 3
    half = HalfUsed()
    half.spare.requires_grad_(False)
    model = StepDistributedDataParallel(half)
    train(model, batches(3, seed=dist.get_rank()))
    assert same_on_ranks(flat(model))


class Nested(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.part = HalfUsed()

    def forward(self, inputs: Tensor, target: Tensor, mode: str = "loss") -> Any:
        return self.part(inputs)


@on_ranks(2)
def test_separate_children_name_theirs() -> None:
    model = SeparateDistributedDataParallel(Nested())
    (batch,) = batches(1)
    model.train_step(batch, sgd(model))
    with raises_with(UnusedParametersError, "on part.spare.weight, part.spare.bias"):
        model.train_step(batch, sgd(model))


class Fragile(torch.autograd.Function):
    """A layer that raises in the backward if `fails` is set."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.fails:
            raise KeyError("boom")
        return gradient, None


class Breaking(BaseModel):
    """A model of two layers between which the backward may fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.fails = False

    def forward(self, inputs: Tensor, target: Tensor, mode: str = "loss") -> Any:
        hidden = Fragile.apply(self.first(inputs), self.fails)
        return {"loss": nn.functional.cross_entropy(self.last(hidden), target)}


class Outer(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Breaking()

    def forward(self, inputs: Tensor, target: Tensor, mode: str = "loss") -> Any:
        return self.inner(inputs, target)


class OuterStep(Outer):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = self(*data)["loss"]
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class Detecting(StepDistributedDataParallel):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self(*data)["loss"]
        self.update_and_detect(loss, optim_wrapper)
        return {"loss": loss.detach()}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [
        (Breaking, StepDistributedDataParallel),
        (Breaking, Detecting),
        (Outer, SeparateDistributedDataParallel),
        (OuterStep, SeparateDistributedDataParallel),
    ],
)
@on_ranks(3)
def test_a_backward_that_failed_is_reported(kind: Any, wrapper: Any, every: int) -> None:
    model = kind()
    inner = model if kind is Breaking else model.inner
    wrapped = wrapper(model)
    optim = sgd(wrapped, momentum=0.9, accumulative_counts=every)
    batch_1, second = batches(2, seed=dist.get_rank())
    train(wrapped, [batch_1] * (2 * every - 1), optim)
    inner.fails = True
    with pytest.raises(KeyError):
        wrapped.train_step(batch_1, optim)
    inner.fails = False
    texts = (
        "the last update raised KeyError: 'boom' before its backward ended",
        "create a new wrapper around the bare model",
    )
    for _ in range(2):
        with raises_with(RuntimeError, *texts):
            train(wrapped, [second] * every, optim)


class Halves(BaseModel):
    """A model that uses one of two layers, and the other only if `both` is set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.spare = nn.Linear(6, 3), nn.Linear(6, 3)
        self.both = True

    def forward(self, inputs: Tensor, target: Tensor, mode: str = "loss") -> Any:
        scores = self.used(inputs)
        scores = scores + self.spare(inputs) if self.both else scores
        return {"loss": nn.functional.cross_entropy(scores, target)}


@on_ranks(3)
def test_a_bad_batch_of_a_compiled_step_is_not_a_failed_update() -> None:
    model = StepDistributedDataParallel(Halves())
    compile_step(model, min_steps=0, backend="eager")
    optim = sgd(model)
    batch = batches(1, seed=dist.get_rank())[0]
    train(model, [batch] * 6, optim)
    wrong: Any = 3.0
    model.module.both = False
    compiled, model.batch_runner = model.batch_runner, None
    model.train_step(batch, optim)
    model.batch_runner = compiled
    with pytest.raises(TypeError):
        model.train_step(wrong, optim)
    model.batch_runner = None
    with raises_with(RuntimeError, "not depend on spare.weight, spare.bias"):
        model.train_step(batch, optim)


@on_ranks(2)
def test_a_rebuilt_wrapper_continues_the_training() -> None:
    model, plain = Breaking(), Breaking()
    wrapped = StepDistributedDataParallel(model)
    optim, expected = sgd(wrapped, momentum=0.9), sgd(plain, momentum=0.9)
    for step, (inputs, target) in enumerate(batches(4, seed=7)):
        share = [inputs.chunk(2)[dist.get_rank()], target.chunk(2)[dist.get_rank()]]
        if step == 2:
            model.fails = True
            with pytest.raises(KeyError):
                wrapped.train_step(share, optim)
            model.fails = False
            optim.zero_grad()
            wrapped = StepDistributedDataParallel(model)
        wrapped.train_step(share, optim)
        expected.update_params(plain(inputs, target)["loss"])
    assert_near(flat(model), flat(plain), 1e-6)


@on_ranks(2)
def test_an_update_that_failed_is_forgotten() -> None:
    model = StepDistributedDataParallel(Switched([True, True, True, False, True]))
    optim = sgd(model)
    handle = optim.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    batch_1, *later_batches = batches(5)
    with pytest.raises(ZeroDivisionError):
        model.train_step(batch_1, optim)
    handle.remove()
    optim.zero_grad()
    with raises_with(UnusedParametersError, "did not depend on spare.weight"):
        train(model, later_batches, optim)


@on_ranks(2)
def test_other_errors_are_unchanged() -> None:
    model = StepDistributedDataParallel(Switched([True] * 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.train_step([torch.ones(2, 5), torch.zeros(2)], sgd(model))


def _half_frozen() -> Any:
    model = classifier()
    model.net[2].requires_grad_(False)
    return model


@on_ranks(2)
def test_thawed_parameters_are_named() -> None:
    wrapper = StepDistributedDataParallel(_half_frozen())
    head = wrapper.module.net[2]
    optim = sgd(wrapper)
    data = batches(3, seed=dist.get_rank())
    wrapper.train_step(data[0], optim)
    head.requires_grad_(True)
    with torch.no_grad():
        wrapper(*data[1], mode="loss")
    text = "'net.2.weight' was frozen when StepDistributedDataParallel wrapped"
    with raises_with(RuntimeError, text):
        wrapper.train_step(data[1], optim)
    head.requires_grad_(False)
    wrapper.train_step(data[2], optim)
    assert same_on_ranks(flat(wrapper))


def _train_in_phases(wrapper: Any, data: list[list[Tensor]]) -> Tensor:
    """Follow the advice of the error: wrap before freezing, then freeze, then unfreeze."""
    optim = sgd(wrapper)
    for index, batch in enumerate(data):
        wrapper.module.net[2].requires_grad_(index >= 2)
        wrapper.train_step(batch, optim)
    return flat(wrapper)


@on_ranks(2)
def test_training_as_the_error_advises_equals_one_process() -> None:
    data = batches(4, dtype=torch.float64)
    alone = _train_in_phases(SingleDevice(classifier(torch.float64)), data)
    wrapper = StepDistributedDataParallel(classifier(torch.float64), find_unused_parameters=True)
    halves = [[tensor[dist.get_rank() :: 2] for tensor in batch] for batch in data]
    assert_near(_train_in_phases(wrapper, halves), alone, 1e-12)


@on_ranks(2)
def test_separate_names_thawed_parameters_too() -> None:
    """A child that was entirely frozen has no wrapper that could check it."""
    model = Gan()
    wrapper = SeparateDistributedDataParallel(model)
    model.features.requires_grad_(True)
    text = "'features.weight' was frozen when SeparateDistributedDataParallel"
    with raises_with(RuntimeError, text):
        train(wrapper, gan_batches(1, dist.get_rank()), optimizers(model))


@on_ranks(1)
def test_one_rank_may_thaw_parameters() -> None:
    wrapper = StepDistributedDataParallel(_half_frozen())
    wrapper.module.net[2].requires_grad_(True)
    before = flat(wrapper)
    train(wrapper, batches(1))
    assert (flat(wrapper) - before)[-1].abs() > 0
