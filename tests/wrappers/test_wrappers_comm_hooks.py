"""Communication hooks, compared with torch's and with plain arithmetic."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from on_ranks import assert_near, gathered, on_ranks, same_on_ranks
from step_models import batches, classifier, flat, mlp, sgd, train
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from stepwrap.registry import COMM_HOOKS
from stepwrap.wrappers import (
    CommHook,
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
    SupervisedModel,
)
from stepwrap.wrappers.ddp.buckets import CHECKED

STEPS = 6
POWER = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.1}


class Doubled(CommHook):
    def bind(self, group: dist.ProcessGroup) -> Any:
        return (group, 2.0), scaled_mean


def scaled_mean(state: tuple[Any, float], bucket: GradBucket) -> Future[Tensor]:
    group, factor = state
    work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]) * factor)


def plain_mean(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    return scaled_mean((group, 1.0), bucket)


def _train(hook: Any, **options: Any) -> Tensor:
    model = StepDistributedDataParallel(classifier(), comm_hook=hook, **options)
    train(model, batches(STEPS, seed=dist.get_rank()))
    return flat(model)


def _plain(cast: torch.dtype = torch.float32, factor: float = 1.0) -> Tensor:
    """Train in one process, with gradients rounded as by a compressing hook."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    by_rank = [batches(STEPS, seed=rank) for rank in range(2)]
    for index in range(STEPS):
        total = [torch.zeros_like(p, dtype=cast) for p in net.parameters()]
        for data in by_rank:
            inputs, target = data[index]
            net.zero_grad()
            nn.functional.cross_entropy(net(inputs), target).backward()
            for sum_, parameter in zip(total, net.parameters(), strict=True):
                sum_ += parameter.grad.to(cast) / 2
        for sum_, parameter in zip(total, net.parameters(), strict=True):
            parameter.grad = sum_.float() * factor
        optimizer.step()
    return flat(net)


@pytest.mark.parametrize(
    ("hook", "cast", "factor", "bound"),
    [
        ("allreduce", torch.float32, 1.0, 1e-6),
        ("fp16_compress", torch.float16, 1.0, 1e-6),
        ("bf16_compress", torch.bfloat16, 1.0, 1e-6),
        ({"type": "bf16_compress"}, torch.bfloat16, 1.0, 1e-6),
        (Doubled(), torch.float32, 2.0, 1e-6),
        (plain_mean, torch.float32, 1.0, 1e-6),
        ("test_wrappers_comm_hooks.plain_mean", torch.float32, 1.0, 1e-6),
        ((("group", 3.0), "test_wrappers_comm_hooks.default_group"), torch.float32, 3.0, 1e-6),
    ],
)
@on_ranks(2)
def test_hooks_by_arithmetic(hook: Any, cast: torch.dtype, factor: float, bound: float) -> None:
    weights = _train(hook)
    assert_near(weights, _plain(cast, factor), bound)
    assert cast is torch.float32 or not torch.equal(weights, _plain())


def default_group(state: tuple[str, float], bucket: GradBucket) -> Future[Tensor]:
    return scaled_mean((dist.group.WORLD, state[1]), bucket)


