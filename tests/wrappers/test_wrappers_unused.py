"""Parameters that some step does not use, under DistributedDataParallel."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from step_models import HalfUsed, batches, flat, sgd
from torch import Tensor, nn

from stepwrap.wrappers import (
    BaseModel,
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
    UnusedParametersError,
    compile_step,
)

Steps = list[bool]


class Switched(BaseModel):
    """Uses `spare` in some steps only; `frozen` shifts the indices of the others."""

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


def _failure(steps: Steps, **options: Any) -> tuple[int, type, str, Any]:
    model = StepDistributedDataParallel(Switched(steps), **options)
    optim = sgd(model)
    for index, batch in enumerate(batches(len(steps), seed=dist.get_rank())):
        try:
            model.train_step(batch, optim)
        except RuntimeError as error:
            return index, type(error), str(error), getattr(error, "names", None)
    return len(steps), type(None), "", None


@pytest.mark.parametrize(
    ("steps", "static", "at"),
    [([False] * 3, False, 1), ([True, True, False, True], False, 3)]
    + [([True, True, False, True], True, 3)],
)
def test_the_next_forward_names_them(steps: Steps, static: bool, at: int) -> None:
    for index, kind, text, names in run_ranks(_failure, 2, steps, static_graph=static):
        assert (index, kind) == (at, UnusedParametersError)
        assert names == ("spare.weight", "spare.bias")
        assert "did not depend on spare.weight, spare.bias" in text
        assert "find_unused_parameters: true" in text
        assert "freeze" in text


def test_a_static_graph_that_grows() -> None:
    for index, kind, text, _ in run_ranks(_failure, 2, [False, False, True], static_graph=True):
        assert (index, kind) == (2, RuntimeError)
        assert "under static_graph every step must use the same parameters" in text
        assert "find_unused_parameters: true" in text


def _remedies() -> list[bool]:
    results = []
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        steps = [False] * 3 if "static_graph" in options else [False, True, False]
        assert _failure(steps, **options)[0] == 3
    half = HalfUsed()
    half.spare.requires_grad_(False)
    model = StepDistributedDataParallel(half)
    for batch in batches(3, seed=dist.get_rank()):
        model.train_step(batch, sgd(model))
    weights = [torch.empty_like(flat(model)) for _ in range(2)]
    dist.all_gather(weights, flat(model))
    results.append(torch.equal(*weights))
    return results


def test_the_remedies_work() -> None:
    assert run_ranks(_remedies, 2) == [[True]] * 2


class Nested(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.part = HalfUsed()

    def forward(self, inputs: Tensor, target: Tensor, mode: str = "loss") -> Any:
        return self.part(inputs)


def _in_a_child() -> str:
    model = SeparateDistributedDataParallel(Nested())
    (batch,) = batches(1)
    model.train_step(batch, sgd(model))
    with pytest.raises(UnusedParametersError) as error:
        model.train_step(batch, sgd(model))
    return str(error.value)


def test_separate_children_name_theirs() -> None:
    for text in run_ranks(_in_a_child, 2):
        assert "on part.spare.weight, part.spare.bias" in text


class Fragile(torch.autograd.Function):
    """Raises in the backward, where it is told to."""

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
    """Two layers; between them the backward may break."""

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


def _train(model: Any, optim: Any, data: list[list[Tensor]]) -> None:
    for batch in data:
        model.train_step(batch, optim)


def _failed_backward(kind: type, wrapper: type, every: int) -> list[Any]:
    model = kind()
    inner = model if kind is Breaking else model.inner
    wrapped = wrapper(model)
    optim = sgd(wrapped, momentum=0.9, accumulative_counts=every)
    first, second = batches(2, seed=dist.get_rank())
    _train(wrapped, optim, [first] * (2 * every - 1))
    told = []
    inner.fails = True
    with pytest.raises(KeyError):
        wrapped.train_step(first, optim)
    inner.fails = False
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            _train(wrapped, optim, [second] * every)
        told.append((type(caught.value), str(caught.value)))
    return told


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
def test_a_backward_that_failed_is_told(kind: type, wrapper: type, every: int) -> None:
    for told in run_ranks(_failed_backward, 3, kind, wrapper, every):
        for error, text in told:
            assert error is RuntimeError
            assert "the last update raised KeyError: 'boom'; its backward was not fin" in text
            assert "create a new wrapper around the bare model" in text


class Halves(BaseModel):
    """Uses one of two layers until it is told to use the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.spare = nn.Linear(6, 3), nn.Linear(6, 3)
        self.both = True

    def forward(self, inputs: Tensor, target: Tensor, mode: str = "loss") -> Any:
        scores = self.used(inputs)
        scores = scores + self.spare(inputs) if self.both else scores
        return {"loss": nn.functional.cross_entropy(scores, target)}


def _unused_after_a_bad_batch() -> str:
    model = StepDistributedDataParallel(Halves())
    compile_step(model, min_steps=0, backend="eager")
    optim = sgd(model)
    batch = batches(1, seed=dist.get_rank())[0]
    _train(model, optim, [batch] * 6)
    wrong: Any = 3.0
    model.module.both = False
    uncompiled = StepDistributedDataParallel.train_step
    uncompiled(model, batch, optim)
    with pytest.raises(TypeError):
        model.train_step(wrong, optim)
    with pytest.raises(RuntimeError) as caught:
        uncompiled(model, batch, optim)
    return str(caught.value)


def test_a_bad_batch_of_a_compiled_step_is_no_failed_update() -> None:
    for told in run_ranks(_unused_after_a_bad_batch, 3):
        assert "did not depend on spare.weight, spare.bias" in told


def _built_anew() -> list[float]:
    model, plain = Breaking(), Breaking()
    first = StepDistributedDataParallel(model)
    optim, expected = sgd(first, momentum=0.9), sgd(plain, momentum=0.9)
    for step, (inputs, target) in enumerate(batches(4, seed=7)):
        share = [inputs.chunk(2)[dist.get_rank()], target.chunk(2)[dist.get_rank()]]
        if step == 2:
            model.fails = True
            with pytest.raises(KeyError):
                first.train_step(share, optim)
            model.fails = False
            optim.zero_grad()
            first = StepDistributedDataParallel(model)
        first.train_step(share, optim)
        expected.update_params(plain(inputs, target)["loss"])
    return [(flat(model) - flat(plain)).abs().max().item()]


def test_built_anew_it_goes_on() -> None:
    for (worst,) in run_ranks(_built_anew, 2):
        assert worst <= 1e-6


def _failed_after_backward() -> str:
    model = StepDistributedDataParallel(Switched([True, True, True, False, True]))
    optim = sgd(model)
    handle = optim.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    first, *others = batches(5)
    with pytest.raises(ZeroDivisionError):
        model.train_step(first, optim)
    handle.remove()
    optim.zero_grad()
    with pytest.raises(UnusedParametersError) as error:
        _train(model, optim, others)
    return str(error.value)


def test_an_update_that_failed_is_forgotten() -> None:
    for text in run_ranks(_failed_after_backward, 2):
        assert "did not depend on spare.weight" in text


def _other_errors() -> None:
    model = StepDistributedDataParallel(Switched([True] * 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.train_step([torch.ones(2, 5), torch.zeros(2)], sgd(model))


def test_other_errors_stay_as_they_are() -> None:
    run_ranks(_other_errors, 2)
