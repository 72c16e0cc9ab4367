"""Options by parameter against groups written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from param_runs import grouped, small_net, train
from torch import nn
from torch.optim import SGD, AdamW, Rprop

from stepwrap.wrappers import OptimWrapper, SynchronizedBatchNorm2d, param_groups
from stepwrap.wrappers.optimizers.optimizer_fit import build_optimizer


class ScaleRMSNorm(nn.Module):
    """A norm layer of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 2))


class Net(nn.Module):
    """One layer of each kind that options tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
        self.norms = nn.ModuleList(
            [
                nn.LayerNorm((4, 4)),
                SynchronizedBatchNorm2d(4),
                nn.GroupNorm(2, 4),
                nn.InstanceNorm1d(4, affine=True),
                nn.RMSNorm(4),
                ScaleRMSNorm(),
            ]
        )
        self.dwconv = nn.Conv2d(4, 8, 3, groups=4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.token = nn.Parameter(torch.zeros(4))


def options(groups: list[dict[str, Any]], model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return rate and decay by the parameters' names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups) == len(names)
    return found


def test_kinds_of_parameters_have_the_documented_options() -> None:
    model = Net()
    groups = grouped(
        model,
        bias_lr_mult=2.0,
        bias_decay_mult=0.5,
        norm_decay_mult=0.0,
        dwconv_decay_mult=0.25,
        flat_decay_mult=4.0,
    )
    by_name = options(groups, model)
    assert by_name["blocks.3.weight"] == by_name["embed.weight"] == (1.0, 0.5)
    assert by_name["blocks.3.bias"] == (2.0, 0.25)
    assert by_name["attention.in_proj_bias"] == by_name["attention.out_proj.bias"] == (2.0, 0.25)
    assert by_name["dwconv.weight"] == (1.0, 0.125)
    assert by_name["dwconv.bias"] == (2.0, 0.125)
    assert by_name["token"] == (1.0, 2.0)
    assert {by_name[name] for name in by_name if name.startswith("norms")} == {(1.0, 0.0)}
    # Weights, biases, norms, two of the depthwise convolution, the token.
    assert len(groups) == 6


def test_flat_parameters_without_an_option_of_their_own() -> None:
    model = Net()
    by_name = options(grouped(model, flat_decay_mult=0.0, bias_lr_mult=3.0), model)
    assert by_name["norms.0.weight"] == (1.0, 0.5)
    assert by_name["norms.1.weight"] == (1.0, 0.0)
    assert by_name["blocks.0.bias"] == (3.0, 0.0)


def test_the_longest_custom_key_decides_alone() -> None:
    model = Net()
    keys = {
        "blocks": {"lr_mult": 0.1, "decay_mult": 0.0},
        "blocks.1": {"lr_mult": 0.2},
        "blocks.?.bias": {"lr": 7.0, "weight_decay": 0.75},
        "*weight": {},
    }
    by_name = options(grouped(model, custom_keys=keys, bias_lr_mult=9.0), model)
    assert by_name["blocks.0.bias"] == by_name["blocks.1.bias"] == (7.0, 0.75)
    # A plain key is looked for anywhere in the name, as documented: blocks.1 is in blocks.11.
    assert by_name["blocks.1.weight"] == by_name["blocks.11.bias"] == (0.2, 0.5)
    assert by_name["embed.weight"] == (1.0, 0.5)
    assert by_name["blocks.2.weight"] == (1.0, 0.5)
    assert by_name["attention.in_proj_bias"] == (9.0, 0.5)


def test_equal_keys_in_length_go_by_the_alphabet() -> None:
    model = nn.ModuleDict({"ab": nn.Linear(1, 1, bias=False)})
    keys = {"b.w": {"lr": 2.0}, "ab.": {"lr": 1.0}}
    assert grouped(model, custom_keys=keys)[0]["lr"] == 1.0


def test_groups_are_few_and_named_in_the_order_of_the_model() -> None:
    model = Net()
    groups = grouped(
        model, custom_keys={"embed": {"decay_mult": 0.0}, "token": {}}, norm_decay_mult=0.0
    )
    names = [group["name"] for group in groups]
    assert names == ["token+other+bias+2 more", "embed+norm"]


@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_training_equals_groups_written_by_hand(cls: type[AdamW | SGD]) -> None:
    paramwise = {
        "norm_decay_mult": 0.0,
        "bias_decay_mult": 0.0,
        "bias_lr_mult": 2.0,
        "custom_keys": {"2.weight": {"lr_mult": 0.1, "maximize": True}},
    }
    ours = small_net()
    groups = param_groups(ours, lr=0.01, weight_decay=0.1, paramwise=paramwise, optimizer=cls)
    hand = small_net()
    by_hand = [
        {"params": [hand[0].weight]},
        {"params": [hand[0].bias, hand[2].bias], "lr": 0.02, "weight_decay": 0.0},
        {"params": [hand[1].weight, hand[1].bias], "weight_decay": 0.0},
        {"params": [hand[2].weight], "lr": 0.001, "maximize": True},
    ]
    settings = {"lr": 0.01, "weight_decay": 0.1}
    for left, right in zip(
        train(ours, groups, cls, **settings), train(hand, by_hand, cls, **settings), strict=True
    ):
        assert torch.equal(left, right)


def test_defaults_are_those_of_the_optimizer() -> None:
    model = small_net()
    paramwise = {"norm_decay_mult": 0.5, "custom_keys": {"2": {"lr_mult": 10}}}
    groups = param_groups(model, paramwise=paramwise, optimizer=AdamW)
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [
        (0.001, 0.01),
        (0.001, 0.005),
        (0.01, 0.01),
    ]


def test_optimizer_wrapper_tells_rates_of_all_groups() -> None:
    model = small_net()
    groups = grouped(model, custom_keys={"2": {"lr_mult": 10}})
    wrapper = OptimWrapper(build_optimizer(SGD, groups, lr=1.0, weight_decay=0.5))
    assert wrapper.get_lr() == {"base_lr": [1.0], "lr": [1.0, 10.0]}
    assert wrapper.optimizer.defaults["fused"]


@pytest.mark.parametrize(
    ("paramwise", "said"),
    [
        (
            {"custom_keys": {"emebd": {}}},
            "custom_keys.emebd: no parameter matches; did you mean emb",
        ),
        ({"custom_keys": {"blokcs.*.bias": {}}}, r"did you mean blocks\.\*\.bias"),
        ({"norm_decay": 0.0}, "no such setting; did you mean norm_decay_mult"),
        ({"custom_keys": {"embed": {"lr_mul": 2}}}, "no such option; did you mean lr_mult"),
        ({"custom_keys": {"embed": 2}}, "must be options such as lr_mult, got 2"),
        (
            {"custom_keys": {"embed": {"lr": 1, "lr_mult": 2}}},
            "lr: cannot be combined with lr_mult",
        ),
        ({"bias_lr_mult": "x"}, "bias_lr_mult: must be a number, got 'x'"),
        ({"bias_lr_mult": -1}, "bias_lr_mult: must be at least 0, got -1"),
    ],
)
def test_mistakes(paramwise: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        param_groups(Net(), lr=1.0, weight_decay=0.1, paramwise=paramwise)


def test_arguments_of_the_optimizer_are_checked() -> None:
    def build(cls: Any, **custom: Any) -> None:
        param_groups(Net(), lr=1.0, paramwise={"custom_keys": {"embed": custom}}, optimizer=cls)

    build(AdamW, betas=[0.5, 0.9])
    with pytest.raises(ValueError, match="no such option of AdamW; did you mean betas"):
        build(AdamW, beta=[0.5, 0.9])
    with pytest.raises(ValueError, match="embed.amsgrad: must be true or false"):
        build(AdamW, amsgrad=3)
    with pytest.raises(ValueError, match="embed.decay_mult: Rprop has no weight_decay"):
        build(Rprop, decay_mult=0.5)


def test_nothing_to_multiply_is_an_error() -> None:
    with pytest.raises(ValueError, match="bias decay multiplies weight_decay, which is not set"):
        param_groups(Net(), lr=1.0, paramwise={"bias_decay_mult": 0.0})


class Tied(nn.Module):
    """An output layer that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5)
        self.out.weight = self.embed.weight


def test_a_shared_parameter_is_there_once() -> None:
    model = Tied()
    assert len(options(grouped(model, bias_decay_mult=0.0), model)) == 2
    keys = {"out": {"lr_mult": 2.0}}
    with pytest.raises(ValueError, match=r"embed\.weight and out\.weight are one parameter"):
        grouped(model, custom_keys=keys)
    by_name = options(grouped(model, custom_keys=keys, bypass_duplicate=True), model)
    assert by_name == {"embed.weight": (1.0, 0.5), "out.bias": (2.0, 0.5)}


def test_frozen_parameters_keep_their_place() -> None:
    model = small_net()
    model[0].requires_grad_(False)
    assert len(options(grouped(model, custom_keys={"0.": {"lr_mult": 2}}), model)) == 6