@on_ranks(2)
def test_power_sgd_is_torchs() -> None:
    torch_net = classifier()
    wrapped = DistributedDataParallel(torch_net)
    state = powerSGD_hook.PowerSGDState(process_group=None, **POWER)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(torch_net.parameters(), lr=0.1)
    for inputs, target in batches(STEPS, seed=dist.get_rank()):
        wrapped(inputs, target, mode="loss")["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = _train({"type": "powerSGD", **POWER})
    assert torch.equal(weights, flat(torch_net))
    assert not torch.allclose(weights, _plain(), atol=1e-6)


@on_ranks(2)
def test_copies_keep_their_hook() -> None:
    model = StepDistributedDataParallel(classifier(), comm_hook="bf16_compress")
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.process_group is dist.group.WORLD
        train(again, batches(STEPS, seed=dist.get_rank()))
        assert torch.allclose(flat(again), _plain(torch.bfloat16), atol=1e-6)


@on_ranks(4)
def test_subgroups_of_local_sgd() -> None:
    options = {"type": "post_localSGD", "start_localSGD_iter": 1}
    model = StepDistributedDataParallel(classifier(), comm_hook={**options, "subgroup_size": 2})
    equalities = []
    for batch in batches(2, seed=dist.get_rank()):
        train(model, [batch])
        head, *tail = gathered(flat(model))
        equalities.append([torch.equal(head, other) for other in tail])
    assert equalities == [[True] * 3, [True, False, False]]
    with pytest.raises(ValueError, match="subgroup_size must divide the 4 ranks.*got 3"):
        StepDistributedDataParallel(classifier(), comm_hook={**options, "subgroup_size": 3})


@pytest.mark.parametrize(
    ("hook", "error", "text"),
    [
        ("fp16_compres", ValueError, "did you mean fp16_compress"),
        ({"type": "powerSDG"}, ValueError, "did you mean powerSGD"),
        ({"type": "powerSGD", "rank": 2}, TypeError, "rank"),
        ({"type": "post_localSGD"}, TypeError, "start_localSGD_iter"),
        (7, TypeError, "must be a name"),
        (lambda gradients: gradients, TypeError, "bucket"),
        ({"type": plain_mean}, TypeError, "takes no options"),
    ],
)
def test_wrong_hooks(hook: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        StepDistributedDataParallel(classifier(), comm_hook=hook)


def test_registered_hooks() -> None:
    COMM_HOOKS.register_module("plain_mean_of_tests", module=plain_mean)
    try:
        StepDistributedDataParallel.check_options({"comm_hook": "plain_mean_of_tests"})
    finally:
        del COMM_HOOKS.module_dict["plain_mean_of_tests"]
    assert {"allreduce", "fp16_compress", "bf16_compress", "powerSGD"} < set(COMM_HOOKS)


CHANGED = (
    f"torch has changed how it rebuilds buckets since {CHECKED}: look at what "
    "wrappers/ddp/buckets.py uses"
)
STOP = 2
# Smaller than the weights of the first layer, so that there are two buckets.
SMALL_MB = 0.0002
Names = list[list[str]]


def _wrapped(options: dict[str, Any], net: nn.Module) -> Any:
    options = dict(options)
    if options.pop("frozen", False):
        net[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
    kind: Any = StepDistributedDataParallel
    if options.pop("separate", False):
        kind = SeparateDistributedDataParallel
    return kind(SupervisedModel(net, nn.CrossEntropyLoss()), **options)


@pytest.mark.parametrize(
    ("options", "accumulate", "ranks"),
    [
        ({}, 1, 3),
        ({"separate": True}, 1, 3),
        ({"gradient_as_bucket_view": True, "frozen": True}, 2, 3),
        ({"static_graph": True}, 3, 3),
        ({"static_graph": True, "find_unused_parameters": True}, 2, 2),
        *slow(
            ({}, 1, 4),
            ({}, 2, 3),
            ({"bucket_cap_mb": None}, 1, 3),
            ({"bucket_cap_mb": None}, 1, 4),
            ({"separate": True, "gradient_as_bucket_view": True}, 1, 4),
            ({"static_graph": True}, 1, 4),
            ({"static_graph": True, "gradient_as_bucket_view": True}, 2, 4),
            ({"find_unused_parameters": True}, 1, 3),
            ({"comm_hook": "allreduce"}, 1, 3),
            ({"comm_hook": "fp16_compress"}, 1, 3),
            ({"comm_hook": "bf16_compress", "static_graph": True}, 2, 3),
            ({"init_sync": False}, 1, 3),
            ({"broadcast_buffers": False, "frozen": True}, 1, 4),
        ),
    ],
)
@on_ranks("ranks")
def test_a_wrapper_made_later_adds_in_the_same_order(
    options: dict[str, Any], accumulate: int, ranks: int
) -> None:
    """A wrapper made at update ``STOP`` makes the same updates as the first one."""
    options = {"bucket_cap_mb": SMALL_MB, **options}
    model = _wrapped(options, mlp())
    optim = sgd(model, momentum=0.9, accumulative_counts=accumulate)
    again: Any = None
    for index, batch in enumerate(batches(STEPS * accumulate, seed=dist.get_rank())):
        if index == STOP * accumulate:
            net = mlp()
            state = model.module.state_dict()
            net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
            again = _wrapped(options, net)
            other = sgd(again, momentum=0.9, accumulative_counts=accumulate)
            other.load_state_dict(copy.deepcopy(optim.state_dict()))
        model.train_step(batch, optim)
        if again is not None:
            again.train_step(batch, other)
    assert torch.equal(flat(model), flat(again))


def _orders(kind: Callable[..., Any], steps: int, **options: Any) -> list[Names]:
    """Return for each step the parameters of the buckets in the order in which they are sent."""
    net = mlp()
    names = {parameter: name for name, parameter in net.named_parameters()}
    model = kind(SupervisedModel(net, nn.CrossEntropyLoss()), **options)
    orders: list[Names] = []

    def note(state: Any, bucket) -> Future[Tensor]:  # type: ignore[no-untyped-def]
        orders[-1].append([names[param] for param in bucket.parameters()])
        return _mean(state, bucket)

    model.register_comm_hook(None, note)
    for inputs, target in batches(steps, seed=dist.get_rank()):
        orders.append([])
        model(inputs, target, mode="loss")["loss"].backward()
    return orders


def _mean(state: Any, bucket: GradBucket) -> Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


@on_ranks(3)
def test_the_first_buckets_equal_torchs_rebuilt_ones() -> None:
    """The averaging overlaps with the backward as much as under torch's class."""
    expected = [["2.bias", "2.weight", "0.bias"], ["0.weight"]]
    for options in ({"bucket_cap_mb": SMALL_MB}, {"bucket_cap_mb": SMALL_MB, "init_sync": False}):
        assert _orders(StepDistributedDataParallel, 3, **options) == [expected] * 3, CHANGED
    orders = _orders(DistributedDataParallel, 3, bucket_cap_mb=SMALL_MB)
    assert orders[0] != expected
    assert orders[1:] == [expected] * 2


@on_ranks(2)
def test_two_ranks_train_as_under_torch_to_the_bit() -> None:
    model = StepDistributedDataParallel(classifier(), bucket_cap_mb=SMALL_MB)
    optim = sgd(model, momentum=0.9)
    net = classifier()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=SMALL_MB)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for inputs, target in batches(STEPS, seed=dist.get_rank()):
        model.train_step([inputs, target], optim)
        wrapped(inputs, target, mode="loss")["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(flat(model), flat(net))


@pytest.mark.parametrize("accumulate", [1, 3])
@on_ranks(2)
def test_copies_of_a_static_graph_average(accumulate: int) -> None:
    model = StepDistributedDataParallel(classifier(), static_graph=True)
    data = batches(STEPS, seed=dist.get_rank())
    train(model, data, sgd(model, momentum=0.9))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.static_graph
        expected = StepDistributedDataParallel(classifier())
        expected.load_state_dict(again.state_dict())
        for wrapper in (again, expected):
            train(wrapper, data, sgd(wrapper, momentum=0.9, accumulative_counts=accumulate))
        assert torch.equal(flat(again), flat(expected))


@on_ranks(2)
def test_a_changed_torch_trains_with_a_warning() -> None:
    original = dist.Reducer._push_all_rebuilt_params
    del dist.Reducer._push_all_rebuilt_params
    try:
        with pytest.warns(UserWarning, match="no _push_all_rebuilt_params, .*three or more"):
            model = StepDistributedDataParallel(classifier())
    finally:
        dist.Reducer._push_all_rebuilt_params = original
    train(model, batches(STEPS, seed=dist.get_rank()), sgd(model, momentum=0.9))
    assert same_on_ranks(flat(model))
