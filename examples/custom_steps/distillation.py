"""A small network that learns from a trained one (Hinton et al. 2015).

First train the teacher: stepwrap train configs/digits_single.yaml
Then train the student: stepwrap train examples/custom_steps/distillation.yaml
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from stepwrap.loops import find_checkpoint, load_checkpoint
from stepwrap.registry import MODEL_WRAPPERS, MODELS
from stepwrap.wrappers import StepDistributedDataParallel, SupervisedModel, parse_losses


@MODELS.register_module()
class Student(SupervisedModel):
    """``net`` is trained and evaluated; ``teacher`` is frozen, with the best weights of ``run``."""

    def __init__(self, net: nn.Module, loss: nn.Module, teacher: nn.Module, run: str) -> None:
        super().__init__(net, loss)
        self.teacher = teacher.requires_grad_(False)
        path = find_checkpoint(run, "best")
        if path is None:
            raise FileNotFoundError(f"{run} has no best checkpoint: train the teacher first")
        load_checkpoint(path).load_model(teacher)

    def train(self, mode: bool = True) -> "Student":
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, *inputs: Any, mode: str = "tensor", **named: Any) -> Any:
        if mode != "both":
            return super().forward(*inputs, mode=mode, **named)
        with torch.no_grad():
            taught = self.teacher(*inputs, **named)
        return super().forward(*inputs, **named), taught


@MODEL_WRAPPERS.register_module()
class DistillingDDP(StepDistributedDataParallel):
    """Trains on the teacher's scores at a temperature of 4, and on the labels."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        images, labels = self.module.data_preprocessor(data, training=True)
        with optim_wrapper.optim_context(self):
            scores, taught = self(images, mode="both")  # through self: the model may be sharded
            soft, aim = log_softmax(scores / 4, 1), log_softmax(taught / 4, 1)
            losses = {
                "loss_soft": 16 * kl_div(soft, aim, log_target=True, reduction="batchmean"),
                "loss_hard": 0.3 * self.module.loss(scores, labels),
            }
        total, logs = parse_losses(losses)
        optim_wrapper.update_params(total)
        return logs
