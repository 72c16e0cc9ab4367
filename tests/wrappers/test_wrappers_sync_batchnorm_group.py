"""Synchronised batch normalisation over the ranks of a process group."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batchnorm_cases import (
    BOUNDS,
    CHANNELS,
    SHAPES,
    SYNCHRONISED,
    Case,
    case,
    largest_error,
    reference,
    set_parameters,
    splits,
    train,
)
from marks import slow
from on_ranks import gathered, on_ranks, raises_with
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepwrap.collectives import CollectiveError, recent_collectives, trace_collectives
from stepwrap.wrappers import (
    StepDataParallel,
    SupervisedModel,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    dict_gather,
)


def _layer(kind: str, dtype: torch.dtype, **options: Any) -> Any:
    return set_parameters(SYNCHRONISED[kind](CHANNELS, **options)).to(dtype)


def _shards(bn_case: Case, sizes: list[int], index: int) -> Case:
    shards = (
        [tensor.split(sizes)[index] for tensor in x] for x in (bn_case.inputs, bn_case.cotangents)
    )
    return Case(bn_case.kind, *shards)


def _whole(got: dict[str, Tensor], rank_results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return this rank's results with all outputs and the summed gradients of the parameters."""
    joined = {
        name: torch.cat([rank_result[name] for rank_result in rank_results], 1)
        for name in ("y", "dx")
    }
    summed = {
        name: sum(rank_result[name] for rank_result in rank_results)
        for name in got
        if name in ("dweight", "dbias")
    }
    return {**got, **joined, **summed}  # type: ignore[dict-item]


def _error(bn_case: Case, sizes: list[int], layer: Any = None, **options: Any) -> float:
    """Return the error of the combined results of all ranks."""
    group = options.get("process_group")
    layer = layer or _layer(bn_case.kind, bn_case.inputs[0].dtype, **options)
    got = train(layer, layer, _shards(bn_case, sizes, dist.get_rank(group)))
    rank_results: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rank_results, got, group=group)
    options.pop("process_group", None)
    return largest_error(_whole(got, rank_results), reference(bn_case, **options))


@pytest.mark.parametrize("world_size", [2, *slow(4)])
@on_ranks("world_size")
def test_equals_the_full_batch(world_size: int) -> None:
    relative_errors = {}
    for kind in SHAPES:
        for dtype, bound in BOUNDS.items():
            bn_case = case(kind, dtype)
            for name, sizes in splits(SHAPES[kind][0], dist.get_world_size()).items():
                relative_errors[kind, str(dtype), name] = _error(bn_case, sizes) / bound
    bn_case = case("2d", torch.float64)
    uneven = splits(8, dist.get_world_size())["uneven"]
    for options in ({"affine": False}, {"momentum": None}, {"track_running_stats": False}):
        relative_errors["2d", str(options), "uneven"] = _error(bn_case, uneven, **options) / 1e-12
    far = case("2d", torch.float32, mean=1e4)
    for precision, bound in (("fp32", 1e-6), ("fp64", 2e-7)):
        layer = _layer("2d", torch.float32, precision=precision)
        relative_errors["2d", "far", precision] = _error(far, uneven, layer) / bound
    errors = relative_errors
    assert {key: error for key, error in errors.items() if error > 1} == {}


@on_ranks(2)
def test_one_collective_each_way() -> None:
    """There is none in evaluation or for a group of one rank."""
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    x = torch.randn(2, CHANNELS, 2, 2, dtype=torch.float64, requires_grad=True)
    layer, plain = _layer("2d", torch.float64), nn.BatchNorm2d(CHANNELS).double()
    layer(x)

    def evaluate() -> None:
        plain.load_state_dict(layer.state_dict())
        assert torch.equal(layer.eval()(x), plain.eval()(x))

    def train_alone() -> None:
        alone = _layer("2d", torch.float64, process_group=group)
        plain.load_state_dict(alone.state_dict())
        assert torch.equal(alone(x), plain.train()(x))

    modes = {
        "train": lambda: layer(x).sum().backward(),
        "no gradient of the input": lambda: layer(x.detach()).sum().backward(),
        "eval": evaluate,
        "alone": train_alone,
    }
    calls_by_mode = {}
    trace_collectives()
    try:
        for mode, call in modes.items():
            before = [record.number for record in recent_collectives()]
            call()
            records = [record for record in recent_collectives() if record.number not in before]
            calls_by_mode[mode] = [record.name for record in records]
    finally:
        trace_collectives(False)
    names = [f"SynchronizedBatchNorm2d.{way}" for way in ("forward", "backward")]
    assert calls_by_mode == {
        "train": names,
        "no gradient of the input": names[:1],
        "eval": [],
        "alone": [],
    }


