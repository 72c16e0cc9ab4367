"""Options by parameter, compared with groups written by hand."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Rprop

from stepwrap.wrappers import (
    OptimWrapper,
    Preparation,
    SeparateDistributedDataParallel,
    SingleDevice,
    StepDataParallel,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
    SynchronizedBatchNorm2d,
    ZeroRedundancyOptimizer,
    build_mesh,
    param_groups,
    wrap_model,
)
from stepwrap.wrappers.optimizers.optimizer_fit import build_optimizer
from stepwrap.wrappers.optimizers.param_groups import divide_parameters, named_parameters


def grouped(model: nn.Module, **paramwise: Any) -> list[dict[str, Any]]:
    return param_groups(model, lr=1.0, weight_decay=0.5, paramwise=paramwise)


def train(model: nn.Module, groups: list[dict[str, Any]], cls: Any, **kwargs: Any) -> list[Tensor]:
    optimizer = cls(groups, **kwargs)
    for step in range(3):
        optimizer.zero_grad()
        inputs = torch.arange(12.0).reshape(3, 4).double() + step
        model(inputs).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()


class ScaleRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 2))


class Net(nn.Module):
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
    """Return learning rate and weight decay by parameter name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    options_by_name = {
        names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]
    }
    assert len(options_by_name) == sum(len(group["params"]) for group in groups) == len(names)
    return options_by_name


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


def test_flat_decay_applies_to_norms_and_biases_without_another_option() -> None:
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
    # A plain key matches anywhere in the name, as documented: blocks.1 is in blocks.11.
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
    assert names == ["default", "embed+norm"]


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
    for actual, expected in zip(
        train(ours, groups, cls, **settings), train(hand, by_hand, cls, **settings), strict=True
    ):
        assert torch.equal(actual, expected)


def test_defaults_come_from_the_optimizer() -> None:
    model = small_net()
    paramwise = {"norm_decay_mult": 0.5, "custom_keys": {"2": {"lr_mult": 10}}}
    groups = param_groups(model, paramwise=paramwise, optimizer=AdamW)
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [
        (0.001, 0.01),
        (0.001, 0.005),
        (0.01, 0.01),
    ]


def test_get_lr_returns_the_rates_of_all_groups() -> None:
    model = small_net()
    groups = grouped(model, custom_keys={"2": {"lr_mult": 10}})
    wrapper = OptimWrapper(build_optimizer(SGD, groups, lr=1.0, weight_decay=0.5))
    assert wrapper.get_lr() == {"base_lr": [1.0], "lr": [1.0, 10.0]}
    assert wrapper.optimizer.defaults["fused"]


