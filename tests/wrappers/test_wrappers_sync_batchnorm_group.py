"""Synchronised batch normalisation over the ranks of a process group."""

import copy
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
    splits,
    train,
    with_parameters,
)
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn

from stepwrap.collectives import CollectiveError, recent_collectives, trace_collectives
from stepwrap.wrappers import (
    OptimWrapper,
    StepDistributedDataParallel,
    SupervisedModel,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
)


def _layer(kind: str, dtype: torch.dtype, **options: Any) -> Any:
    return with_parameters(SYNCHRONISED[kind](CHANNELS, **options)).to(dtype)


def _shards(given: Case, sizes: list[int], index: int) -> Case:
    parts = ([one.split(sizes)[index] for one in x] for x in (given.inputs, given.cotangents))
    return Case(given.kind, *parts)


def _whole(got: dict[str, Tensor], parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """This rank's results with the outputs of all, and the sums of the parameters' gradients."""
    joined = {name: torch.cat([part[name] for part in parts], 1) for name in ("y", "dx")}
    summed = {
        name: sum(part[name] for part in parts) for name in got if name in ("dweight", "dbias")
    }
    return {**got, **joined, **summed}  # type: ignore[dict-item]


def _error(given: Case, sizes: list[int], layer: Any = None, **options: Any) -> float:
    """Error of this rank's results together with those of the others."""
    group = options.get("process_group")
    layer = layer or _layer(given.kind, given.inputs[0].dtype, **options)
    got = train(layer, layer, _shards(given, sizes, dist.get_rank(group)))
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, got, group=group)
    options.pop("process_group", None)
    return largest_error(_whole(got, parts), reference(given, **options))


def _errors() -> dict[tuple[str, ...], float]:
    found = {}
    for kind in SHAPES:
        for dtype, bound in BOUNDS.items():
            given = case(kind, dtype)
            for name, sizes in splits(SHAPES[kind][0], dist.get_world_size()).items():
                found[kind, str(dtype), name] = _error(given, sizes) / bound
    given = case("2d", torch.float64)
    uneven = splits(8, dist.get_world_size())["uneven"]
    for options in ({"affine": False}, {"momentum": None}, {"track_running_stats": False}):
        found["2d", str(options), "uneven"] = _error(given, uneven, **options) / 1e-12
    far = case("2d", torch.float32, mean=1e4)
    for precision, bound in (("fp32", 1e-6), ("fp64", 2e-7)):
        layer = _layer("2d", torch.float32, precision=precision)
        found["2d", "far", precision] = _error(far, uneven, layer) / bound
    return found


@pytest.mark.parametrize("world_size", [2, *slow(4)])
def test_equals_the_full_batch(world_size: int) -> None:
    """D-13, D-14, D-17."""
    for errors in run_ranks(_errors, world_size):
        assert {key: error for key, error in errors.items() if error > 1} == {}


