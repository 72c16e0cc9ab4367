"""The strategy on one CUDA device, compared with Lightning's ddp."""

from typing import Any

import pytest
import torch
from lightning_parts import QUIET, Automatic, loader, make_trainer, weights
from stepped_runs import supervised
from weights import apart

from stepwrap.collectives import end_group
from stepwrap.plugins.lightning import StepLightningModule, StepStrategy
from stepwrap.wrappers import AmpOptimWrapper
from stepwrap.wrappers.optimizers.optimizer_fit import build_optimizer

pytestmark = [pytest.mark.gpu, *(pytest.mark.filterwarnings(ignored) for ignored in QUIET)]


def _fit(strategy: Any, precision: str, module: Any = None) -> Any:
    module = Automatic() if module is None else module
    options: dict[str, Any] = {"accelerator": "gpu", "devices": 1, "precision": precision}
    # Lightning would shuffle the samples of a loader that was made before its process group.
    trainer = make_trainer(strategy, max_epochs=3, use_distributed_sampler=False, **options)
    try:
        trainer.fit(module, loader(), loader("val"))
        return trainer.strategy.lightning_module_state_dict()
    finally:
        # Lightning keeps its group until the process ends.
        end_group()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_weights_equal_lightnings_ddp(wrapper: str, precision: str) -> None:
    theirs, ours = _fit("ddp", precision), _fit(StepStrategy(wrapper), precision)
    theirs = {name: value.cpu() for name, value in theirs.items()}
    assert apart({name: value.cpu() for name, value in ours.items()}, theirs) <= 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_module_that_steps_itself(dtype: str) -> None:
    def mixed(model: Any) -> AmpOptimWrapper:
        optimizer = build_optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        return AmpOptimWrapper(optimizer, dtype=dtype)

    module = StepLightningModule(supervised(), optim_wrapper=mixed)
    before = weights(module)
    _fit("stepwrap", "32-true", module)
    assert apart(before, {name: value.cpu() for name, value in weights(module).items()}) > 1e-3
