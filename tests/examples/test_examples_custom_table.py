"""Every cell of the table in docs/custom_steps.md is run."""

import gc
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import custom_step_runs as runs
import pytest
import torch
import torch.distributed as dist
from custom_step_runs import STEPS, expected, stepped, stepped_in_group
from ranks import run_ranks
from torch import Tensor, nn
from weights import apart, whole_weights

from stepwrap.wrappers import OptimWrapper, StepFullyShardedDataParallel, SupervisedModel

PAGE = (Path(__file__).parents[2] / "docs/custom_steps.md").read_text()
MESSAGES = {
    ("gan", "ddp"): "needs SeparateDistributedDataParallel",
    ("gradient_penalty", "fsdp"): "blocks that fsdp has freed",
    ("gradient_penalty", "tensor"): "split over a tensor axis",
    ("lbfgs", "tensor"): "LBFGS takes all parameters as one vector",
}


def cells() -> list[tuple[str, str, str]]:
    """Return step, wrapper and "yes" or "error" of every cell."""
    section = PAGE.split("\n## What works where\n")[1].split("\n## ")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", section, flags=re.MULTILINE)
    ]
    return [
        (row[0], wrapper, cell.split()[0])
        for row in rows
        for wrapper, cell in zip(head[1:], row[1:], strict=True)
    ]


@cache
def plain(name: str) -> dict[str, Tensor]:
    return expected(name)


@cache
def run_group(name: str) -> list[dict[str, Any]]:
    return run_ranks(stepped_in_group, 2, name)


def test_the_table_has_every_step_and_wrapper() -> None:
    assert len(cells()) == len(STEPS) * len(runs.BASES)
    assert {name for name, _, _ in cells()} == set(STEPS)
    assert {(name, on) for name, on, word in cells() if word == "error"} == set(MESSAGES)


@pytest.mark.parametrize(("name", "wrapper", "word"), cells())
def test_a_cell(name: str, wrapper: str, word: str) -> None:
    """The weights equal plain PyTorch on the whole batch, or the error names a remedy."""
    alone = wrapper in runs.ALONE
    results = (
        [stepped(name, wrapper)]
        if alone
        else [by_wrapper[wrapper] for by_wrapper in run_group(name)]
    )
    for result in results:
        if word == "error":
            assert isinstance(result, str)
            assert MESSAGES[name, wrapper] in result
        else:
            assert not isinstance(result, str), result
            assert apart(result, plain(name)) <= runs.TOLERANCE[name]


def gan_as_a_whole(shard: list[str] | None) -> Any:
    return stepped("gan", "fsdp", shard=shard)


@pytest.mark.parametrize("shard", [None, ["generator"]])
def test_a_network_that_is_used_outside_the_wrapper_is_named(shard: list[str] | None) -> None:
    for message in run_ranks(gan_as_a_whole, 2, shard):
        assert re.search("used outside, .*shards", message)


def static_graph() -> Any:
    return stepped("gradient_penalty", "ddp", static_graph=True)


def test_a_gradient_of_a_gradient_needs_a_dynamic_graph() -> None:
    assert all("leave static_graph out" in message for message in run_ranks(static_graph, 2))


class Smooth(SupervisedModel):
    """The example's penalty, computed inside the forward."""

    def forward(self, *inputs: Any, mode: str = "tensor", **named: Any) -> Any:
        if mode != "loss":
            return super().forward(*inputs, mode=mode, **named)
        images = inputs[0].detach().requires_grad_()
        loss = nn.functional.cross_entropy(self.net(images), inputs[1])
        (slope,) = torch.autograd.grad(loss * len(images), images, create_graph=True)
        return {"loss": loss + 0.1 * slope.flatten(1).square().sum(1).mean()}


def penalty_inside(shard: list[str] | None) -> dict[str, Tensor] | str:
    model: Any = runs.fresh_model(STEPS["gradient_penalty"])
    model.__class__ = Smooth
    wrapper = StepFullyShardedDataParallel(model, shard=shard)
    optims = OptimWrapper(runs.adamw(wrapper.parameters()), 2, {"max_norm": 1.0})
    try:
        for batch in runs.digit_batches():
            wrapper.train_step([tensor[dist.get_rank() :: 2] for tensor in batch], optims)
    except RuntimeError as error:
        return str(error)
    return whole_weights(model)


def test_a_penalty_inside_of_a_sharded_forward() -> None:
    for weights in run_ranks(penalty_inside, 2, None):
        assert apart(weights, plain("gradient_penalty")) <= 1e-12
    for message in run_ranks(penalty_inside, 2, ["Conv2d"]):
        assert "blocks that fsdp has freed" in message


def search_uneven() -> Any:
    model = StepFullyShardedDataParallel(
        SupervisedModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), nn.CrossEntropyLoss())
    )
    with pytest.raises(ValueError, match="cannot be sharded evenly") as caught:
        OptimWrapper(runs.searching(model.parameters()))
    return str(caught.value)


def test_no_search_over_uneven_shards() -> None:
    assert all(message.startswith("LBFGS takes all") for message in run_ranks(search_uneven, 2))


def sharing_a_forward(careless: str) -> str:
    """Run a step whose gradients differ between ranks; return the error message."""

    def train_step(self: Any, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        losses = self(*data, mode="loss")
        losses["loss"].backward(retain_graph=True)
        again = losses if careless == "twice" else self.module(*data, mode="loss")
        optim_wrapper.update_params(again["loss"])
        return {}

    base = runs.BASES["ddp"]
    model = type("Careless", (base,), {"train_step": train_step})(runs.supervised())
    optims = OptimWrapper(runs.adamw(model.parameters()))
    data = [
        tensor.float() if tensor.is_floating_point() else tensor
        for tensor in runs.digit_batches()[0]
    ]
    with pytest.raises(RuntimeError, match="gradients would differ between ranks") as caught:
        model.train_step(data, optims)
    message = str(caught.value)
    # torch's reducer may hold the last references to a group. Free them before the group ends,
    # because its thread may wait for the interpreter, which waits for that thread.
    del caught, model, optims
    gc.collect()
    return message


@pytest.mark.parametrize("careless", ["twice", "outside"])
def test_a_backward_that_averages_nothing_is_an_error(careless: str) -> None:
    messages = run_ranks(partial(sharing_a_forward, careless), 2)
    assert all("Careless.train_step" in message for message in messages)
