"""Models and optimizer wrappers of mmengine, where it is installed."""

from typing import Any

import pytest
import torch
from step_models import batches, mlp, sgd
from torch import nn

from stepwrap.wrappers import SingleDevice, StepDistributedDataParallel

mmengine_model = pytest.importorskip("mmengine.model")
mmengine_optim = pytest.importorskip("mmengine.optim")


class Model(mmengine_model.BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Any, target: Any = None, mode: str = "tensor") -> Any:
        scores = self.net(inputs)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(scores, target)}
        return list(scores)


def test_its_model_and_optimizer_wrapper_run_unchanged() -> None:
    ours, theirs = SingleDevice(Model()), SingleDevice(Model())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    wrappers = sgd(ours), mmengine_optim.OptimWrapper(optimizer)
    for batch in batches(3):
        logs = [
            model.train_step(batch, wrapper)
            for model, wrapper in zip((ours, theirs), wrappers, strict=True)
        ]
        assert logs[0]["loss"].item() == logs[1]["loss"].item()
        assert not logs[0]["loss"].requires_grad
    with pytest.raises(ValueError, match="process group"):
        StepDistributedDataParallel(Model())
    assert len(ours.val_step(batches(1)[0])) == 4
