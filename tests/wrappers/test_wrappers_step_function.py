"""A function as a training step is told what it does wrong."""

from typing import Any

import pytest
import torch
from step_models import batches, classifier, flat

from stepwrap.wrappers import OptimWrapper, SingleDevice, StepDistributedDataParallel
from stepwrap.wrappers import with_train_step as stepped


def loss_of(wrapper: Any, data: Any) -> Any:
    return wrapper(*data, mode="loss")["loss"]


def usual(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
    loss = loss_of(wrapper, data)
    optim_wrapper.update_params(loss)
    return {"loss": loss, "half": 0.5}


def left_out(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
    """Every second update is left out, as the page says."""
    loss = loss_of(wrapper, data)
    optim_wrapper.backward(optim_wrapper.scale_loss(loss))
    if optim_wrapper.should_update():
        if optim_wrapper.inner_count % 4:
            optim_wrapper.step()
        optim_wrapper.zero_grad()
    return {"loss": loss}


def idle(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
    return {"loss": loss_of(wrapper, data)}


def twice(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
    usual(wrapper, data, optim_wrapper)
    return usual(wrapper, data, optim_wrapper)


def beside(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
    loss_of(wrapper, data).backward()
    optim_wrapper.step()
    return {}


def made(step: Any, every: int) -> tuple[Any, OptimWrapper]:
    wrapper = stepped(SingleDevice, step)(classifier())
    return wrapper, OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1), every)


@pytest.mark.parametrize(("step", "count"), [(idle, 0), (twice, 2), (beside, 0)])
def test_a_batch_is_counted_once(step: Any, count: int) -> None:
    """Else a window of accumulation would not be one, and its place in a resume not known."""
    wrapper, optim = made(step, 2)
    told = rf"{step.__name__} counted {count} micro-batches.*accumulative_counts=2 does not allow"
    with pytest.raises(RuntimeError, match=told):
        wrapper.train_step(batches(1)[0], optim)


@pytest.mark.parametrize("step", [idle, twice, beside])
def test_without_accumulation_a_step_may_update_as_it_likes(step: Any) -> None:
    wrapper, optim = made(step, 1)
    wrapper.train_step(batches(1)[0], optim)


def test_an_update_may_be_left_out() -> None:
    wrapper, optim = made(left_out, 2)
    plain, plain_optim = made(usual, 2)
    data = batches(6)
    for batch in data:
        wrapper.train_step(batch, optim)
    for batch in (*data[:2], *data[4:]):
        plain.train_step(batch, plain_optim)
    assert torch.equal(flat(wrapper), flat(plain))


def test_what_cannot_be_logged_is_named() -> None:
    def wordy(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        return {**usual(wrapper, data, optim_wrapper), "note": "good"}

    wrapper, optim = made(wordy, 1)
    with pytest.raises(TypeError, match="wordy must return numbers or tensors, got note='good'"):
        wrapper.train_step(batches(1)[0], optim)


def test_the_class_says_what_it_is() -> None:
    kind = stepped(StepDistributedDataParallel, usual)
    assert kind.__name__ == "StepDistributedDataParallel_with_usual"
    assert kind.__doc__ == "``StepDistributedDataParallel`` with the training step ``usual``."
