"""The buckets of DistributedDataParallel: every sum in one order, however often a run resumes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from on_ranks import on_ranks, same_on_ranks
from step_models import batches, classifier, flat, mlp, sgd, train
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from stepwrap.wrappers import (
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
    SupervisedModel,
)
from stepwrap.wrappers.ddp.buckets import CHECKED

CHANGED = (
    f"torch has changed how it rebuilds buckets since {CHECKED}: look at what "
    "wrappers/ddp/buckets.py uses"
)
STEPS, STOP = 6, 2
# Less than the weights of the first layer: there are two buckets.
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


def _bare(model: Any) -> nn.Module:
    net = mlp()
    net.load_state_dict({n.removeprefix("net."): v for n, v in model.module.state_dict().items()})
    return net


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
            again = _wrapped(options, copy.deepcopy(_bare(model)))
            other = sgd(again, momentum=0.9, accumulative_counts=accumulate)
            other.load_state_dict(copy.deepcopy(optim.state_dict()))
        model.train_step(batch, optim)
        if again is not None:
            again.train_step(batch, other)
    assert torch.equal(flat(model), flat(again))


def _orders(kind: Callable[..., Any], steps: int, **options: Any) -> list[Names]:
    """Return the parameters of the buckets, in the order in which they are sent, by step."""
    net = mlp()
    names = {parameter: name for name, parameter in net.named_parameters()}
    model = kind(SupervisedModel(net, nn.CrossEntropyLoss()), **options)
    seen: list[Names] = []

    def note(state: Any, bucket) -> Future[Tensor]:  # type: ignore[no-untyped-def]
        seen[-1].append([names[one] for one in bucket.parameters()])
        return _mean(state, bucket)

    model.register_comm_hook(None, note)
    for inputs, target in batches(steps, seed=dist.get_rank()):
        seen.append([])
        model(inputs, target, mode="loss")["loss"].backward()
    return seen


def _mean(state: Any, bucket: GradBucket) -> Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


@on_ranks(3)
def test_the_first_buckets_are_those_that_torch_arrives_at() -> None:
    """The average overlaps the backward as much as under torch's class."""
    expected = [["2.bias", "2.weight", "0.bias"], ["0.weight"]]
    for options in ({"bucket_cap_mb": SMALL_MB}, {"bucket_cap_mb": SMALL_MB, "init_sync": False}):
        assert _orders(StepDistributedDataParallel, 3, **options) == [expected] * 3, CHANGED
    seen = _orders(DistributedDataParallel, 3, bucket_cap_mb=SMALL_MB)
    assert seen[0] != expected
    assert seen[1:] == [expected] * 2


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
        for one in (again, expected):
            train(one, data, sgd(one, momentum=0.9, accumulative_counts=accumulate))
        assert torch.equal(flat(again), flat(expected))


@on_ranks(2)
def test_a_changed_torch_trains_with_a_warning() -> None:
    kept = dist.Reducer._push_all_rebuilt_params
    del dist.Reducer._push_all_rebuilt_params
    try:
        with pytest.warns(UserWarning, match="no _push_all_rebuilt_params, so on three or more"):
            model = StepDistributedDataParallel(classifier())
    finally:
        dist.Reducer._push_all_rebuilt_params = kept
    train(model, batches(STEPS, seed=dist.get_rank()), sgd(model, momentum=0.9))
    assert same_on_ranks(flat(model))
