"""The order of calls in a step, and the wrapper for one device."""

import copy
import pickle
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from step_models import (
    HalfUsed,
    OwnStep,
    PlainModel,
    batches,
    classifier,
    flat,
    mlp,
    sgd,
    train_plainly,
)
from torch import Tensor, nn

from stepwrap.wrappers import (
    AmpOptimWrapper,
    BaseModel,
    OptimWrapper,
    Preparation,
    SingleDevice,
    StepDataParallel,
    StepDistributedDataParallel,
    wrap_model,
)
from stepwrap.wrappers import with_train_step as stepped


class Recording(BaseModel):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls
        self.net = mlp()

        def preprocess(data: Any, training: bool) -> Any:
            calls.append(("preprocess", training))
            return data

        self.data_preprocessor.forward = preprocess

    def forward(self, inputs: Tensor, target: Tensor, mode: str) -> dict[str, Tensor]:
        self.calls.append(("forward", mode))
        return {"loss": nn.functional.cross_entropy(self.net(inputs), target)}

    def parse_losses(self, losses: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls.append("parse_losses")
        losses["loss"].register_hook(lambda _: self.calls.append("backward"))
        return losses["loss"], dict(losses)


class RecordingSGD(torch.optim.SGD):
    calls: list[Any]

    def step(self, closure: Any = None) -> None:
        self.calls.append("step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls.append("zero_grad")


class RecordingWrapper(OptimWrapper):
    @contextmanager
    def optim_context(self, model: nn.Module) -> Any:
        self.optimizer.calls.append("enter")
        yield
        self.optimizer.calls.append("leave")


ORDER = [
    "enter",
    ("preprocess", True),
    ("forward", "loss"),
    "leave",
    "parse_losses",
    "backward",
    "step",
    "zero_grad",
]


@pytest.mark.parametrize("wrap", [SingleDevice, lambda model: model])
def test_order_of_a_step(wrap: Any) -> None:
    calls: list[Any] = []
    model = wrap(Recording(calls))
    optimizer = RecordingSGD(model.parameters(), lr=0.1)
    optimizer.calls = calls
    model.train_step(batches(1)[0], RecordingWrapper(optimizer))
    assert calls == ORDER


@pytest.mark.parametrize("wrap", [SingleDevice, lambda model: model])
def test_equals_a_plain_loop(wrap: Any) -> None:
    model, plain = wrap(classifier()), mlp()
    optim = sgd(model)
    logs = [model.train_step(batch, optim)["loss"] for batch in batches(5)]
    assert [loss.item() for loss in logs] == train_plainly(plain, batches(5))
    assert not any(loss.requires_grad for loss in logs)
    assert torch.equal(flat(model), flat(plain))


def test_a_model_with_nothing_but_forward() -> None:
    model = SingleDevice(PlainModel())
    inputs, target = batches(1)[0]
    before = flat(model)
    logs = model.train_step({"inputs": inputs, "target": target}, sgd(model))
    assert not logs["loss"].requires_grad
    assert not torch.equal(flat(model), before)
    assert len(model.val_step([inputs])) == 4
    assert torch.equal(torch.stack(model.test_step([inputs])), model.module.net(inputs))


def test_a_preprocessor_may_be_a_method() -> None:
    class Shifted(PlainModel):
        def data_preprocessor(self, data: Any, training: bool) -> Any:
            return [data[0] + 1, *data[1:]]

    model = SingleDevice(Shifted())
    inputs, target = batches(1)[0]
    expected = model.module(inputs + 1, target, mode="loss")["loss"]
    assert torch.equal(model.train_step([inputs, target], sgd(model))["loss"], expected)


def test_logs_of_a_custom_parse_losses_are_detached() -> None:
    model = SingleDevice(Recording([]))
    logs = model.train_step(batches(1)[0], sgd(model))
    assert not logs["loss"].requires_grad


def test_a_train_step_of_the_model_is_used() -> None:
    model = SingleDevice(OwnStep())
    assert set(model.train_step(batches(1)[0], sgd(model))) == {"doubled"}
    with pytest.raises(ValueError, match=r"but OwnStep defines train_step"):
        SingleDevice(OwnStep(), detect_anomalous_params=True)


def test_a_subclass_may_step_otherwise() -> None:
    class Twice(SingleDevice):
        def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
            super().train_step(data, optim_wrapper)
            return super().train_step(data, optim_wrapper)

    model = Twice(classifier())
    wrapper = sgd(model)
    model.train_step(batches(1)[0], wrapper)
    assert wrapper.inner_count == 2


def test_an_overridden_forward_is_used() -> None:
    class Louder(SingleDevice):
        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return {name: 3 * loss for name, loss in super().forward(*inputs, **kwargs).items()}

    plain, louder = SingleDevice(classifier()), Louder(classifier())
    batch = batches(1)[0]
    once, thrice = (model.train_step(batch, sgd(model)) for model in (plain, louder))
    assert torch.equal(thrice["loss"], 3 * once["loss"])


@pytest.mark.parametrize("step", ["train_step", "val_step"])
def test_a_network_without_losses(step: str) -> None:
    model = SingleDevice(mlp())
    extra = [sgd(model)] if step == "train_step" else []
    with pytest.raises(TypeError, match=r"Sequential\.forward has no argument 'mode'.*Supervised"):
        getattr(model, step)(batches(1)[0][:1], *extra)


def test_errors_of_the_model_come_through() -> None:
    class Broken(PlainModel):
        def forward(self, *args: Any, mode: str) -> Any:
            raise TypeError("my own mistake")

    model = SingleDevice(Broken())
    with pytest.raises(TypeError, match="my own mistake"):
        model.train_step(batches(1)[0], sgd(model))


def test_copies_are_independent() -> None:
    model = SingleDevice(classifier())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again.train_step(batches(1)[0], sgd(again))
        assert not torch.equal(flat(again), flat(model))
        assert again.module.data_preprocessor is not model.module.data_preprocessor


def test_state_is_under_the_users_names() -> None:
    assert set(SingleDevice(HalfUsed()).module.state_dict()) == {
        "used.weight",
        "used.bias",
        "spare.weight",
        "spare.bias",
    }


def usual(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
    loss = wrapper(*data, mode="loss")["loss"]
    optim_wrapper.update_params(loss)
    return {"loss": loss, "half": 0.5}


def made(step: Any) -> tuple[Any, OptimWrapper]:
    wrapper = stepped(SingleDevice, step)(classifier())
    return wrapper, OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))


def test_logs_that_are_not_numbers_are_refused() -> None:
    def wordy(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        return {**usual(wrapper, data, optim_wrapper), "note": "good"}

    wrapper, optim = made(wordy)
    with pytest.raises(TypeError, match="wordy .*numbers or tensors, .*note='good'"):
        wrapper.train_step(batches(1)[0], optim)


def test_name_and_docstring_of_the_class() -> None:
    kind = stepped(StepDistributedDataParallel, usual)
    assert kind.__name__ == "StepDistributedDataParallel_with_usual"
    assert kind.__doc__ == "``StepDistributedDataParallel`` with the training step ``usual``."


def step_function(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
    with optim_wrapper.optim_context(wrapper):
        loss = wrapper(*data, mode="loss")["loss"]
    optim_wrapper.update_params(loss)
    return {"loss": loss}


class ByName(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        optim_wrapper["net"].update_params(self.net(data[0]).sum())
        return {}


@pytest.mark.parametrize(
    "make",
    [
        classifier,
        lambda: SingleDevice(classifier()),
        lambda: SingleDevice(ByName()),
        lambda: stepped(SingleDevice, step_function)(classifier()),
        lambda: StepDataParallel(classifier()),
        lambda: wrap_model(SingleDevice, classifier(), prepare=Preparation(compile={"step": True})),
    ],
)
def test_an_optimizer_is_no_optimizer_wrapper(make: Any) -> None:
    model, (batch,) = make(), batches(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"got .*type SGD; .*OptimWrapper\(optimizer\)"):
        model.train_step(batch, optimizer)
    with pytest.raises(TypeError, match=r"got .*type list; .*OptimWrapperDict\("):
        model.train_step(batch, [optimizer])
    with pytest.raises(TypeError, match="got .*type NoneType"):
        model.train_step(batch, None)
    with pytest.raises(TypeError, match="type list; (exchange|name several)"):
        model.train_step(OptimWrapper(optimizer), batch)


def test_an_error_of_the_step_itself_is_kept() -> None:
    def broken(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return data.missing  # type: ignore[no-any-return]

    wrapper: Any = stepped(SingleDevice, broken)(classifier())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for optim in (optimizer, OptimWrapper(optimizer)):
        with pytest.raises(AttributeError, match="'list' object .*no attribute 'missing'"):
            wrapper.train_step(batches(1)[0], optim)


@pytest.mark.parametrize("kind", [OptimWrapper, AmpOptimWrapper])
def test_an_optimizer_wrapper_needs_an_optimizer(kind: Any) -> None:
    optimizer = torch.optim.SGD(classifier().parameters(), lr=0.1)
    for wrong in (OptimWrapper(optimizer), torch.optim.SGD, [optimizer]):
        with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got "):
            kind(wrong)
