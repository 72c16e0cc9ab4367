"""Custom training steps: checks of the loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from loop_parts import assert_identical, make_loader, make_state, weights_of

from stepwrap.loops import EpochTrainLoop, HookList, LoopState
from stepwrap.wrappers import SingleDevice, with_train_step


class Idle(SingleDevice):
    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return {"loss": self(*data, mode="loss")["loss"].detach()}


class Twice(SingleDevice):
    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        super().train_step(data, optim_wrapper)
        return super().train_step(data, optim_wrapper)


def by_hand(wrapper: Any, data: Any, optim_wrapper: Any) -> Any:
    """Train without the optimizer wrapper, which then counts no batch."""
    wrapper(*data, mode="loss")["loss"].backward()
    optim_wrapper.optimizer.step()
    return {}


ByHand = with_train_step(SingleDevice, by_hand)


class LeftOut(SingleDevice):
    """Skip every second update, as shown on the page on custom steps."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        loss = self(*data, mode="loss")["loss"]
        optim_wrapper.backward(optim_wrapper.scale_loss(loss))
        if optim_wrapper.should_update():
            if optim_wrapper.inner_count % 4:
                optim_wrapper.step()
            optim_wrapper.zero_grad()
        return {"loss": loss.detach()}


def train(wrapper: type[Any], accumulate: int, samples: int = 12) -> LoopState:
    state = make_state(accumulate=accumulate)
    state.model = wrapper(state.model.module)
    loader = make_loader(samples, num_workers=0)
    EpochTrainLoop(loader, max_epochs=1).run(state, HookList())
    return state


@pytest.mark.parametrize(("wrapper", "count"), [(Idle, 0), (Twice, 2), (ByHand, 0)])
def test_a_batch_is_counted_once(wrapper: type[Any], count: int) -> None:
    """Otherwise accumulation windows and their place after a resume would be wrong."""
    message = rf"accumulative_counts=2 .*{wrapper.__name__}.train_step counted {count}:"
    with pytest.raises(RuntimeError, match=message):
        train(wrapper, 2)


@pytest.mark.parametrize("wrapper", [Idle, Twice, ByHand])
def test_without_accumulation_a_step_may_update_as_it_likes(wrapper: type[Any]) -> None:
    assert train(wrapper, 1).iteration == 6


def test_an_update_may_be_left_out() -> None:
    state = train(LeftOut, 2, samples=8)
    assert (state.iteration, state.step) == (4, 2)
    # Batches 3 and 4 belong to the skipped update.
    usual = make_state(accumulate=2)
    for batch in list(make_loader(8))[:2]:
        usual.model.train_step(batch, usual.optim_wrapper)
    assert_identical(weights_of(state), weights_of(usual))


@pytest.mark.parametrize("value", ["good", None, {"a": 1}])
def test_logged_values_of_a_wrong_type_are_named(value: Any) -> None:
    class Wordy(SingleDevice):
        def train_step(self, data: Any, optim_wrapper: Any) -> Any:
            return {**super().train_step(data, optim_wrapper), "note": value}

    with pytest.raises(TypeError, match="must return numbers or tensors to log, got note="):
        train(Wordy, 1)


def test_members_that_an_optimizer_wrapper_lacks_are_named() -> None:
    state = make_state()
    state.optim_wrapper = SimpleNamespace(update_params=print, should_update=print)  # type: ignore[assignment]
    with pytest.raises(TypeError, match="without initialize_count_status; wrap"):
        EpochTrainLoop(make_loader(), max_epochs=1).run(state, HookList())
