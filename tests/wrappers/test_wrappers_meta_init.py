"""Models built on the meta device get the same weights as ordinary ones."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_runs import Block, Net, Normed, own_batches, whole
from marks import slow
from on_ranks import assert_near, on_ranks, raises_with
from step_models import sgd, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepwrap.wrappers import (
    Preparation,
    StepFullyShardedDataParallel,
    SupervisedModel,
    build_mesh,
    meta_parameters,
    wrap_model,
)


class Positions(nn.Module):
    """A model with a parameter next to modules, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.table = nn.Parameter(torch.empty(5, 8))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("mask", torch.ones(5, 5).tril())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.table, std=0.02)


class Overwriting(nn.Module):
    """A model that overwrites some of its layers' initial weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.first.weight[0].normal_()
            self.second.bias.data.zero_()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4, padding_idx=1), nn.Linear(4, 7)
        self.head.weight = self.embed.weight


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": Net,
    "batchnorm": Normed,
    "positions": Positions,
    "overwriting": Overwriting,
    "recurrent": lambda: nn.LSTM(3, 5, 2),
    "transformer": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16), nn.TransformerDecoderLayer(8, 2, 16)
    ),
    "tied": Shared,
    "convolution": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.PReLU()),
}


CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in MODELS),
    ("linear", {"shard": ["Block", "Linear"]}),
    ("transformer", {"shard": ["TransformerEncoderLayer", "TransformerDecoderLayer"]}),
    ("transformer", {"shard": "Linear"}),
    ("linear", {"shard": "Block", "cpu_offload": True}),
    ("positions", {"mixed_precision": {"param_dtype": "bfloat16"}}),
]


@pytest.mark.parametrize(
    ("ranks", "more"), [(2, {}), *slow((1, {}), (4, {"axes": {"replicate": 2, "shard": 2}}))]
)
@on_ranks("ranks")
def test_weights_equal_an_ordinary_construction(ranks: int, more: dict[str, Any]) -> None:
    """The weights and the final state of the generator are equal."""
    for kind, options in CASES:
        torch.manual_seed(3)
        expected = MODELS[kind]().state_dict()
        end = torch.get_rng_state()
        torch.manual_seed(3)
        with meta_parameters():
            model = MODELS[kind]()
        assert all(param.is_meta for param in model.parameters())
        assert not any(buffer.is_meta for buffer in model.buffers())
        mesh = {"mesh": build_mesh(more["axes"])} if more else {}
        wrapped = StepFullyShardedDataParallel(model, **options, **mesh)
        assert all(isinstance(param, DTensor) for param in wrapped.parameters())
        assert torch.equal(torch.get_rng_state(), end)
        weights = whole(model)
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(weights[name], value), (kind, options, name)


@on_ranks(2)
def test_other_random_streams_are_left_alone() -> None:
    torch.manual_seed(100 + dist.get_rank())
    before = torch.get_rng_state()
    with meta_parameters():
        model = Net()
    StepFullyShardedDataParallel(model, shard=["Block"])
    assert torch.equal(before, torch.get_rng_state()) == (dist.get_rank() == 1)


@on_ranks(2)
def test_an_initialiser_of_the_whole_model() -> None:
    """Its layers are copies of one, so their values are drawn in another order; all are set."""
    with meta_parameters():
        model = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    StepFullyShardedDataParallel(model, shard="TransformerEncoderLayer")
    weights = whole(model)
    bounds = {name: value.abs().max().item() for name, value in weights.items()}
    assert all(0 < bounds[name] <= 1 for name in bounds if name.endswith("weight"))


def test_meta_parameters_moves_parameters_only() -> None:
    weight = nn.Parameter(torch.zeros(3))
    with meta_parameters():
        model = nn.ParameterList([weight])
        again = nn.ParameterList([weight])
        frozen = nn.Module()
        frozen.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
        lazy = nn.LazyLinear(3)
        absent = nn.Linear(2, 2, bias=False)
    with pytest.raises(KeyError), meta_parameters():
        {}["absent"]
    assert model[0].is_meta
    assert model[0] is again[0]
    assert frozen.weight.is_meta
    assert not frozen.weight.requires_grad
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    assert absent.bias is None
    assert not nn.Linear(2, 2).weight.is_meta


class WithoutInit(nn.Module):
    """A layer whose scale is set only by its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))


