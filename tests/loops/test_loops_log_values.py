"""Logged values that the training changes in place afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from listeners import Records
from ranks import run_ranks
from torch import Tensor, nn

from stepwrap.collectives import get_rank
from stepwrap.loops import EpochTrainLoop, HookList, LoopState, NanGuardHook, build_loader, logs
from stepwrap.loops.logs import LogBuffer
from stepwrap.runner import Runner
from stepwrap.wrappers import (
    BaseModel,
    OptimWrapper,
    SingleDevice,
    StepDistributedDataParallel,
    compile_step,
    with_train_step,
)

STEPS = 10


class Scaled(BaseModel):
    """Logs a learnable parameter, a view of it, and a buffer that counts the batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: Tensor, targets: Tensor, mode: str = "loss") -> dict[str, Tensor]:
        self.seen += 1
        errors = self.linear(inputs).squeeze(1) * self.scale - targets
        return {
            "loss": errors.square().mean(),
            "scale": self.scale,
            "first": self.scale[0],
            "seen": self.seen,
        }


class SelfStepping(Scaled):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        losses = self(*data)
        logs = {**losses, "scale": self.scale.mean()}
        optim_wrapper.update_params(losses["loss"])
        return logs


class SteppingWrapper(SingleDevice):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return step(self, data, optim_wrapper)


