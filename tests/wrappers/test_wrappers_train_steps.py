"""Training several batches by one call equals as many calls of `train_step` bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepwrap.wrappers import (
    AmpOptimWrapper,
    DataPreprocessor,
    OptimWrapper,
    Preparation,
    SingleDevice,
    SupervisedModel,
    compile_step,
    with_train_step,
    wrap_model,
)

Batch = tuple[Tensor, Tensor]
Make = Callable[[nn.Module], OptimWrapper]


class Model(SupervisedModel):
    """A perceptron with dropout and an optional preprocessor."""

    def __init__(self, preprocessor: DataPreprocessor | None = None) -> None:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
        super().__init__(net, nn.CrossEntropyLoss())
        if preprocessor is not None:
            self.data_preprocessor = preprocessor


class Doubled(DataPreprocessor):
    def forward(self, data: Any, training: bool = False) -> Any:
        inputs, targets = super().forward(data, training)
        return inputs * (1 + torch.rand(())), targets


def batches(count: int, size: int = 5) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, size, 6, generator=generator)
    targets = torch.randint(3, (count, size), generator=generator)
    return list(zip(inputs, targets, strict=True))


def adamw(model: nn.Module, **options: Any) -> OptimWrapper:
    return OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def train(
    blocks: int | None,
    data: list[Batch],
    *,
    make: Make = adamw,
    compiled: bool = True,
    preprocessor: Callable[[], DataPreprocessor | None] = lambda: None,
    before: Callable[[int, Any, OptimWrapper], None] = lambda *_: None,
) -> tuple[list[Tensor], list[dict[str, Tensor]], Any]:
    """Return weights and state, logs and wrapper; `blocks=None` uses `train_step`."""
    torch.manual_seed(0)
    model = Model(preprocessor())
    prepare = Preparation(compile={"step": True, "min_steps": 0} if compiled else False)
    wrapper: Any = wrap_model(None, model, prepare=prepare)
    optim = make(model)
    wrapper.train()
    logs: list[dict[str, Tensor]] = []
    for start in range(0, len(data), blocks or 1):
        before(start, wrapper, optim)
        if blocks is None:
            logs.append(wrapper.train_step(data[start], optim))
        else:
            # Pass an iterator, like a loader's.
            logs += wrapper.train_steps(iter(data[start : start + blocks]), optim)
    states = optim.optimizer.state_dict()["state"].values()
    weights = [*model.state_dict().values(), *(v for state in states for v in state.values())]
    assert not compiled or wrapper.batch_runner.programs, "nothing was compiled"
    return weights, logs, wrapper


def assert_identical(blocks: int, data: list[Batch], **options: Any) -> Any:
    weights, logs, _ = train(None, data, **options)
    in_blocks, logs_of_blocks, wrapper = train(blocks, data, **options)
    assert len(weights) == len(in_blocks)
    assert all(map(torch.equal, weights, in_blocks))
    assert logs == logs_of_blocks
    return wrapper


def test_without_a_compiled_step() -> None:
    assert_identical(4, batches(10), compiled=False)


def test_a_custom_training_step_is_called_for_each_batch() -> None:
    def step(wrapper: Any, data: Batch, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        losses = wrapper(*data, mode="loss")
        optim_wrapper.update_params(losses["loss"])
        return {"first": data[0][0, 0]}

    data = batches(3)
    model = Model()
    wrapper = with_train_step(SingleDevice, step)(model)
    logs = wrapper.train_steps(data, adamw(model))
    assert [log["first"] for log in logs] == [inputs[0, 0] for inputs, _ in data]


def test_a_custom_training_step_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    def step(wrapper: Any, data: Batch, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        return SingleDevice.train_step(wrapper, data, optim_wrapper)

    model = Model()
    optim = adamw(model)
    wrapper: Any = compile_step(with_train_step(SingleDevice, step)(model), backend="eager")
    wrapper.train_steps(batches(6), optim)
    assert optim.inner_count == 6
    assert not wrapper.recheck_every(1)
    assert caplog.text.count("custom train_step or forward") == 1


def test_a_batch_runner_replaces_forward_and_update() -> None:
    def run(wrapper: Any, data: Any, optim_wrapper: OptimWrapper) -> Any:
        return {"size": len(data[0])} if len(data[0]) < 5 else NotImplemented

    model = Model()
    optim = adamw(model)
    wrapper: Any = SingleDevice(model)
    wrapper.batch_runner = run
    assert wrapper.train_step(batches(1, size=3)[0], optim) == {"size": 3}
    assert optim.inner_count == 0
    assert "loss" in wrapper.train_step(batches(1)[0], optim)
    assert optim.inner_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [7, 32, 100])
def test_compiled_with_clipping_and_batches_of_another_shape(blocks: int) -> None:
    data = batches(64)
    for index in (9, 40, 63):
        data[index] = data[index][0][:3], data[index][1][:3]
    wrapper = assert_identical(
        blocks, data, make=lambda model: adamw(model, clip_grad={"max_norm": 0.1})
    )
    assert len(wrapper.batch_runner.programs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("counts", [1, 3])
def test_compiled_with_bfloat16_and_accumulation(counts: int) -> None:
    def make(model: nn.Module) -> OptimWrapper:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return AmpOptimWrapper(optimizer, dtype="bfloat16", accumulative_counts=counts)

    assert_identical(8, batches(24), make=make)


@pytest.mark.slow
def test_compiled_with_batches_of_weight_0() -> None:
    data = batches(24)
    for index in (10, 20):
        data[index] = data[index][0], torch.zeros(5, dtype=torch.long)

    def get_weight(batch: Batch) -> float:
        return float(batch[1].any())

    assert_identical(8, data, make=lambda model: adamw(model, loss_weight=get_weight))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Doubled, lambda: DataPreprocessor(mean=0.5, std=2.0)])
def test_compiled_with_batches_that_are_prepared(make: Callable[[], DataPreprocessor]) -> None:
    assert_identical(8, batches(24), preprocessor=make)


@pytest.mark.slow
def test_changes_between_two_calls_are_seen() -> None:
    def change(start: int, wrapper: Any, optim: OptimWrapper) -> None:
        optim.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + start // 8)
        if start >= 16:
            wrapper.module.net[2].p = 0.0
        if start >= 24:
            wrapper.module.net[0].weight.requires_grad_(False)

    wrapper = assert_identical(8, batches(32), before=change)
    assert len(wrapper.batch_runner.programs) == 3


@pytest.mark.slow
def test_settings_of_the_optimizer_are_always_checked() -> None:
    def settle(index: int, wrapper: Any, optim: OptimWrapper) -> None:
        optim.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + index)
        optim.optimizer.param_groups[0]["weight_decay"] = 0.1 if index > 12 else 0.0

    def look_rarely(index: int, wrapper: Any, optim: OptimWrapper) -> None:
        if index == 0:
            wrapper.recheck_every(1000)
        settle(index, wrapper, optim)

    weights, logs, _ = train(None, batches(20), before=settle)
    rarely, logs_of_rarely, wrapper = train(None, batches(20), before=look_rarely)
    assert all(map(torch.equal, weights, rarely))
    assert logs == logs_of_rarely
    assert len(wrapper.batch_runner.programs) == 2
