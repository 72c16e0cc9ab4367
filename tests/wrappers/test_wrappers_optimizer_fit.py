"""Optimizers of sharded parameters are correct or refused when built."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks, raises_with
from sharded_models import data, net, spread, whole
from step_models import batches, classifier, flat
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from stepwrap.wrappers import (
    OptimWrapper,
    PostLocalSGD,
    Preparation,
    StepFullyShardedDataParallel,
    SupervisedModel,
    ZeroRedundancyOptimizer,
    build_mesh,
    wrap_model,
)
from stepwrap.wrappers.layout import reshard
from stepwrap.wrappers.optimizers.optimizer_fit import build_optimizer

ALL = [
    name
    for name, optimizer_class in vars(torch.optim).items()
    if isinstance(optimizer_class, type)
    and issubclass(optimizer_class, Optimizer)
    and optimizer_class is not Optimizer
]
# These take only matrices, or a closure, or other gradients.
MATRICES = ("Muon",)
REFUSED = {
    "tensor": {"Adafactor", "LBFGS", "Muon", "SparseAdam"},
    "fsdp": {"Adafactor", "LBFGS", "Muon", "Rprop", "SparseAdam"},
}


def _parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.ndim == 2 or name not in MATRICES]


@pytest.mark.parametrize("kind", REFUSED)
@on_ranks(2)
def test_every_optimizer_of_torch_equals_plain_or_is_refused(kind: str) -> None:
    distances: dict[str, Any] = {}
    for name in ALL:
        cls = getattr(torch.optim, name)
        plain, model = net(width=8), spread(net(width=8), kind)
        try:
            mine = build_optimizer(cls, _parameters(model, name), lr=0.01)
        except ValueError as error:
            distances[name] = str(error)
            continue
        theirs = cls(_parameters(plain, name), lr=0.01)
        for seed in range(5):
            for network, optimizer in ((model, mine), (plain, theirs)):
                optimizer.zero_grad()
                network(data(seed)).pow(2).mean().backward()
                optimizer.step()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        distances[name] = max((whole(a) - b).abs().max().item() for a, b in pairs)
    refused = {name: text for name, text in distances.items() if isinstance(text, str)}
    assert refused.keys() == REFUSED[kind]
    assert all(text.startswith(name) and "AdamW" in text for name, text in refused.items())
    assert max(far for name, far in distances.items() if name not in refused) <= 1e-12
    where = "split by tensor_parallel" if kind == "tensor" else "a DTensor (fsdp)"
    assert where in refused["Adafactor"]


class _InDouble(TorchFunctionMode):
    """Replace casts to bfloat16 by casts to double, as any release of torch spells them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.Tensor.bfloat16:
            func = torch.Tensor.double
        if options.get("dtype") is torch.bfloat16:
            options["dtype"] = torch.float64
        return func(*args, **options)


def _muon(sharded: bool, arithmetic: AbstractContextManager[Any]) -> Tensor:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    if sharded:
        fully_shard(model)
    optimizer = OptimWrapper(build_optimizer(torch.optim.Muon, _parameters(model, "Muon")))
    with arithmetic:
        for seed in range(3):
            optimizer.update_params(model(data(seed)).pow(2).mean())
    return torch.cat([whole(param).flatten() for param in model.parameters()]).detach()


@on_ranks(2)
def test_muon_with_even_shards() -> None:
    """Muon computes directions in bfloat16, whose rounding is the only difference."""
    exact = _muon(False, _InDouble())
    ends = {
        "sharded, exact": _muon(True, _InDouble()),
        "sharded": _muon(True, nullcontext()),
        "whole": _muon(False, nullcontext()),
    }
    distance = {name: (end - exact).abs().max().item() for name, end in ends.items()}
    assert distance["sharded, exact"] <= 1e-12
    assert 1e-6 < distance["sharded"] <= 2 * distance["whole"]


class _Own(torch.optim.Adafactor):
    """A subclass is treated like its base class."""


@pytest.mark.parametrize("kind", ["tensor", "fsdp"])
@on_ranks(2)
def test_the_wrapper_refuses_them_too(kind: str) -> None:
    model = spread(net(width=8), kind)
    for cls, text in (
        (_Own, "_Own scales by norms of whole tensors"),
        (torch.optim.SparseAdam, "SparseAdam needs sparse gradients"),
    ):
        with pytest.raises(ValueError, match=f"^{text}.*parameter of shape"):
            OptimWrapper(cls(model.parameters(), lr=0.1))


def test_whole_parameters_work_with_every_optimizer() -> None:
    for name in ALL:
        model = net()
        OptimWrapper(build_optimizer(getattr(torch.optim, name), _parameters(model, name)))


