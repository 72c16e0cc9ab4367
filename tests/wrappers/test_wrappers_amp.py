"""Mixed precision on the CPU."""

import inspect
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from step_models import batches, classifier, flat
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    SingleDevice,
    SupervisedModel,
    wrap_model,
)
from stepwrap.wrappers.layout import local_part
from stepwrap.wrappers.optimizers.optimizer_fit import build_optimizer


def _amp(model: nn.Module, *, fused: bool = False, lr: float = 0.1, **kwargs: Any) -> Any:
    optimizer = build_optimizer(torch.optim.SGD, model.parameters(), lr=lr, fused=fused)
    return AmpOptimWrapper(optimizer, **kwargs)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, None])
def test_bfloat16(dtype: Any) -> None:
    model = classifier()
    amp = _amp(model, dtype=dtype)
    before = flat(model)
    with amp.optim_context(model):
        assert model.net[0](torch.ones(1, 6)).dtype == torch.bfloat16
    assert model.net[0](torch.ones(1, 6)).dtype == torch.float32
    SingleDevice(model).train_step(batches(1)[0], amp)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not torch.equal(flat(model), before)
    assert not amp.loss_scaler.is_enabled()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, {"max_norm": 1.0}])
def test_an_infinite_loss_skips_the_step(fused: bool, clip: dict[str, float] | None) -> None:
    model = classifier()
    amp = _amp(model, dtype="float16", clip_grad=clip, fused=fused, loss_scale={"init_scale": 64.0})
    before = flat(model)
    amp.update_params(model.net[0].weight.sum() * float("inf"))
    assert torch.equal(flat(model), before)
    assert amp.loss_scaler.get_scale() == 32.0
    SingleDevice(model).train_step(batches(1)[0], amp)
    assert not torch.equal(flat(model), before)
    assert flat(model).isfinite().all()


@pytest.mark.parametrize("clip", [None, {"max_norm": 1.0}])
def test_momentum_begins_after_a_skipped_first_update(clip: Any) -> None:
    """Otherwise torch's fused implementation uses uninitialised momentum."""
    model = classifier()
    optimizer = build_optimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
    assert optimizer.param_groups[0]["fused"]
    amp = AmpOptimWrapper(optimizer, dtype="float16", clip_grad=clip)
    amp.update_params(flat_sum(model) * float("inf"))
    assert not optimizer.state
    amp.update_params(flat_sum(model))
    buffers = [optimizer.state[param]["momentum_buffer"] for param in model.parameters()]
    assert len({value.item() for buffer in buffers for value in buffer.flatten()}) == 1
    assert buffers[0].isfinite().all()


def flat_sum(model: nn.Module) -> torch.Tensor:
    return sum(param.sum() for param in model.parameters())


def test_scaled_steps_equal_plain_ones() -> None:
    """The scale is a power of two and cancels; the forward runs in float32 here."""
    clip = {"max_norm": 0.05}
    scaled, plain = classifier(), classifier()
    amp = _amp(scaled, dtype="float16", clip_grad=clip, accumulative_counts=2, loss_scale=1024)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    wrapper = OptimWrapper(optimizer, accumulative_counts=2, clip_grad=clip)
    for batch in batches(6):
        for model, wrap in ((scaled, amp), (plain, wrapper)):
            wrap.update_params(model(*batch, mode="loss")["loss"])
    assert torch.allclose(flat(scaled), flat(plain), rtol=0, atol=1e-6)
    assert torch.allclose(amp.grad_norm, wrapper.grad_norm, rtol=1e-5)
    assert amp.loss_scaler.get_scale() == 1024


def test_a_fixed_scale_comes_back_after_an_overflow() -> None:
    model = classifier()
    amp = _amp(model, dtype="float16", loss_scale=8.0)
    amp.update_params(model.net[0].weight.sum() * float("inf"))
    assert amp.loss_scaler.get_scale() == 8.0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_types_switch_autocast_off(dtype: str) -> None:
    model = classifier()
    with _amp(model, dtype=dtype).optim_context(model):
        assert model.net[0](torch.ones(1, 6)).dtype == torch.float32


