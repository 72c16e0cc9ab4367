"""Clipping, loss scaling and states of optimizers with sharded parameters."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from on_ranks import gathered, on_ranks
from sharded_models import CASES, KINDS, Readable, data, net, spread, whole, whole_gradient
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepwrap.wrappers import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from stepwrap.wrappers.layout import get_layout, is_sharded, local_part

# torch's classes, imported without their warning.
from stepwrap.wrappers.optimizers.post_local_sgd import PostLocalSGDOptimizer
from stepwrap.wrappers.optimizers.post_local_sgd import (
    TorchZeroRedundancyOptimizer as ZeroRedundancyOptimizer,
)


def _twins(kind: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    # torch's tensor-parallel layers need equal parts.
    width = 8 if "tensor" in kind else 6
    return net(dtype, width=width), spread(net(dtype, width=width), kind)


def _wrapper(model: nn.Module, kind: str, **options: Any) -> OptimWrapper:
    if kind == "sgd":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return OptimWrapper(optimizer, **options)


def _steps(model: nn.Module, wrapper: OptimWrapper, seeds: range) -> list[float]:
    norms = []
    for seed in seeds:
        wrapper.update_params(model(data(seed)).pow(2).mean())
        if wrapper.grad_norm is not None:
            norms.append(wrapper.grad_norm.item())
    return norms


def _assert_same(model: nn.Module, plain: nn.Module, tolerance: float = 1e-13) -> None:
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), other.detach(), rtol=0, atol=tolerance)


def _clipped(kind: str, clip: dict[str, Any]) -> list[float]:
    plain, model = _twins(kind)
    before = [whole(p) for p in model.parameters()]
    wrappers = [_wrapper(net, "sgd", clip_grad=clip) for net in (plain, model)]
    expected, norms = (
        _steps(net, wrapper, range(4))
        for net, wrapper in zip((plain, model), wrappers, strict=True)
    )
    assert norms == pytest.approx(expected, rel=1e-12)
    _assert_same(model, plain)
    assert not any(map(torch.equal, before, (whole(p) for p in model.parameters())))
    return norms


@pytest.mark.parametrize("norm_type", [2.0, *slow(1.0, math.inf)])
@pytest.mark.parametrize(("size", "kind"), CASES)
@on_ranks("size")
def test_clipping_by_norm_equals_one_process(size: int, kind: str, norm_type: float) -> None:
    norms = _clipped(kind, {"max_norm": 0.02, "norm_type": norm_type})
    assert min(norms) > 0.02
    assert gathered(norms) == [norms] * size


@pytest.mark.parametrize(("size", "kind"), CASES)
@on_ranks("size")
def test_clipping_by_value_equals_one_process(size: int, kind: str) -> None:
    _clipped(kind, {"type": "value", "clip_value": 0.01})


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_norm_that_is_not_finite_raises_on_all_ranks(kind: str) -> None:
    _, model = _twins(kind)
    model(data()).sum().backward()
    if dist.get_rank() == 1:
        local_part(model[0].weight.grad).fill_(math.inf)
    wrapper = _wrapper(model, "sgd", clip_grad={"max_norm": 1.0, "error_if_nonfinite": True})
    before = [local_part(p).clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="total norm of order 2.0") as caught:
        wrapper.step()
    assert all(map(torch.equal, before, map(local_part, model.parameters())))
    assert len(set(gathered(str(caught.value)))) == 1


@pytest.mark.parametrize(
    ("size", "kind", "fused", "clip"),
    [
        *((2, kind, False, clip) for kind in KINDS for clip in (False, True)),
        (4, "fsdp x tensor", False, False),
        *slow(*((2, kind, True, clip) for kind in KINDS for clip in (False, True))),
        *slow((4, "hsdp", False, False), (4, "data x tensor", False, False)),
    ],
)
@on_ranks("size")
def test_an_infinity_in_one_ranks_part_stops_all(
    size: int, kind: str, fused: bool, clip: bool
) -> None:
    """With an infinity in one rank's part no parameter changes; then training continues."""
    _, model = _twins(kind, torch.float32)
    amp = AmpOptimWrapper(
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused),
        dtype="float16",
        loss_scale={"init_scale": 64.0},
        clip_grad={"max_norm": 1.0} if clip else None,
    )
    for turn in range(2):
        before = [local_part(p).detach().clone() for p in model.parameters()]
        amp.backward(model(data(dtype=torch.float32)).pow(2).mean())
        if not turn and dist.get_rank() == 1:
            local_part(model[0].weight.grad).view(-1)[0] = math.inf
        amp.step()
        amp.zero_grad()
        same = all(map(torch.equal, before, map(local_part, model.parameters())))
        assert same == (not turn)
        assert amp.loss_scaler.get_scale() == 32.0


@pytest.mark.parametrize(("size", "kind"), CASES)
@on_ranks("size")
def test_the_loss_scale_cancels(size: int, kind: str) -> None:
    plain, model = _twins(kind)
    expected = _wrapper(plain, "adam")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapper = AmpOptimWrapper(optimizer, dtype="float16", loss_scale=128.0)
    _steps(plain, expected, range(3))
    _steps(model, wrapper, range(3))
    _assert_same(model, plain)


def _readable(state: Any) -> Any:
    if isinstance(state, Tensor) and state.ndim:
        return Readable(state)
    return {k: _readable(v) for k, v in state.items()} if isinstance(state, dict) else state