@pytest.mark.parametrize(
    ("paramwise", "message"),
    [
        ({"custom_keys": {"emebd": {}}}, "custom_keys.emebd: no parameter matches; did you mean e"),
        ({"custom_keys": {"blokcs.*.bias": {}}}, r"did you mean blocks\.\*\.bias"),
        ({"norm_decay": 0.0}, "no such setting; did you mean norm_decay_mult"),
        ({"custom_keys": {"embed": {"lr_mul": 2}}}, "no such option; did you mean lr_mult"),
        ({"custom_keys": {"embed": 2}}, "must be options such as lr_mult, got 2"),
        (
            {"custom_keys": {"embed": {"lr": 1, "lr_mult": 2}}},
            "lr: cannot be combined with lr_mult",
        ),
        ({"layer_decay": 0.5}, "layer_decay: needs layers too, such as layers: "),
        ({"layers": ["embed"]}, "layers: needs layer_decay too, such as layer_decay: 0.75"),
        (
            {"layer_decay": 0.5, "layers": ["embde"]},
            "paramwise.layers: no module matches 'embde'; did you mean embed",
        ),
        ({"bias_lr_mult": "x"}, "bias_lr_mult: must be a number, got 'x'"),
        ({"bias_lr_mult": -1}, "bias_lr_mult: must be at least 0, got -1"),
    ],
)
def test_mistakes(paramwise: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        param_groups(Net(), lr=1.0, weight_decay=0.1, paramwise=paramwise)


def test_arguments_of_the_optimizer_are_checked() -> None:
    def build(cls: Any, **custom: Any) -> None:
        param_groups(Net(), lr=1.0, paramwise={"custom_keys": {"embed": custom}}, optimizer=cls)

    build(AdamW, betas=[0.5, 0.9])
    with pytest.raises(ValueError, match="AdamW; did you mean betas"):
        build(AdamW, beta=[0.5, 0.9])
    with pytest.raises(ValueError, match=r"embed\.amsgrad: .*true or false"):
        build(AdamW, amsgrad=3)
    with pytest.raises(ValueError, match="embed.decay_mult: Rprop has no weight_decay"):
        build(Rprop, decay_mult=0.5)


def test_nothing_to_multiply_is_an_error() -> None:
    with pytest.raises(ValueError, match="bias decay .*weight_decay, .*not set"):
        param_groups(Net(), lr=1.0, paramwise={"bias_decay_mult": 0.0})


class Encoder(nn.Module):
    """Layers whose learning rates decay from the head to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(2))
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(11))
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 2)


def get_rates(model: nn.Module, **paramwise: Any) -> dict[str, float]:
    groups = grouped(model, **paramwise)
    by_id = {id(param): group["lr"] for group in groups for param in group["params"]}
    return {name: by_id[id(param)] for name, param in model.named_parameters()}


def test_the_learning_rate_decays_by_layer() -> None:
    rates = get_rates(Encoder(), layer_decay=0.5, layers=["blocks.*"])
    for name, rate in rates.items():
        components = name.split(".")
        above = 11 - int(components[1]) if components[0] == "blocks" else 0
        above = 12 if components[0] in ("token", "embed") else above
        assert rate == 0.5**above, name

    # Layers that are listed one by one; the last one has the full rate.
    rates = get_rates(Encoder(), layer_decay=0.5, layers=["embed", "blocks.[0-9]", "head"])
    assert rates["head.bias"] == 1.0
    # Parameters between layers belong to the layer before them.
    assert rates["norm.bias"] == rates["blocks.10.0.bias"] == rates["blocks.9.0.bias"] == 0.5
    assert rates["embed.weight"] == 0.5**11
    assert rates["token"] == 0.5**12


def test_a_key_named_like_a_kind_does_not_stop_the_decay_of_others() -> None:
    """The key matches parameters of this name only, not norms in general."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.LayerNorm(2) for _ in range(2))
            self.norm = nn.Linear(2, 2, bias=False)

    keys = {"norm": {"lr": 7.0}}
    rates = get_rates(Named(), layer_decay=0.5, layers=["blocks.*"], custom_keys=keys)
    assert rates["blocks.1.weight"] == rates["blocks.1.bias"] == 0.5
    assert rates["blocks.0.weight"] == rates["blocks.0.bias"] == 0.25


def test_other_options_are_combined_with_the_decay_by_layer() -> None:
    model = Encoder()
    keys = {"blocks.10.*": {"lr_mult": 3.0}, "blocks.9.*": {"lr": 7.0}}
    options = {"layer_decay": 0.5, "layers": ["blocks.*"], "norm_decay_mult": 0.0}
    groups = grouped(model, **options, bias_lr_mult=3.0, custom_keys=keys)
    named = {id(param): name for name, param in model.named_parameters()}
    settings = {
        named[id(param)]: (group["lr"], group["weight_decay"], group["name"])
        for group in groups
        for param in group["params"]
    }
    assert settings["blocks.10.0.bias"] == (1.5, 0.5, "blocks.10 blocks.10.*")
    assert settings["blocks.9.0.weight"] == (7.0, 0.5, "blocks.9 blocks.9.*")
    assert settings["blocks.8.0.weight"] == (0.125, 0.5, "blocks.8")
    assert settings["blocks.8.0.bias"] == (0.375, 0.5, "blocks.8 bias")
    assert settings["norm.weight"] == (1.0, 0.0, "output norm")
    assert settings["head.bias"] == (3.0, 0.5, "output bias")


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
    with pytest.raises(ValueError, match=r"embed\.weight and out\.weight are one"):
        grouped(model, custom_keys=keys)
    by_name = options(grouped(model, custom_keys=keys, bypass_duplicate=True), model)
    assert by_name == {"embed.weight": (1.0, 0.5), "out.bias": (2.0, 0.5)}


def test_frozen_parameters_keep_their_place() -> None:
    model = small_net()
    model[0].requires_grad_(False)
    assert len(options(grouped(model, custom_keys={"0.": {"lr_mult": 2}}), model)) == 6


class TwoNets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"disc": nn.Linear(2, 2), "aux": nn.Linear(1, 1)})
        self.gen = nn.Linear(2, 2)


