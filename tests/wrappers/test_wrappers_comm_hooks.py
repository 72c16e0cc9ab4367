"""Communication hooks, against torch's own and against arithmetic."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from step_models import batches, classifier, flat, mlp, sgd
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
    """Twice the mean."""

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
    optim = sgd(model)
    for batch in batches(STEPS, seed=dist.get_rank()):
        model.train_step(batch, optim)
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
def test_hooks_by_arithmetic(hook: Any, cast: torch.dtype, factor: float, bound: float) -> None:
    expected = _plain(cast, factor)
    exact = _plain()
    for weights in run_ranks(_train, 2, hook):
        assert (weights - expected).abs().max().item() <= bound
        if cast is not torch.float32:
            assert not torch.equal(weights, exact)


def default_group(state: tuple[str, float], bucket: GradBucket) -> Future[Tensor]:
    return scaled_mean((dist.group.WORLD, state[1]), bucket)


def _power() -> tuple[Tensor, Tensor]:
    torch_net = classifier()
    wrapped = DistributedDataParallel(torch_net)
    state = powerSGD_hook.PowerSGDState(process_group=None, **POWER)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(torch_net.parameters(), lr=0.1)
    for inputs, target in batches(STEPS, seed=dist.get_rank()):
        wrapped(inputs, target, mode="loss")["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return _train({"type": "powerSGD", **POWER}), flat(torch_net)


def test_power_sgd_is_torchs() -> None:
    for ours, theirs in run_ranks(_power, 2):
        assert torch.equal(ours, theirs)
        assert not torch.allclose(ours, _plain(), atol=1e-6)


def _copies() -> list[bool]:
    model = StepDistributedDataParallel(classifier(), comm_hook="bf16_compress")
    group = dist.group.WORLD
    results = []
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.process_group is group
        optim = sgd(again)
        for batch in batches(STEPS, seed=dist.get_rank()):
            again.train_step(batch, optim)
        results.append(torch.allclose(flat(again), _plain(torch.bfloat16), atol=1e-6))
    return results


def test_copies_keep_their_hook() -> None:
    assert run_ranks(_copies, 2) == [[True, True]] * 2


def _subgroups() -> tuple[Tensor, str]:
    options = {"type": "post_localSGD", "start_localSGD_iter": 1}
    model = StepDistributedDataParallel(classifier(), comm_hook={**options, "subgroup_size": 2})
    optim = sgd(model)
    seen = []
    for batch in batches(2, seed=dist.get_rank()):
        model.train_step(batch, optim)
        everyone = [torch.empty_like(flat(model)) for _ in range(4)]
        dist.all_gather(everyone, flat(model))
        seen.append([torch.equal(everyone[0], other) for other in everyone])
    with pytest.raises(ValueError, match="does not divide") as refused:
        StepDistributedDataParallel(classifier(), comm_hook={**options, "subgroup_size": 3})
    return torch.tensor(seen), str(refused.value)


def test_subgroups_of_local_sgd() -> None:
    for seen, refused in run_ranks(_subgroups, 4):
        assert seen.tolist() == [[True] * 4, [True, True, False, False]]
        assert "subgroup_size=3 does not divide the 4 ranks" in refused


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
