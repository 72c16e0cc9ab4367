"""Communication hooks, against torch's own and against arithmetic."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import assert_near, gathered, on_ranks
from step_models import batches, classifier, flat, mlp, train
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from stepwrap.registry import COMM_HOOKS
from stepwrap.wrappers import CommHook, StepDistributedDataParallel

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
    """Return one process's result, its gradients rounded as a compressing hook does."""
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
    seen = []
    for batch in batches(2, seed=dist.get_rank()):
        train(model, [batch])
        first, *others = gathered(flat(model))
        seen.append([torch.equal(first, other) for other in others])
    assert seen == [[True] * 3, [True, False, False]]
    with pytest.raises(ValueError, match="subgroup_size=3 does not divide the 4 ranks"):
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