def test_parameters_are_shared_out_by_child_path_and_pattern() -> None:
    shares = divide_parameters(
        SingleDevice(TwoNets()), {"gen": None, "disc": ["net.d*", "net.aux"]}
    )
    assert {name: [param.name for param in share] for name, share in shares.items()} == {
        "gen": ["gen.weight", "gen.bias"],
        "disc": ["net.disc.weight", "net.disc.bias", "net.aux.weight", "net.aux.bias"],
    }


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"gen": None, "disc": None}, "no optimizer has net.aux.weight, net.aux.bias; every"),
        ({"gen": None, "dics": None}, "neither the model nor its net has a child 'dics'"),
        ({"gen": ["gne.*"], "disc": ["net"]}, r"gen: no parameter matches 'gne\.\*'; did you mean"),
        ({"gen": ["*"], "disc": ["net.disc"]}, "gen and disc both have net.disc.weight, net."),
    ],
)
def test_every_trained_parameter_has_one_optimizer(
    chosen: dict[str, list[str] | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        divide_parameters(TwoNets(), chosen)


def test_frozen_parameters_need_no_optimizer() -> None:
    model = TwoNets()
    model.net["aux"].requires_grad_(False)
    assert len(divide_parameters(model, {"gen": None, "disc": None})["disc"]) == 2


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "compiled":
        return SingleDevice(torch.compile(model, backend="eager"))
    if kind == "compiled inside":
        model.net = torch.compile(model.net, backend="eager")
        return SingleDevice(model)
    return SingleDevice(model) if kind == "single" else model


@pytest.mark.parametrize("kind", ["bare", "single", "compiled", "compiled inside"])
def test_names_are_from_the_users_model(kind: str) -> None:
    model = SupervisedModel(small_net(), nn.MSELoss())
    names = [name for name, _ in model.named_parameters()]
    assert [param.name for param in named_parameters(wrapped(kind, copy.deepcopy(model)))] == names


GROUPS = [
    ("default", 1.0, 0.5, 1),
    ("bias flat", 1.0, 0.25, 1),
    ("norm", 1.0, 0.0, 2),
    ("net.2.*", 3.0, 0.5, 2),
]


def get_groups(model: nn.Module) -> list[tuple[str, float, float, int]]:
    groups = grouped(
        model, custom_keys={"net.2.*": {"lr_mult": 3}}, norm_decay_mult=0, flat_decay_mult=0.5
    )
    return [(g["name"], g["lr"], g["weight_decay"], len(g["params"])) for g in groups]


@on_ranks(2)
def test_groups_are_the_same_under_all_wrappers_and_on_all_ranks() -> None:
    plan = Preparation(
        tensor_parallel={"net.0": "colwise", "net.2": "rowwise"},
        activation_checkpointing=["LayerNorm"],
        compile={"backend": "eager"},
    )
    wrappers = (
        SingleDevice,
        StepDistributedDataParallel,
        SeparateDistributedDataParallel,
        StepFullyShardedDataParallel,
    )
    models = [wrap(SupervisedModel(small_net(), nn.MSELoss())) for wrap in wrappers]
    for axes, wrapper in (
        ({"tensor": 2}, None),
        ({"data": 2}, None),
        ({"shard": 1, "tensor": 2}, StepFullyShardedDataParallel),
    ):
        prepare = plan if "tensor" in axes else Preparation(compile={"backend": "eager"})
        net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
        model = SupervisedModel(net, nn.MSELoss())
        models.append(wrap_model(wrapper, model, mesh=build_mesh(axes), prepare=prepare))
    assert [get_groups(model) for model in models] == [GROUPS] * 7
    layered = {"layer_decay": 0.5, "layers": ["net.[01]"]}
    rates = [[(g["name"], g["lr"]) for g in grouped(model, **layered)] for model in models]
    assert rates == [[("net.0", 0.25), ("net.1", 0.5), ("output", 1.0)]] * 7


def test_groups_are_the_same_over_copies_on_devices() -> None:
    model = StepDataParallel(SupervisedModel(small_net(), nn.MSELoss()), ["cpu", "cpu"])
    assert get_groups(model) == GROUPS


SETTINGS = {"lr": 0.01, "weight_decay": 0.1}
PARAMWISE = {"norm_decay_mult": 0.0, "custom_keys": {"2.weight": {"lr_mult": 0.1}}}


@on_ranks(2)
def test_groups_of_an_optimizer_that_shards_its_state() -> None:
    results = []
    for cls, more in ((AdamW, {}), (ZeroRedundancyOptimizer, {"optimizer_class": AdamW})):
        model = small_net()
        groups = param_groups(model, paramwise=PARAMWISE, optimizer=AdamW, **SETTINGS)
        optimizer = build_optimizer(cls, groups, **SETTINGS, **more)
        results.append(train(model, groups, lambda _, built=optimizer: built))
    assert max((a - b).abs().max().item() for a, b in zip(*results, strict=True)) <= 1e-14


@pytest.mark.parametrize("cls", [AdamW, SGD])
@on_ranks(2)
def test_sharded_training_equals_whole(cls: Any) -> None:
    plain, sharded = small_net(), small_net()
    fully_shard(sharded)
    results = []
    for model in (plain, sharded):
        groups = param_groups(model, paramwise=PARAMWISE, optimizer=cls, **SETTINGS)
        optimizer = build_optimizer(cls, groups, **SETTINGS)
        results.append(train(model, groups, lambda _, built=optimizer: built))
    pairs = zip(*results, strict=True)
    assert max((a - b.full_tensor()).abs().max().item() for a, b in pairs) <= 1e-14
