"""Each part of a runner may be an object that does not use this package."""

import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from stepwrap.configs.digits import Digits
from stepwrap.loops import (
    CheckpointHook,
    EpochTrainLoop,
    Hook,
    IterTrainLoop,
    LoopState,
    SchedulerHook,
    ValLoop,
)
from stepwrap.runner import Runner
from stepwrap.wrappers import OptimWrapper

PAGE = (Path(__file__).parents[2] / "docs/custom_steps.md").read_text()
ROWS, SIZE, RATE = 64, 16, 0.1


class Net(nn.Module):
    """A plain module with the `mode` argument that the usual step passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor, mode: str = "loss") -> Any:
        scores = self.layer(images.flatten(1))
        if mode == "predict":
            return {"preds": scores, "target": labels, "num_samples": len(labels)}
        return {"loss": cross_entropy(scores, labels)}


class Stepping(Net):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = self(*data)["loss"]
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class BareOptimization:
    """The members of an optimizer wrapper that a step without a context uses."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.optimizer = torch.optim.SGD(parameters, lr=RATE)
        self.state_dict = self.optimizer.state_dict
        self.load_state_dict = self.optimizer.load_state_dict

    def update_params(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def should_update(self) -> bool:
        return True

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        pass


class Optimization(BareOptimization):
    """The members of an optimizer wrapper that a run and its checkpoints use, as on the page."""

    def optim_context(self, model: Any) -> Any:
        return nullcontext()


class Loop:
    def run(self, state: LoopState, hooks: Any) -> LoopState:
        model: Any = state.model
        for batch in data():
            model.train_step(batch, state.optim_wrapper)
            state.step += 1
        return state


class Evaluation:
    def run(self, state: LoopState, hooks: Any) -> dict[str, float]:
        return {"steps": float(state.step)}


class Batches:
    def __iter__(self) -> Iterator[Any]:
        return iter(data())


class Step:
    def __call__(self, wrapper: Any, batch: Any, optim_wrapper: Any) -> dict[str, Any]:
        return self.run(wrapper, batch, optim_wrapper)

    def run(self, wrapper: Any, batch: Any, optim_wrapper: Any) -> dict[str, Any]:
        return step(wrapper, batch, optim_wrapper, factor=1.0)


def step(wrapper: Any, batch: Any, optim_wrapper: Any, factor: float) -> dict[str, Any]:
    loss = factor * wrapper(*batch, mode="loss")["loss"]
    optim_wrapper.update_params(loss)
    return {"loss": loss}


def images_and_labels() -> tuple[Tensor, Tensor]:
    digits = Digits("train", "float32")
    return digits.images[:ROWS], digits.labels[:ROWS]


def data() -> list[Any]:
    return list(zip(*(tensor.split(SIZE) for tensor in images_and_labels()), strict=True))


def net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind()


def wrapped(model: nn.Module) -> OptimWrapper:
    return OptimWrapper(torch.optim.SGD(model.parameters(), lr=RATE))


def train_plainly(rates: list[float] | None = None) -> Tensor:
    model, rates = net(), rates or [RATE] * (ROWS // SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for (images, labels), rate in zip(data(), rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        cross_entropy(model.layer(images.flatten(1)), labels).backward()
        optimizer.step()
    return model.layer.weight.detach()


def once(batches: Any = None) -> EpochTrainLoop:
    return EpochTrainLoop(data() if batches is None else batches, max_epochs=1)


def own(model: nn.Module) -> Optimization:
    return Optimization(model.parameters())


PLAIN = partial(step, factor=1.0)
# A model class, and factories of the loop, the optimizer wrapper and the step.
PARTS: dict[str, tuple[type[Net], Any, Any, Any]] = {
    "model": (Net, once, wrapped, None),
    "model-with-a-step": (Stepping, once, wrapped, None),
    "torch-loader": (
        Net, lambda: once(DataLoader(TensorDataset(*images_and_labels()), SIZE)), wrapped, None,
    ),
    "iterable": (Net, lambda: IterTrainLoop(Batches(), max_steps=4), wrapped, None),
    "optimization": (Net, once, own, None),
    "optimization-without-a-context": (
        Net, once, lambda model: BareOptimization(model.parameters()), PLAIN,
    ),
    "optimization-and-loop": (Net, Loop, own, None),
    "loop": (Net, Loop, wrapped, None),
    "partial": (Net, Loop, wrapped, PLAIN),
    "callable-object": (Net, once, wrapped, Step()),
    "bound-method": (Stepping, once, wrapped, Step().run),
    "lambda": (Net, Loop, wrapped, lambda wrapper, *arguments: step(wrapper, *arguments, 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_custom_parts(name: str, tmp_path: Path) -> None:
    kind, loop, optimization, train_step = PARTS[name]
    model = net(kind)
    runner = Runner(
        model,
        loop(),
        optim_wrapper=optimization(model),
        val_loop=Evaluation(),
        run_dir=tmp_path,
        train_step=train_step,
    )
    assert runner.train().step == ROWS // SIZE
    assert torch.equal(model.layer.weight, train_plainly())
    assert runner.validate() == {"steps": 4.0}


def test_the_page_lists_the_members_of_an_optimizer_wrapper() -> None:
    listed = PAGE.split("an optimizer wrapper with ")[1].split(", an object")[0]
    optimization = Optimization([nn.Parameter(torch.ones(1))])
    public = {name for name in dir(optimization) if not name.startswith("_")}
    assert set(re.findall(r"`(\w+)`", listed)) == public - {"optimizer"}


def test_evaluation_loops_and_metrics() -> None:
    model = net()
    runner = Runner(
        model, once(), optim_wrapper=wrapped(model), val_loop=Evaluation(), test_loop=Evaluation()
    )
    runner.train()
    assert runner.validate() == runner.test() == {"steps": 4.0}

    class Labels(Net):
        def val_step(self, batch: Any) -> dict[str, Any]:
            return {"value": batch[1].double()}

    evaluated = Runner(Labels(), val_loop=ValLoop(data(), {"mean": MeanMetric()})).validate()
    assert evaluated["mean"] == pytest.approx(images_and_labels()[1].double().mean().item())


class Watch:
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self.losses.append(record["loss"])


@pytest.mark.parametrize("named", [False, True])
def test_schedulers_hooks_and_checkpoints(named: bool, tmp_path: Path) -> None:
    """A run that is interrupted after two updates ends with the weights of the whole run."""

    def run(folder: str, updates: int, resume: bool = False) -> tuple[Net, list[float]]:
        model, watch = net(), Watch()
        optim = wrapped(model)
        halves = torch.optim.lr_scheduler.StepLR(optim.optimizer, step_size=1, gamma=0.5)
        hooks = [SchedulerHook([(halves, "step")]), CheckpointHook(every_steps=1), watch]
        loop = IterTrainLoop(data(), max_steps=updates, log_every_steps=1)
        runner = Runner(
            model,
            loop,
            optim_wrapper=optim,
            hooks={f"my_{i}": hook for i, hook in enumerate(hooks)} if named else hooks,
            run_dir=tmp_path / folder,
            train_step=partial(step, factor=1.0),
        )
        runner.train(resume=resume)
        return model, watch.losses

    uninterrupted, losses = run("whole", 4)
    assert torch.equal(uninterrupted.layer.weight, train_plainly([RATE / 2**i for i in range(4)]))
    assert len(losses) == 4
    run("part", 2)
    again, losses_after = run("part", 4, resume=True)
    assert torch.equal(again.layer.weight, uninterrupted.layer.weight)
    assert losses_after == losses[2:]


def slower(wrapper: Any, batch: Any, optim_wrapper: Any) -> dict[str, Any]:
    logs = step(wrapper, batch, optim_wrapper, 1.0)
    (group,) = optim_wrapper.optimizer.param_groups
    group["lr"] /= 2
    return {**logs, "own_rate": group["lr"], "per_image": batch[0].flatten(1).mean(1)}


def choosy(wrapper: Any, batch: Any, optim_wrapper: Any) -> dict[str, Any]:
    loss = wrapper(*batch, mode="loss")["loss"]
    optim_wrapper.backward(optim_wrapper.scale_loss(loss))
    if optim_wrapper.should_update():
        if optim_wrapper.inner_count != 2:
            optim_wrapper.step()
        optim_wrapper.zero_grad()
    return {"loss": loss}


@pytest.mark.parametrize(
    ("train_step", "rates"),
    [(slower, [RATE / 2**i for i in range(4)]), (choosy, [RATE, 0.0, RATE, RATE])],
)
def test_steps_that_change_the_rate_or_skip_updates(
    train_step: Any, rates: list[float], tmp_path: Path
) -> None:
    """The run is interrupted and resumed, and logs everything that the step returns."""
    records: list[dict[str, float]] = []

    class Keep(Hook):
        def on_log(self, state: LoopState, record: dict[str, float]) -> None:
            records.append(record)

    for updates in (2, 4):
        model = net()
        runner = Runner(
            model,
            IterTrainLoop(data(), max_steps=updates, log_every_steps=1),
            optim_wrapper=wrapped(model),
            hooks=[CheckpointHook(every_steps=1), Keep()],
            run_dir=tmp_path,
            train_step=train_step,
        )
        assert runner.train(resume=updates == 4).step == updates
    assert torch.equal(model.layer.weight, train_plainly(rates))
    assert len(records) == 4
    if train_step is slower:
        assert [record["own_rate"] for record in records] == pytest.approx(
            [rate / 2 for rate in rates]
        )
        assert records[0]["per_image"] == pytest.approx(data()[0][0].mean().item())
