"""The wrappers on one CUDA device."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from step_models import batches, classifier, flat, mlp, train
from torch import nn
from weighted_models import Tagger, difference, global_batch, split, train_whole

from stepwrap.loops import (
    EpochTrainLoop,
    HookList,
    IterTrainLoop,
    LoopState,
    load_checkpoint,
    save_checkpoint,
    seed_rng,
)
from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    SingleDevice,
    wrap_model,
)
from stepwrap.wrappers.optimizers.optimizer_fit import build_optimizer

pytestmark = pytest.mark.gpu


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(torch.optim.SGD, model.parameters(), lr=0.1)


def test_float32_equals_the_cpu() -> None:
    model = wrap_model(None, classifier(), device="cuda")
    assert type(model) is SingleDevice
    wrapper = OptimWrapper(_optimizer(model), clip_grad={"max_norm": 0.5})
    assert wrapper.optimizer.param_groups[0]["fused"] is True
    plain = mlp()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for inputs, target in batches(5):
        logs = model.train_step([inputs.pin_memory(), target], wrapper)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), target).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        assert logs["loss"].is_cuda
        assert wrapper.grad_norm.is_cuda
    assert torch.allclose(flat(model).cpu(), flat(plain), rtol=0, atol=1e-5)


@pytest.mark.parametrize("counts", [1, 2])
def test_a_window_of_weight_0_gives_gradients_of_0(counts: int) -> None:
    model = wrap_model(None, classifier(), device="cuda")
    wrapper = OptimWrapper(
        _optimizer(model),
        accumulative_counts=counts,
        loss_weight=lambda batch: batch[0].new_zeros(()),
    )
    before = flat(model).clone()
    train(model, batches(counts), wrapper)
    assert wrapper.last_weight == 0
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize(
    ("dtype", "scaled"), [("bfloat16", False), ("float16", True), (None, True)]
)
def test_mixed_precision(dtype: str | None, scaled: bool) -> None:
    model = wrap_model(None, classifier(), device="cuda")
    amp = AmpOptimWrapper(
        _optimizer(model), clip_grad={"max_norm": 1.0}, dtype=dtype, loss_scale={"init_scale": 64.0}
    )
    assert amp.loss_scaler.is_enabled() is scaled
    before = flat(model)
    with amp.optim_context(model):
        output = model.module.net[0](torch.ones(1, 6, device="cuda"))
        assert output.dtype == amp.cast_dtype
    model.train_step(batches(1)[0], amp)
    changed = flat(model)
    assert not torch.equal(changed, before)
    assert amp.grad_norm.isfinite()
    if scaled:
        amp.update_params(model.module.net[0].weight.sum() * float("inf"))
        assert torch.equal(flat(model), changed)
        assert amp.loss_scaler.get_scale() == 32.0


def test_a_step_without_a_host_sync() -> None:
    model = wrap_model(None, classifier(), device="cuda")
    wrapper = OptimWrapper(_optimizer(model), clip_grad={"max_norm": 0.5})
    data: list[Any] = [[tensor.cuda() for tensor in batch] for batch in batches(3)]
    model.train_step(data[0], wrapper)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, data[1:], wrapper)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ddp_over_nccl(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        single = SingleDevice(classifier().cuda())
        ddp: Any = wrap_model("ddp", classifier().cuda())
        assert ddp.device_ids == [device.index]
        for batch in batches(3):
            for model in (single, ddp):
                model.train_step(copy.copy(batch), OptimWrapper(_optimizer(model)))
        assert torch.allclose(flat(single), flat(ddp), rtol=0, atol=1e-6)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("counts", [1, 4])
def test_loss_weights_stay_on_the_device(counts: int) -> None:
    model = wrap_model(None, Tagger(dtype=torch.float64), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    wrapper = OptimWrapper(optimizer, counts, loss_weight="tokens")
    for update in range(3):
        train(model, split(global_batch(update), counts, seed=update), wrapper)
    assert wrapper.last_weight.is_cuda
    assert difference(model.module.state_dict(), train_whole("tokens", 3)[0]) <= 1e-12
    nothing = global_batch(3)
    nothing["labels"][:] = -100
    train(model, split(nothing, counts, seed=3), wrapper)
    assert flat(model).isfinite().all()


def test_a_batch_without_tokens_is_recorded(tmp_path: Path) -> None:
    """Its weight is 0; the mean of the losses is that of the other batches."""
    batches = [global_batch(number) for number in range(3)]
    batches[1]["labels"][:] = -100

    def make(device: str) -> LoopState:
        seed_rng(0)
        model = SingleDevice(Tagger(dtype=torch.float64).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return LoopState(model=model, optim_wrapper=OptimWrapper(optimizer, loss_weight="tokens"))

    def get_mean(state: LoopState) -> float:
        EpochTrainLoop(batches, max_epochs=1).run(state, HookList([]))
        return state.logs.means()["loss"].item()

    begun = make("cpu")
    IterTrainLoop(batches, max_steps=2).run(begun, HookList([]))
    path = save_checkpoint(tmp_path / "checkpoint", begun)
    expected = get_mean(make("cpu"))
    assert get_mean(make("cuda")) == pytest.approx(expected, rel=1e-12)
    # An interval that began on the CPU continues on the device.
    resumed = make("cuda")
    load_checkpoint(path).restore(resumed)
    assert get_mean(resumed) == pytest.approx(expected, rel=1e-12)
