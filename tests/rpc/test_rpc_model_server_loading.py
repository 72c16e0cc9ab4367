"""Pulling into models that customize loading gives the same as `load_state_dict`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from worlds import Local

from stepwrap.rpc import PushPullModelServer


class Shifting(nn.Linear):
    """Adds one to its weight when loading."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] + 1
        super()._load_from_state_dict(state_dict, prefix, *args)


def hooked(kind: str) -> nn.Module:
    linear = nn.Linear(3, 3)

    def before(module: Any, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] + 1

    def after(module: Any, _: Any) -> None:
        module.weight.data.add_(1)

    if kind == "before":
        linear.register_load_state_dict_pre_hook(before)
    else:
        linear.register_load_state_dict_post_hook(after)
    return linear


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def patched() -> nn.Module:
    """Return a module whose instance has a custom `_load_from_state_dict`."""
    linear: Any = nn.Linear(3, 3, bias=False)
    linear.load_state_dict = lambda state: linear.weight.data.fill_(8)
    return linear


def transient() -> nn.Module:
    model = nn.BatchNorm1d(3)
    model.register_buffer("seen", torch.ones(3), persistent=False)
    model.register_buffer("nothing", None)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
    "own": lambda: nn.Sequential(nn.Linear(3, 3), nn.InstanceNorm1d(3, affine=True)),
    "deep": lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 3)), Shifting(3, 3)),
    "before": lambda: nn.Sequential(nn.Linear(3, 3), hooked("before")),
    "after": lambda: nn.Sequential(nn.Linear(3, 3), hooked("after")),
    "tied": tied,
    "patched": patched,
    "transient": transient,
    "empty": nn.Identity,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "complex": lambda: nn.Linear(3, 3, dtype=torch.complex64),
    "scripted": lambda: torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3)),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_pull_loads_as_load_state_dict_does(kind: str) -> None:
    server = PushPullModelServer("model", Local())
    model, pulled, loaded = (MODELS[kind]() for _ in range(3))
    server.push(model)
    server.pull(pulled)
    loaded.load_state_dict(model.state_dict())
    expected = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    after = dict(pulled.named_parameters()) | dict(pulled.named_buffers())
    assert after.keys() == expected.keys()
    assert all(value.equal(after[name]) for name, value in expected.items())
    assert all(value.requires_grad for value in pulled.parameters())


def test_a_state_with_two_values_for_one_tensor_loads_the_last() -> None:
    o_server = Local()
    server = PushPullModelServer("model", o_server)
    untied, model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), tied()
    server.push(untied)
    server.pull(model)
    assert model[0].weight.equal(untied[2].weight)
    assert model[1].weight.equal(untied[1].weight)


def test_swapped_parameters_are_loaded_the_ordinary_way() -> None:
    server = PushPullModelServer("model", Local())
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    server.push(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        server.pull(other)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert other.weight.equal(model.weight)


def test_an_entry_that_is_not_a_tensor_is_named() -> None:
    o_server, model = Local(), nn.Linear(1, 1)
    o_server.push("model", {"weight": 5, "bias": torch.ones(1)}, 1, 0)
    text = "the state must be of the same model, but 'weight' is int in the state, a tensor in the"
    with pytest.raises(TypeError, match=text):
        PushPullModelServer("model", o_server).pull(model)
    assert not model.bias.equal(torch.ones(1))
