"""Optimizers that communicate between ranks: sharded state, averaged weights."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import assert_near, gathered, on_ranks, same_on_ranks
from step_models import batches, classifier, flat, mlp, sgd, train
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stepwrap.registry import OPTIMIZERS
from stepwrap.wrappers import (
    OptimWrapper,
    PostLocalSGD,
    StepDistributedDataParallel,
    ZeroRedundancyOptimizer,
)

STEPS = 10
DTYPE = torch.float64


def _train(optimizer: Any, accumulate: int = 1, **wrapper: Any) -> Tensor:
    model = StepDistributedDataParallel(classifier(DTYPE), **wrapper)
    cls, options = optimizer
    wrapped = OptimWrapper(
        cls(model.parameters(), **options), accumulate, clip_grad={"max_norm": 0.5}
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(wrapped.optimizer, 0.9)
    for batch in batches(STEPS, dtype=DTYPE, seed=dist.get_rank()):
        model.train_step(batch, wrapped)
        if wrapped.should_update():
            schedule.step()
    return flat(model)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("inner", "options"),
    [
        ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
        ({"_ref_": "torch.optim.Adam"}, {"lr": 0.01}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ],
)
@on_ranks(2)
def test_zero_equals_the_plain_optimizer(
    inner: Any, options: dict[str, Any], accumulate: int
) -> None:
    name = inner.get("_ref_") if isinstance(inner, dict) else inner
    plain = OPTIMIZERS.resolve(name) if isinstance(name, str) else name
    sharded = {"optimizer_class": inner, **options}
    weights = _train((ZeroRedundancyOptimizer, sharded), accumulate)
    assert_near(weights, _train((plain, options), accumulate), 1e-12)


@on_ranks(2)
def test_zero_shards_the_state() -> None:
    model = StepDistributedDataParallel(classifier())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), "Adam", lr=0.01)
    train(model, batches(2), OptimWrapper(optimizer))
    assert sum(gathered(len(optimizer.optim.state))) == 4


LOCAL = {"lr": 0.1, "momentum": 0.9}
HOOK = {"type": "post_localSGD", "start_localSGD_iter": 2}


def _train_plainly() -> Tensor:
    model = classifier(DTYPE)
    wrapped = DistributedDataParallel(model)
    state = PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), **LOCAL)
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    for inputs, target in batches(STEPS, dtype=DTYPE, seed=dist.get_rank()):
        wrapped(inputs, target, mode="loss")["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        averager.average_parameters(model.parameters())
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return flat(model)


@on_ranks(2)
def test_post_local_sgd_equals_torchs_pieces() -> None:
    options = {"optimizer_class": "SGD", "period": 3, "warmup_steps": 2, **LOCAL}
    weights = _train((PostLocalSGD, options), comm_hook=HOOK)
    assert_near(weights, _train_plainly(), 1e-12)
    # Weights differ some steps after the last average.
    assert not same_on_ranks(weights)


@on_ranks(2)
def test_post_local_sgd_is_an_optimizer() -> None:
    net = mlp()
    optimizer = PostLocalSGD(net.parameters(), torch.optim.SGD, period=2, lr=0.1)
    calls: list[Optimizer] = []
    optimizer.register_step_pre_hook(lambda stepped, *arguments: calls.append(stepped))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(torch.ones(1, 6)).sum()
        loss.backward()
        return loss

    loss_1, second = optimizer.step(closure), optimizer.step(closure)
    again = pickle.loads(pickle.dumps(optimizer.state_dict()))
    other = PostLocalSGD(mlp().parameters(), "SGD", period=2, lr=0.5)
    other.load_state_dict(again)
    assert second < loss_1
    assert len(calls) == 2
    assert optimizer.defaults["lr"] == other.param_groups[0]["lr"] == 0.1
    assert other.averager.step == 2
    assert isinstance(copy.deepcopy(optimizer.defaults), dict)
    assert sgd(net).get_lr() == OptimWrapper(optimizer).get_lr()


def test_wrong_options() -> None:
    parameters = list(mlp().parameters())
    with pytest.raises(TypeError, match="AdamW has no argument 'learning_rate'"):
        ZeroRedundancyOptimizer(parameters, "AdamW", learning_rate=0.1)
    with pytest.raises(TypeError, match="SGD .*'momentun'; .*you mean momentum"):
        PostLocalSGD(parameters, "SGD", period=2, momentun=0.9)
    with pytest.raises(KeyError, match="did you mean AdamW"):
        ZeroRedundancyOptimizer(parameters, "AdmW")
    with pytest.raises(TypeError, match="optimizer_class must be"):
        PostLocalSGD(parameters, 3, period=2)
    with pytest.raises(ValueError, match="period must be at least 2"):
        PostLocalSGD(parameters, "SGD", period=1, lr=0.1)
    with pytest.raises(ValueError, match="overlap_with_ddp"):
        ZeroRedundancyOptimizer(parameters, "SGD", overlap_with_ddp=True)


@pytest.mark.parametrize("cls", [ZeroRedundancyOptimizer, PostLocalSGD])
def test_registered_names(cls: type) -> None:
    assert OPTIMIZERS.get(cls.__name__) is cls