@on_ranks(4)
def test_groups_of_some_ranks() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    bn_case = case("2d", torch.float64)
    if dist.get_rank() > 1:
        bn_case = Case("2d", [3 * tensor for tensor in bn_case.inputs], bn_case.cotangents)
    copied = copy.deepcopy(_layer("2d", torch.float64, process_group=group))
    assert copied.process_group is group
    with pytest.raises(ValueError, match="not a member .*process_group"):
        _layer("2d", torch.float64, process_group=groups[1 - dist.get_rank() // 2])(
            bn_case.inputs[0]
        )
    assert _error(bn_case, [3, 5], process_group=group) <= 1e-12


@on_ranks(2)
def test_mistakes_of_one_rank() -> None:
    """Every rank raises an error that names the rank, and the next call works."""
    is_rank_0 = dist.get_rank() == 0
    x = torch.randn(4, CHANNELS)
    layer = _layer("1d", torch.float32)
    name = "SynchronizedBatchNorm1d"
    text = (
        f"{name} must have the same num_features on all ranks, but it has 5 on rank 0, 4 on rank 1"
    )
    with pytest.raises(ValueError, match=f"^{text}$"):
        SynchronizedBatchNorm1d(4 + is_rank_0)(x[:, : 4 + is_rank_0])
    text = f"rank 1: AssertionError: Channel size mismatch: the input must have {CHANNELS} channels"
    with pytest.raises(CollectiveError, match=f"^{name} cannot continue: {text}"):
        layer(x if is_rank_0 else x[:, :5])
    text = r"rank 0: ValueError: expected 2D or 3D input \(got 4D input\)"
    with pytest.raises(CollectiveError, match=f"^{name} cannot continue: {text}$"):
        layer(x[..., None, None] if is_rank_0 else x)
    with pytest.raises(ValueError, match="^Expected more than 1 value per channel when training"):
        layer(x[:1] if is_rank_0 else x[:0])
    with (
        pytest.raises(CollectiveError, match=r"but ranks \[0\] run it without"),
        torch.set_grad_enabled(not is_rank_0),
    ):
        layer(x.clone().requires_grad_())
    layer(x).sum().backward()


@on_ranks(2, group_timeout_s=2)
def test_a_rank_that_skips_the_layer() -> None:
    layer = _layer("1d", torch.float32)
    x = torch.randn(4, CHANNELS)
    layer(x)
    if dist.get_rank() == 0:
        with raises_with(CollectiveError, "SynchronizedBatchNorm1d.forward", "rank 0"):
            layer(x)


@on_ranks(2)
def test_autocast_and_layout() -> None:
    x = torch.randn(4, CHANNELS, 4, 4).to(memory_format=torch.channels_last)
    layer = SynchronizedBatchNorm2d(CHANNELS)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.bfloat16().requires_grad_())
    y.sum().backward()
    assert y.dtype is torch.bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert layer.running_mean.dtype is layer.weight.grad.dtype is torch.float32


def _layers() -> tuple[SynchronizedBatchNorm1d, SynchronizedBatchNorm1d, Tensor]:
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    layer_a, second = (SynchronizedBatchNorm1d(3).double() for _ in range(2))
    layer_a(x)
    second(x)
    return layer_a, second, x


@on_ranks(2)
def test_ranks_in_different_layers_get_an_error() -> None:
    """They must not get wrong statistics or gradients."""
    layer_a, second, x = _layers()
    chosen = (layer_a, second)[dist.get_rank()]
    text = "the ranks [0] and [1] are in different calls of SynchronizedBatchNorm1d"
    with raises_with(CollectiveError, text):
        chosen(x)
    layer_a, second, x = _layers()
    output = (layer_a(x), second(x * 2 + x**2))[dist.get_rank()]
    text = "in the backward of different calls of SynchronizedBatchNorm1d"
    with raises_with(CollectiveError, text):
        output.pow(3).sum().backward()
    # Afterwards the ranks are in step again.
    layer_a, _, x = _layers()
    layer_a(x).pow(3).sum().backward()
    assert x.grad is not None


@on_ranks(2)
def test_a_copy_that_one_rank_makes_still_synchronises() -> None:
    """The outputs of both ranks have mean 0 only together."""
    layer, _, x = _layers()
    if dist.get_rank() == 0:
        layer = copy.deepcopy(layer)
    of_rank_0, of_rank_1 = gathered(layer(x).sum().item())
    assert of_rank_0 + of_rank_1 == pytest.approx(0, abs=1e-9)
    assert abs(of_rank_0) > 1e-3


@on_ranks(2)
def test_activation_checkpoints_on_ranks() -> None:
    differences = []
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), SynchronizedBatchNorm1d(3), nn.ReLU()).double()
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        out = net(x) if reentrant is None else checkpoint(net, x, use_reentrant=reentrant)
        out.pow(3).sum().backward()
        assert x.grad is not None
        differences.append(x.grad)
    differences = [float((other - differences[0]).abs().max()) for other in differences[1:]]
    assert max(differences) < 1e-13


@on_ranks(2)
def test_a_layer_with_a_group_is_pickled_without_it() -> None:
    layer = SynchronizedBatchNorm1d(3, process_group=dist.group.WORLD)
    again = pickle.loads(pickle.dumps(layer))
    assert again.process_group is None
    assert copy.deepcopy(layer).process_group is dist.group.WORLD


def test_outputs_that_cannot_be_gathered_and_a_positional_mode() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"different dimensions: shapes \(2,\), \(\)"):
        dict_gather([torch.ones(2), torch.tensor(1.0)], cpu)
    with pytest.raises(ValueError, match="at least one copy"):
        dict_gather([], cpu)
    model = SupervisedModel(nn.Linear(3, 2), nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match="mode .*by its name: mode='loss'"):
        StepDataParallel(model, ["cpu", "cpu"])(torch.ones(4, 3), torch.zeros(4).long(), "loss")
