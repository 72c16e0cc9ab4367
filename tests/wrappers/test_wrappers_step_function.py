"""A function as a training step is told what it does wrong."""

from typing import Any

import pytest
import torch
from step_models import batches, classifier

from stepwrap.wrappers import OptimWrapper, SingleDevice, StepDistributedDataParallel
from stepwrap.wrappers import with_train_step as stepped


def loss_of(wrapper: Any, data: Any) -> Any:
    return wrapper(*data, mode="loss")["loss"]


def usual(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
    loss = loss_of(wrapper, data)
    optim_wrapper.update_params(loss)
    return {"loss": loss, "half": 0.5}


def made(step: Any) -> tuple[Any, OptimWrapper]:
    wrapper = stepped(SingleDevice, step)(classifier())
    return wrapper, OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))


def test_what_cannot_be_logged_is_named() -> None:
    def wordy(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        return {**usual(wrapper, data, optim_wrapper), "note": "good"}

    wrapper, optim = made(wordy)
    with pytest.raises(TypeError, match="wordy must return numbers or tensors, got note='good'"):
        wrapper.train_step(batches(1)[0], optim)


def test_the_class_says_what_it_is() -> None:
    kind = stepped(StepDistributedDataParallel, usual)
    assert kind.__name__ == "StepDistributedDataParallel_with_usual"
    assert kind.__doc__ == "``StepDistributedDataParallel`` with the training step ``usual``."