def _calls_by_mode() -> dict[str, list[str]]:
    """The layer's collectives in each mode."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    x = torch.randn(2, CHANNELS, 2, 2, dtype=torch.float64, requires_grad=True)
    layer, plain = _layer("2d", torch.float64), nn.BatchNorm2d(CHANNELS).double()
    layer(x)

    def evaluate() -> None:
        plain.load_state_dict(layer.state_dict())
        assert torch.equal(layer.eval()(x), plain.eval()(x))

    def train_alone() -> None:
        alone = _layer("2d", torch.float64, process_group=own)
        plain.load_state_dict(alone.state_dict())
        assert torch.equal(alone(x), plain.train()(x))

    modes = {
        "train": lambda: layer(x).sum().backward(),
        "no gradient of the input": lambda: layer(x.detach()).sum().backward(),
        "eval": evaluate,
        "alone": train_alone,
    }
    found = {}
    trace_collectives()
    try:
        for mode, call in modes.items():
            before = [one.number for one in recent_collectives()]
            call()
            new = [one for one in recent_collectives() if one.number not in before]
            found[mode] = [one.name for one in new]
    finally:
        trace_collectives(False)
    return found


def test_one_collective_each_way() -> None:
    """D-16: none in evaluation and for a group of one rank."""
    for calls in run_ranks(_calls_by_mode, 2):
        names = [f"SynchronizedBatchNorm2d.{way}" for way in ("forward", "backward")]
        assert calls == {
            "train": names,
            "no gradient of the input": names[:1],
            "eval": [],
            "alone": [],
        }


def _in_half_groups() -> list[float]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = groups[dist.get_rank() // 2]
    given = case("2d", torch.float64)
    if dist.get_rank() > 1:
        given = Case("2d", [3 * one for one in given.inputs], given.cotangents)
    copied = copy.deepcopy(_layer("2d", torch.float64, process_group=own))
    assert copied.process_group is own
    with pytest.raises(ValueError, match="not a member of the layer's process_group"):
        _layer("2d", torch.float64, process_group=groups[1 - dist.get_rank() // 2])(given.inputs[0])
    return [_error(given, [3, 5], process_group=own)]


def test_groups_of_some_ranks() -> None:
    for errors in run_ranks(_in_half_groups, 4):
        assert max(errors) <= 1e-12


def _mistakes() -> dict[str, str]:
    """What every rank is told of the mistakes of one, and that the group goes on."""
    first = dist.get_rank() == 0
    x = torch.randn(4, CHANNELS)
    layer = _layer("1d", torch.float32)
    found = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    def without_gradients() -> None:
        with torch.set_grad_enabled(not first):
            layer(x.clone().requires_grad_())

    attempt("channels of layers", lambda: SynchronizedBatchNorm1d(4 + first)(x[:, : 4 + first]))
    attempt("channels", lambda: layer(x if first else x[:, :5]))
    attempt("dimensions", lambda: layer(x[..., None, None] if first else x))
    attempt("one value", lambda: layer(x[:1] if first else x[:0]))
    attempt("gradients", without_gradients)
    attempt("works", lambda: layer(x).sum().backward())
    return found


def test_mistakes_of_one_rank() -> None:
    """An error on every rank that names the one, and no hang; the next call works."""
    name = "SynchronizedBatchNorm1d"
    results = run_ranks(_mistakes, 2)
    for found in results:
        assert found.keys() == {
            "channels of layers",
            "channels",
            "dimensions",
            "one value",
            "gradients",
        }
        assert found["channels of layers"] == (
            f"ValueError: {name} must have the same num_features on all ranks, but it has "
            "5 on rank 0, 4 on rank 1"
        )
        channels = (
            f"rank 1: AssertionError: Channel size mismatch: the layer has {CHANNELS} channels"
        )
        assert found["channels"].startswith(f"CollectiveError: {name} cannot continue: {channels}")
        dimensions = "rank 0: ValueError: expected 2D or 3D input (got 4D input)"
        assert found["dimensions"] == f"CollectiveError: {name} cannot continue: {dimensions}"
        text = "ValueError: Expected more than 1 value per channel when training"
        assert found["one value"].startswith(text)
        assert "but ranks [0] run it without" in found["gradients"]


def _one_leaves() -> str:
    layer = _layer("1d", torch.float32)
    x = torch.randn(4, CHANNELS)
    layer(x)
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(CollectiveError) as caught:
        layer(x)
    return str(caught.value)


def test_a_rank_that_does_not_come() -> None:
    text, _ = run_ranks(_one_leaves, 2, group_timeout_s=2)
    assert "SynchronizedBatchNorm1d.forward" in text
    assert "rank 0" in text


def _autocast_and_layout() -> list[bool]:
    x = torch.randn(4, CHANNELS, 4, 4).to(memory_format=torch.channels_last)
    layer = SynchronizedBatchNorm2d(CHANNELS)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.bfloat16().requires_grad_())
    y.sum().backward()
    return [
        y.dtype is torch.bfloat16,
        y.is_contiguous(memory_format=torch.channels_last),
        layer.running_mean.dtype is torch.float32,
        layer.weight.grad.dtype is torch.float32,
    ]


def test_autocast_and_layout() -> None:
    for results in run_ranks(_autocast_and_layout, 2):
        assert results == [True] * 4


def _network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    layers = [nn.Linear(CHANNELS, 8), norms[0], nn.ReLU(), nn.Linear(8, 8), norms[1]]
    return nn.Sequential(*layers, nn.Linear(8, 3)).to(dtype)


def _batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [
            torch.randn(8, CHANNELS, generator=generator, dtype=torch.float64),
            torch.randint(3, (8,), generator=generator),
        ]
        for _ in range(4)
    ]


def _trained() -> dict[str, Tensor]:
    model = StepDistributedDataParallel(
        SupervisedModel(_network(torch.float64), nn.CrossEntropyLoss()), sync_batchnorm=True
    )
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for batch in _batches():
        model.train_step(
            [one.chunk(dist.get_world_size())[dist.get_rank()] for one in batch], wrapper
        )
    return {name: one.clone() for name, one in model.module.net.state_dict().items()}


def test_training_follows_the_full_batch() -> None:
    net = _network(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, target in _batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), target).backward()
        optimizer.step()
    expected = net.state_dict()
    for got in run_ranks(_trained, 2):
        for name, value in expected.items():
            assert torch.allclose(got[name].double(), value.double(), rtol=0, atol=1e-12)