class IncompleteInit(WithoutInit):
    """A layer whose initialiser does not set the scale."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.inner.bias)


def _ones(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.ones_(param)


def _replacing(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    _ones(module)


def _linear_only(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        _ones(module)


@on_ranks(2)
def test_uninitialised_parameters_are_named() -> None:
    texts = (
        "every parameter on the meta device must be initialised",
        "nothing initialises 0.scale",
        "reset_parameters() of its module, or pass param_init_fn(module)",
    )
    for kind, init in ((WithoutInit, None), (IncompleteInit, None), (WithoutInit, _linear_only)):
        with meta_parameters():
            model = nn.Sequential(kind())
        with raises_with(ValueError, *texts):
            StepFullyShardedDataParallel(model, param_init_fn=init)
    for init in (_ones, f"{__name__}._replacing", {"type": _replacing}):
        with meta_parameters():
            model = nn.Sequential(WithoutInit())
        StepFullyShardedDataParallel(model, shard="Linear", param_init_fn=init)
        assert all(bool((value == 1).all()) for value in whole(model).values())


WIDTH, LAYERS = 96, 8
_peaks: list[int] = []


class MeasuredLinear(nn.Linear):
    """A layer that records the number of allocated elements during its initialisation."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.weight.is_meta:
            tensors = [
                tensor for tensor in gc.get_objects() if type(tensor) in (Tensor, nn.Parameter)
            ]
            memory = {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().size() // 4
                for tensor in tensors
                if tensor.device.type == "cpu" and tensor.numel() > WIDTH
            }
            _peaks.append(sum(memory.values()))


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks("ranks")
def test_memory_is_the_shards_and_one_module(ranks: int) -> None:
    _peaks.clear()
    with meta_parameters():
        model = nn.Sequential(*(MeasuredLinear(WIDTH, WIDTH) for _ in range(LAYERS)))
    gc.collect()
    before = sum(param.numel() for param in model.parameters() if not param.is_meta)
    StepFullyShardedDataParallel(model, shard="Linear")
    layer = WIDTH * (WIDTH + 1)
    shards = LAYERS * layer // ranks
    assert before == 0
    assert layer < max(_peaks) <= shards + layer + 5100


@on_ranks(2)
def test_training_equals_an_ordinary_construction() -> None:
    results = []
    for context in (meta_parameters(), nullcontext()):
        torch.manual_seed(0)
        with context:
            net = Normed()
        model = SupervisedModel(net, nn.CrossEntropyLoss())
        wrapped = StepFullyShardedDataParallel(model, shard=[Block], sync_batchnorm=True)
        data = own_batches(dist.get_rank(), torch.float32)
        train(wrapped, data, sgd(wrapped, momentum=0.9))
        results.append(whole(model))
    assert_near(*results, 0)


@on_ranks(4)
def test_layers_split_over_a_tensor_axis() -> None:
    torch.manual_seed(5 + 10 * dist.get_rank())
    with meta_parameters():
        net = Net()
    model = wrap_model(
        StepFullyShardedDataParallel,
        SupervisedModel(net, nn.CrossEntropyLoss()),
        device="cpu",
        mesh=build_mesh({"data": 2, "tensor": 2}),
        prepare=Preparation(
            tensor_parallel={"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"}
        ),
        shard=["Block"],
    )
    weights = whole(model.module.net)
    torch.manual_seed(5)
    assert all(torch.equal(weights[name], value) for name, value in Net().state_dict().items())
