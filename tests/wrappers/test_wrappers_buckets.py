"""The buckets of DistributedDataParallel: every sum in one order, however often a run resumes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from ranks import run_ranks
from step_models import batches, classifier, flat, mlp
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from stepwrap.wrappers import (
    OptimWrapper,
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


def _trainer(model: Any, accumulate: int = 1) -> tuple[Any, OptimWrapper]:
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), accumulate)
    return model, optim


def _wrapped(options: dict[str, Any], net: nn.Module) -> Any:
    options = dict(options)
    if options.pop("frozen", False):
        net[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
    kind: Any = StepDistributedDataParallel
    if options.pop("separate", False):
        kind = SeparateDistributedDataParallel
    return kind(SupervisedModel(net, nn.CrossEntropyLoss()), **options)


def _resumed(options: dict[str, Any], accumulate: int) -> bool:
    """Whether a wrapper made at update ``STOP`` makes the same updates as the first one."""
    options = {"bucket_cap_mb": SMALL_MB, **options}
    model, optim = _trainer(_wrapped(options, mlp()), accumulate)
    again: Any = None
    for index, batch in enumerate(batches(STEPS * accumulate, seed=dist.get_rank())):
        if index == STOP * accumulate:
            again, other = _trainer(_wrapped(options, copy.deepcopy(_bare(model))), accumulate)
            other.load_state_dict(copy.deepcopy(optim.state_dict()))
        model.train_step(batch, optim)
        if again is not None:
            again.train_step(batch, other)
    return torch.equal(flat(model), flat(again))


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
def test_a_wrapper_made_later_adds_in_the_same_order(
    options: dict[str, Any], accumulate: int, ranks: int
) -> None:
    assert run_ranks(_resumed, ranks, options, accumulate) == [True] * ranks


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


def test_the_first_buckets_are_those_that_torch_arrives_at() -> None:
    """So the average overlaps the backward as much as under torch's own class."""
    expected = [["2.bias", "2.weight", "0.bias"], ["0.weight"]]
    for options in ({"bucket_cap_mb": SMALL_MB}, {"bucket_cap_mb": SMALL_MB, "init_sync": False}):
        for seen in run_ranks(_orders, 3, StepDistributedDataParallel, 3, **options):
            assert seen == [expected] * 3, CHANGED
    for seen in run_ranks(_orders, 3, DistributedDataParallel, 3, bucket_cap_mb=SMALL_MB):
        assert seen[0] != expected
        assert seen[1:] == [expected] * 2


def _by_torch() -> bool:
    model, optim = _trainer(StepDistributedDataParallel(classifier(), bucket_cap_mb=SMALL_MB))
    net = classifier()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=SMALL_MB)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for inputs, target in batches(STEPS, seed=dist.get_rank()):
        model.train_step([inputs, target], optim)
        wrapped(inputs, target, mode="loss")["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.equal(flat(model), flat(net))


def test_two_ranks_train_as_under_torch_to_the_bit() -> None:
    assert run_ranks(_by_torch, 2) == [True, True]


def _copied(accumulate: int) -> list[bool]:
    """Whether copies of a trained wrapper with a static graph go on to average gradients."""
    model, optim = _trainer(StepDistributedDataParallel(classifier(), static_graph=True))
    rows = batches(STEPS, seed=dist.get_rank())
    for batch in rows:
        model.train_step(batch, optim)
    results = []
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same, other = _trainer(again, accumulate)
        assert same.static_graph
        expected, plain = _trainer(StepDistributedDataParallel(classifier()), accumulate)
        expected.load_state_dict(same.state_dict())
        for batch in rows:
            same.train_step(batch, other)
            expected.train_step(batch, plain)
        results.append(torch.equal(flat(same), flat(expected)))
    return results


@pytest.mark.parametrize("accumulate", [1, 3])
def test_copies_of_a_static_graph_average(accumulate: int) -> None:
    assert run_ranks(_copied, 2, accumulate) == [[True, True]] * 2


def _unknown() -> bool:
    kept = dist.Reducer._push_all_rebuilt_params
    del dist.Reducer._push_all_rebuilt_params
    try:
        with pytest.warns(UserWarning, match="no _push_all_rebuilt_params, so on three or more"):
            model, optim = _trainer(StepDistributedDataParallel(classifier()))
    finally:
        dist.Reducer._push_all_rebuilt_params = kept
    for batch in batches(STEPS, seed=dist.get_rank()):
        model.train_step(batch, optim)
    parts = [torch.empty_like(flat(model)) for _ in range(2)]
    dist.all_gather(parts, flat(model))
    return torch.equal(*parts)


def test_a_torch_that_has_changed_trains_with_a_warning() -> None:
    assert run_ranks(_unknown, 2) == [True, True]