def test_no_sync_and_autocast_together() -> None:
    events: list[str] = []

    class Engine(nn.Linear):
        def no_sync(self) -> Any:
            events.append("no_sync")
            return torch.autograd.profiler.record_function("no_sync")

    model = Engine(2, 2)
    amp = _amp(model, dtype="bfloat16", accumulative_counts=2)
    with amp.optim_context(model):
        assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    assert events == ["no_sync"]


def test_state_holds_the_scale() -> None:
    model = classifier()
    amp = _amp(model, dtype="float16", loss_scale={"init_scale": 64.0})
    amp.update_params(model.net[0].weight.sum() * float("inf"))
    state = amp.state_dict()
    again = _amp(model, dtype="float16")
    again.load_state_dict(state)
    assert again.loss_scaler.get_scale() == 32.0
    assert again.inner_count == 1
    assert "loss_scaler" in state
    without = _amp(model, dtype="bfloat16")
    without.load_state_dict(state)
    again.load_state_dict(without.state_dict())
    assert again.loss_scaler.get_scale() == 32.0


def test_either_order_of_arguments() -> None:
    """Our order of arguments and the one that mmengine documents both work."""
    optimizer = torch.optim.SGD(classifier().parameters(), lr=0.1)
    ours = AmpOptimWrapper(optimizer, 2, {"max_norm": 1.0}, loss_scale=8.0, dtype="float16")
    theirs = AmpOptimWrapper(
        8.0, "float16", optimizer=optimizer, accumulative_counts=2, clip_grad={"max_norm": 1.0}
    )
    assert repr(ours) == repr(theirs)
    assert ours.state_dict() == theirs.state_dict()
    assert ours.cast_dtype is theirs.cast_dtype is torch.float16
    sharded = AmpOptimWrapper("dynamic", torch.float16, True, optimizer=optimizer)
    assert isinstance(sharded.loss_scaler, ShardedGradScaler)
    with pytest.raises(TypeError, match="'optimizer'"):
        AmpOptimWrapper("dynamic")
    with pytest.raises(TypeError, match="'loss_scale'"):
        AmpOptimWrapper(8.0, optimizer=optimizer, loss_scale=8.0)
    assert "accumulative_counts" in inspect.signature(AmpOptimWrapper).parameters


def test_sharded_scaler() -> None:
    model = classifier()
    amp = _amp(model, dtype="float16", use_fsdp=True)
    assert isinstance(amp.loss_scaler, ShardedGradScaler)


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(3)
def test_an_update_is_skipped_if_all_ranks_overflow(fused: bool) -> None:
    torch.manual_seed(0)
    wrapper = wrap_model("fsdp", SupervisedModel(nn.Linear(2, 2), nn.MSELoss()))
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=0.1, fused=fused)
    amp = AmpOptimWrapper(optimizer, dtype="float16", loss_scale={"init_scale": 1024.0})
    inputs, targets = torch.randn(4, 2), torch.randn(4, 2)
    wrapper.train_step((inputs, targets), amp)
    before = [local_part(param).clone() for param in wrapper.parameters()]
    wrapper.train_step((inputs, targets * 1e5), amp)
    for param, weights in zip(wrapper.parameters(), before, strict=True):
        assert torch.equal(local_part(param), weights)
    wrapper.train_step((inputs, targets), amp)
    assert all(local_part(param).isfinite().all() for param in wrapper.parameters())


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"loss_scale": "static"}, TypeError, "^loss_scale must be of type float, dict, or"),
        ({"loss_scale": True}, TypeError, "^loss_scale must be of type float, dict, or"),
        ({"loss_scale": {"init": 1.0}}, TypeError, "loss_scale has no argument 'init'"),
        ({"dtype": "half"}, ValueError, "^dtype should be any of .'float16'"),
        ({"dtype": torch.int8}, ValueError, "got torch.int8"),
    ],
)
def test_wrong_settings(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _amp(classifier(), **kwargs)
