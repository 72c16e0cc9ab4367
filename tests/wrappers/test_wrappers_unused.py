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
        assert "static_graph excludes" in text
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


def _other_errors() -> None:
    model = StepDistributedDataParallel(Switched([True] * 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.train_step([torch.ones(2, 5), torch.zeros(2)], sgd(model))


def test_other_errors_stay_as_they_are() -> None:
    run_ranks(_other_errors, 2)
