"""Custom training steps: checks of the loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from listeners import Records
from loop_parts import assert_identical, get_weights, make_loader, make_state

from stepwrap.loops import (
    EpochTrainLoop,
    HookList,
    LoopState,
    ValLoop,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    SingleDevice,
    with_train_step,
)


class Idle(SingleDevice):
    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return {"loss": self(*data, mode="loss")["loss"].detach()}


class Twice(SingleDevice):
    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        super().train_step(data, optim_wrapper)
        return super().train_step(data, optim_wrapper)


def train_plainly(wrapper: Any, data: Any, optim_wrapper: Any) -> Any:
    """Train without the optimizer wrapper, which then counts no batch."""
    wrapper(*data, mode="loss")["loss"].backward()
    optim_wrapper.optimizer.step()
    return {}


ByHand = with_train_step(SingleDevice, train_plainly)


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
    assert_identical(get_weights(state), get_weights(usual))


@pytest.mark.parametrize("value", ["good", None, {"a": 1}])
def test_logged_values_of_a_wrong_type_are_named(value: Any) -> None:
    class Wordy(SingleDevice):
        def train_step(self, data: Any, optim_wrapper: Any) -> Any:
            return {**super().train_step(data, optim_wrapper), "note": value}

    with pytest.raises(TypeError, match="numbers or tensors .*got note="):
        train(Wordy, 1)


def test_members_that_an_optimizer_wrapper_lacks_are_named() -> None:
    state = make_state()
    state.optim_wrapper = SimpleNamespace(update_params=print, should_update=print)  # type: ignore[assignment]
    with pytest.raises(TypeError, match="without initialize_count_status; wrap"):
        EpochTrainLoop(make_loader(), max_epochs=1).run(state, HookList())


def test_gradients_from_before_the_training_do_not_enter_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    states = [make_state(accumulate=2) for _ in range(2)]
    for parameter in states[0].model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for state in states:
        EpochTrainLoop(make_loader(), max_epochs=1).run(state, HookList([]))
    assert_identical(*map(get_weights, states))
    assert "4 parameters (module.net.0.weight, " in caplog.text
    assert "gradients before the first batch" in caplog.text


class Attacked(SingleDevice):
    """Evaluates inputs that gradients have changed."""

    def val_step(self, data: Any) -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            inputs, target = (tensor.clone() for tensor in data)
            self.module(inputs.requires_grad_(), target, mode="loss")["loss"].backward()
        return super().val_step([inputs + inputs.grad, target])


def test_gradients_of_an_evaluation_do_not_enter_the_training() -> None:
    states = [make_state(accumulate=5) for _ in range(2)]
    states[0].model = Attacked(states[0].model.module)
    for state in states:
        # A window continues in the next epoch, so that validations interrupt it.
        val_loop = ValLoop(make_loader())
        EpochTrainLoop(make_loader(), max_epochs=4, val_loop=val_loop).run(state, HookList([]))
    assert_identical(*map(get_weights, states))


class Players(torch.nn.Module):
    """A GAN that leaves gradients of its generator's step in the discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, inputs: Any, mode: str = "predict") -> Any:
        return self.judge(self.maker(inputs))

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        (inputs, _), logs = data, {}
        for name, sign in (("judge", 1.0), ("maker", -1.0)):
            fake = self.maker(inputs)
            fake = fake.detach() if name == "judge" else fake
            loss = sign * (self.judge(fake) - self.judge(inputs)).mean()
            optim_wrapper[name].update_params(loss)
            logs[f"loss_{name}"] = loss.detach()
        return logs


def test_gradients_of_another_optimizer_are_not_saved(tmp_path: Any) -> None:
    def make() -> LoopState:
        model = Players()
        members = {
            name: OptimWrapper(torch.optim.Adam(getattr(model, name).parameters(), lr=0.1))
            for name in ("maker", "judge")
        }
        return LoopState(SingleDevice(model), OptimWrapperDict(**members))

    def train(state: LoopState, epochs: int) -> dict[str, Any]:
        EpochTrainLoop(make_loader(), max_epochs=epochs).run(state, HookList([]))
        return get_weights(state)

    state = make()
    train(state, 1)
    path = save_checkpoint(tmp_path, state)
    assert load_checkpoint(path).read("rank_00000")["gradients"] == {}
    expected = train(state, 3)
    state = make()
    load_checkpoint(path).restore(state)
    assert_identical(train(state, 3), expected)


@pytest.mark.parametrize("kind", [OptimWrapper, AmpOptimWrapper])
def test_updates_without_gradients_are_logged(kind: Any) -> None:
    class Rarely(Players):
        def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Any]:
            with optim_wrapper["maker"].optim_context(self.maker):
                loss = self.maker(data[0]).float().square().mean()
            optim_wrapper["maker"].update_params(loss)
            # Only the first of three batches trains the judge.
            used = self.judge if data[0][0, 0] < 2 else torch.nn.Linear(4, 1)
            with optim_wrapper["judge"].optim_context(self.judge):
                loss = used(data[0]).float().square().mean()
            optim_wrapper["judge"].update_params(loss)
            return {"loss": loss.detach()}

    model = Rarely()
    options = {"dtype": "float16"} if kind is AmpOptimWrapper else {}
    members = {
        name: kind(torch.optim.SGD(getattr(model, name).parameters(), lr=0.1), **options)
        for name in ("maker", "judge")
    }
    records = Records()
    state = LoopState(SingleDevice(model), OptimWrapperDict(**members))
    loader = make_loader(6, shuffle=False)
    EpochTrainLoop(loader, max_epochs=2, log_every_steps=3).run(state, HookList([records]))
    name = "updates_without_gradients"
    assert [record.get(f"{name}/judge") for record in records.records] == [2.0, 2.0]
    assert not any(f"{name}/maker" in record for record in records.records)