@pytest.mark.parametrize("optim", ["adam", *slow("sgd")])
@pytest.mark.parametrize(("size", "kind"), CASES)
@on_ranks("size")
def test_a_plain_state_loads_into_shards(size: int, kind: str, optim: str) -> None:
    """Training continues exactly from a plain state, and the saved state is whole again."""
    plain, model = _twins(kind)
    reference = _wrapper(plain, optim)
    _steps(plain, reference, range(2))
    # torch's load_state_dict keeps references to the tensors.
    saved = deepcopy(reference.state_dict())
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        local_part(mine).data.copy_(other[get_layout(mine).slices])
    for state in (saved, {**saved, "state": _readable(saved["state"])}):
        wrapper = _wrapper(model, optim)
        wrapper.load_state_dict(deepcopy(state))
        assert wrapper.collective_state
        assert wrapper.inner_count == 2
        again = wrapper.state_dict()
        assert again["stepwrap.optimizer"] == saved["stepwrap.optimizer"]
        for key, values in saved["state"].items():
            assert values.keys() == again["state"][key].keys()
            for name, value in values.items():
                mine = again["state"][key][name]
                assert isinstance(mine, DTensor) == (
                    get_layout(list(model.parameters())[key]).mesh is not None and value.ndim > 0
                )
                torch.testing.assert_close(whole(mine), value, rtol=0, atol=0)
    _steps(plain, reference, range(2, 4))
    _steps(model, wrapper, range(2, 4))
    _assert_same(model, plain)


@on_ranks(2)
def test_zero_redundancy_takes_and_gives_plain_states() -> None:
    plain, model = net(), net()
    reference = _wrapper(plain, "adam")
    _steps(plain, reference, range(2))
    model.load_state_dict(plain.state_dict())
    options = {"optimizer_class": torch.optim.AdamW, "lr": 0.01}
    wrapper = OptimWrapper(ZeroRedundancyOptimizer(model.parameters(), **options))
    assert wrapper.collective_state
    wrapper.load_state_dict(deepcopy(reference.state_dict()))
    _steps(plain, reference, range(2, 4))
    _steps(model, wrapper, range(2, 4))
    _assert_same(model, plain, 0)
    local_ids = {id(p) for g in wrapper.optimizer.optim.param_groups for p in g["params"]}
    assert 0 < len(local_ids) < len(list(model.parameters()))
    state, expected = wrapper.state_dict(), reference.state_dict()
    assert state["stepwrap.optimizer"] == "AdamW"
    assert len(state["param_groups"]) == len(expected["param_groups"])
    if dist.get_rank() != 0:
        assert state["state"] == {}
        return
    for key, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(value, state["state"][key][name])
    _wrapper(model, "adam").load_state_dict(state)


@on_ranks(2)
def test_zero_redundancy_reads_the_state_of_its_own_parameters() -> None:
    plain, model = net(), net()
    reference = _wrapper(plain, "adam")
    _steps(plain, reference, range(1))
    state = reference.state_dict()
    in_file = [Readable(values["exp_avg"]) for values in state["state"].values()]
    for values, tensor in zip(state["state"].values(), in_file, strict=True):
        values["exp_avg"] = tensor
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    OptimWrapper(optimizer).load_state_dict(state)
    local_ids = {id(p) for group in optimizer.optim.param_groups for p in group["params"]}
    expected = [p.numel() if id(p) in local_ids else 0 for p in model.parameters()]
    assert [saved.read for saved in in_file] == expected


@on_ranks(2)
def test_post_local_sgd_takes_and_gives_plain_states() -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    wrapper = OptimWrapper(PostLocalSGDOptimizer(inner, averager))
    _steps(model, wrapper, range(3))
    assert not wrapper.collective_state
    saved = wrapper.state_dict()
    assert saved["step"] == averager.step == 3
    plain = _wrapper(net(), "sgd")
    plain.load_state_dict(saved)
    averager.step = 7
    wrapper.load_state_dict(plain.state_dict())
    assert averager.step == 7
    wrapper.load_state_dict(saved)
    assert averager.step == 3


def test_the_implementation_is_not_loaded() -> None:
    """Fused kernels of the saved run may not be available here."""
    fused = OptimWrapper(torch.optim.AdamW(net().parameters(), fused=True))
    second = OptimWrapper(torch.optim.AdamW(net().parameters(), lr=0.5, foreach=True))
    second.load_state_dict(fused.state_dict())
    (group,) = second.optimizer.param_groups
    assert (group["lr"], group["fused"], group["foreach"]) == (1e-3, None, True)


@on_ranks(2)
def test_a_group_of_optimizers_is_sharded_if_a_member_is() -> None:
    _, model = _twins("fsdp")
    plain = net()
    group = OptimWrapperDict(a=_wrapper(model, "sgd"), b=_wrapper(plain, "sgd"))
    assert group.collective_state
    assert group.reads_parts
    assert not OptimWrapperDict(b=_wrapper(plain, "sgd")).collective_state


@on_ranks(2)
def test_gradients_of_localised_parameters() -> None:
    plain, model = _twins("tensor")
    for network in (plain, model):
        network(data()).pow(2).mean().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole_gradient(mine), other.grad, rtol=1e-12, atol=1e-15)
    assert sum(map(is_sharded, model.parameters())) == 3