def step(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
    losses = wrapper(*data)
    logs = {**losses, "scale": wrapper.module.scale.mean()}
    optim_wrapper.update_params(losses["loss"])
    return logs


def make_data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    options: Any = {"generator": generator, "dtype": torch.float64}
    return torch.utils.data.TensorDataset(
        torch.randn(4 * STEPS, 3, **options), torch.randn(4 * STEPS, **options)
    )


def train_plainly(*, after_update: bool) -> dict[str, float]:
    """Return the means of the logged values."""
    model, sums = Scaled(), {"scale": 0.0, "first": 0.0, "seen": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = make_data().tensors
    for batch in zip(inputs.chunk(STEPS), targets.chunk(STEPS), strict=True):
        scale = model.scale.item()
        optimizer.zero_grad()
        model(*batch)["loss"].backward()
        optimizer.step()
        sums["scale"] += scale
        sums["first"] += model.scale.item() if after_update else scale
        sums["seen"] += model.seen.item()
    return {name: value / STEPS for name, value in sums.items()}


@pytest.mark.parametrize(
    ("make", "after_update"),
    [
        (lambda: SingleDevice(Scaled()), False),
        (lambda: compile_step(SingleDevice(Scaled()), backend="eager", min_steps=0), False),
        (lambda: with_train_step(SingleDevice, step)(Scaled()), True),
        (lambda: SingleDevice(SelfStepping()), True),
        (lambda: SteppingWrapper(Scaled()), True),
    ],
    ids=["losses", "compiled", "own step", "step of the model", "subclass"],
)
def test_the_record_has_the_values_of_each_step(
    make: Any, after_update: bool, tmp_path: Path
) -> None:
    wrapper = make()
    loader = build_loader(make_data(), batch_size=4, shuffle=False, train=True)
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
    loop = EpochTrainLoop(loader, max_epochs=1, log_every_steps=STEPS)
    Runner(wrapper, loop, optim_wrapper=optim_wrapper, run_dir=tmp_path, hooks={}).train()
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {name: record[name] for name in ("scale", "first", "seen")} == pytest.approx(
        train_plainly(after_update=after_update), abs=1e-12
    )


ODD = 2**24 + 1
EXACT = {
    "integer": ODD,
    "time": 1_790_000_123.5,
    "tenth": 0.1,
    "int64": torch.tensor(ODD),
    "int64s": torch.tensor([ODD - 1, ODD + 1]),
    "numpy_int": numpy.int64(ODD),
    "large": 1e39,
}


def log_exactly(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
    if optim_wrapper.loss_weight is not None:
        optim_wrapper.weigh(data, wrapper)
    loss = wrapper(*data)["loss"]
    optim_wrapper.update_params(loss)
    return {"loss": loss, **EXACT, "half": torch.tensor(0.1, dtype=torch.float16)}


def _exact_records(weigh: bool = False) -> dict[str, float]:
    torch.manual_seed(0)
    model = with_train_step(StepDistributedDataParallel, log_exactly)(_Sometimes())
    hook, options = Records(), {"loss_weight": "samples"} if weigh else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = LoopState(model=model, optim_wrapper=OptimWrapper(optimizer, **options))
    batches = [[torch.full((1, 1), 0.1)]] * 4
    loop = EpochTrainLoop(batches, max_epochs=1, per_rank=True, log_every_steps=2)
    loop.run(state, HookList([hook, NanGuardHook(check="all")]))
    return hook.records[-1]


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_numbers_and_integers_keep_all_bits(ranks: int, weigh: bool) -> None:
    for record in run_ranks(_exact_records, ranks, weigh):
        expected = {
            name: float(torch.as_tensor(v, dtype=torch.float64).mean()) for name, v in EXACT.items()
        }
        assert {name: record[name] for name in EXACT} == expected
        assert record["half"] == float(torch.tensor(0.1, dtype=torch.float16))


def test_integers_next_to_float32_keep_all_bits() -> None:
    buffer = LogBuffer()
    for step, value in enumerate([torch.tensor(ODD), torch.tensor(2.0)]):
        buffer.append((step, {"value": value}))
    assert buffer.means()["value"].item() == (ODD + 2) / 2


def test_float32_values_are_summed_in_float32() -> None:
    buffer, values = LogBuffer(), torch.rand(9) + 1000
    for step, value in enumerate(values.unbind()):
        buffer.append((step, {"loss": value, "half": value.half()}))
    assert torch.equal(buffer.means()["loss"], values.sum() / 9)
    assert torch.equal(buffer.means()["half"], values.half().float().sum() / 9)


@pytest.mark.parametrize("folds", [False, True])
def test_exact_values_of_an_unfinished_interval_are_restored(folds: bool, tmp_path: Path) -> None:
    def fill(buffer: LogBuffer, steps: range) -> None:
        for step in steps:
            numbers = {"integer": ODD + step, "tenth": 0.1 * step, "time": numpy.float64(step) / 7}
            tensors = {"int64": torch.tensor(ODD * step), "float": torch.tensor(0.1 * step)}
            mixed = {"mixed": 0.1 * step if step % 2 else torch.tensor(0.1 * step)}
            buffer.append((step, {**numbers, **tensors, **mixed, "numpy": numpy.float32(step) / 7}))

    uninterrupted, before, after = LogBuffer(), LogBuffer(), LogBuffer()
    fill(uninterrupted, range(20))
    fill(before, range(20))
    if folds:
        uninterrupted.fold()
        before.fold()
    torch.save(before.state_dict(), tmp_path / "logs.pt")
    saved = torch.load(tmp_path / "logs.pt", weights_only=False)
    after.load_state_dict(saved, torch.device("cpu"))
    fill(uninterrupted, range(20, 31))
    fill(after, range(20, 31))
    want, means = uninterrupted.means(), after.means()
    assert {
        name: str(mean.dtype) for name, mean in means.items() if name in ("float", "numpy")
    } == {
        "float": "torch.float32",
        "numpy": "torch.float32",
    }
    for name, mean in means.items():
        assert mean.dtype == want[name].dtype
        assert torch.equal(mean, want[name]), name


@pytest.mark.parametrize("number", [0.5, torch.tensor(0.5)])
def test_numbers_next_to_tensors_of_a_device_without_float64(
    number: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands for one without float64."""
    monkeypatch.setattr(
        logs,
        "widest_float",
        lambda device: torch.float64 if device.type == "cpu" else torch.float32,
    )
    buffer = LogBuffer()
    for step, value in enumerate([number, torch.tensor(1.5, device="meta"), 2.5]):
        buffer.append((step, {"value": value}))
    mean = buffer.means()["value"]
    assert (mean.device.type, mean.dtype) == ("meta", torch.float32)
    state = {"sums": {"value": (torch.tensor(0.5, dtype=torch.float64), 1)}, "values": {}}
    buffer.load_state_dict(state, torch.device("meta"))
    assert buffer.means()["value"].is_cpu


class _Sometimes(BaseModel):
    """Logs the first input of a batch if it is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, inputs: Tensor, mode: str = "loss") -> dict[str, Tensor]:
        positive = {"positive": inputs[0, 0]} if inputs[0, 0] > 0 else {}
        return {"loss": self.linear(inputs).mean(), **positive}


def _log_sometimes(values: list[list[float]]) -> list[dict[str, float]]:
    hook = Records()
    model = StepDistributedDataParallel(_Sometimes())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = LoopState(model=model, optim_wrapper=OptimWrapper(optimizer))
    batches = [[torch.full((1, 1), value)] for value in values[get_rank()]]
    EpochTrainLoop(batches, max_epochs=1, per_rank=True).run(state, HookList([hook]))
    return hook.records


def test_values_of_some_batches_count_equally_on_all_ranks() -> None:
    values = [[1.0, 2.0, 3.0], [-1.0, -1.0, 10.0], [-1.0, -1.0, -1.0]]
    for records in run_ranks(_log_sometimes, 3, values):
        assert records[-1]["positive"] == 4.0