def test_closures_are_refused_by_distributed_optimizers() -> None:
    match = "optimizer_class cannot be LBFGS, which needs a closure"
    with pytest.raises(ValueError, match=match):
        ZeroRedundancyOptimizer(net().parameters(), "LBFGS")
    with pytest.raises(ValueError, match=match):
        PostLocalSGD(net().parameters(), "LBFGS", period=2)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("tensor", "give process_group=wrapper.data_group"), ("fsdp", "is a DTensor (fsdp)")],
)
@on_ranks(2)
def test_distributed_optimizers_refuse_different_parts(kind: str, text: str) -> None:
    options: dict[str, Any] = {"lr": 0.1, "period": 2}
    (torchs,) = PostLocalSGD.__bases__
    for build in (
        lambda params: ZeroRedundancyOptimizer(params, "AdamW", lr=0.1),
        lambda params: PostLocalSGD(params, "SGD", **options),
        lambda params: PostLocalSGD(params, "SGD", process_group=dist.group.WORLD, **options),
        lambda params: OptimWrapper(
            torchs(torch.optim.SGD(params, lr=0.1), PeriodicModelAverager(2))
        ),
    ):
        with raises_with(ValueError, "parameter of shape", text):
            build(spread(net(width=8), kind).parameters())


@on_ranks(4)
def test_averages_use_equal_parts() -> None:
    """With a learning rate of 0 averaging changes nothing."""
    mesh = build_mesh({"data": 2, "tensor": 2})
    split = Preparation(tensor_parallel={"net.0": "colwise", "net.2": "rowwise"})
    supervised = SupervisedModel(net(width=8), nn.MSELoss())
    model: Any = wrap_model(None, supervised, mesh=mesh, prepare=split)
    before = [whole(param) for param in model.parameters()]
    optimizer = OptimWrapper(
        PostLocalSGD(model.parameters(), "SGD", lr=0.0, period=2, process_group=model.data_group)
    )
    for seed in range(2):
        optimizer.update_params(model(data(seed), mode="tensor").pow(2).mean())
    after = [whole(param) for param in model.parameters()]
    assert max((a - b).abs().max().item() for a, b in zip(after, before, strict=True)) <= 1e-15


@on_ranks(2)
def test_gathered_parameters_are_refused() -> None:
    """A child of the model still has parameters that the root gathered."""
    model = StepFullyShardedDataParallel(SupervisedModel(net(width=8), nn.MSELoss()))
    loss = model(data(0), mode="tensor").pow(2).mean()
    parameters = list(model.module.net[0].parameters())
    match = r"shape \(8, 5\) is a temporary unsharded view of fsdp.* reshard\(wrapper\)"
    for build in (torch.optim.SGD, partial(build_optimizer, torch.optim.SGD)):
        with pytest.raises(ValueError, match=match):
            OptimWrapper(build(parameters, lr=0.1))
    reshard(model)
    optimizer = OptimWrapper(torch.optim.SGD(model.module.net[0].parameters(), lr=0.1))
    before = [whole(param) for param in model.module.net[0].parameters()]
    optimizer.update_params(loss)
    pairs = zip(before, model.module.net[0].parameters(), strict=True)
    assert [not torch.equal(value, whole(other)) for value, other in pairs] == [True, True]


def _fused(cls: Any, *parameters: Any, **kwargs: Any) -> Any:
    optimizer = build_optimizer(cls, iter(parameters), lr=0.1, **kwargs)
    return optimizer.param_groups[0].get("fused")


def _zeros(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 2, dtype=dtype))


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_fused_by_default(cls: Any) -> None:
    assert _fused(cls, _zeros()) is True
    assert _fused(cls, {"params": iter([_zeros()])}) is True
    assert _fused(cls, ("weight", _zeros())) is True


@pytest.mark.parametrize("choice", ["fused", "foreach", "differentiable", "capturable"])
def test_the_caller_may_choose(choice: str) -> None:
    assert _fused(torch.optim.Adam, _zeros(), **{choice: False}) in (None, False)


@pytest.mark.parametrize("cls", [torch.optim.RMSprop, torch.optim.LBFGS])
def test_classes_without_one(cls: Any) -> None:
    assert not _fused(cls, _zeros())


def test_dtypes_without_one() -> None:
    weight = _zeros(torch.complex64)
    optimizer = build_optimizer(torch.optim.SGD, [_zeros(), weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight[0, 0].item() == pytest.approx(-0.1)


def test_groups_are_not_changed() -> None:
    groups = [{"params": [_zeros()]}, {"params": _zeros(), "lr": 0.5}]
    optimizer = build_optimizer(torch.optim.SGD, groups, lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert [set(group) for group in groups] == [{"params"}, {"params", "lr"}]


def test_fused_steps_equal_plain_ones() -> None:
    fused, plain = classifier(), classifier()
    fused_wrapper = OptimWrapper(build_optimizer(torch.optim.AdamW, fused.parameters(), lr=0.01))
    second = OptimWrapper(torch.optim.AdamW(plain.parameters(), lr=0.01))
    for batch in batches(5):
        fused.train_step(batch, fused_wrapper)
        plain.train_step(batch, second)
    assert torch.allclose(flat(fused), flat(plain), rtol=0, atol=1e-6)
