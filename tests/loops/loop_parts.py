"""Small models, data and recorders for the tests of the loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stepwrap.loops import LoopState, build_loader, seed_rng
from stepwrap.wrappers import (
    OptimWrapper,
    SingleDevice,
    StepDistributedDataParallel,
    SupervisedModel,
)


def make_data(samples: int) -> TensorDataset:
    """Return inputs (samples, 4) that identify their sample, and targets (samples,)."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 4, generator=generator)
    inputs[:, 0] = torch.arange(samples)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


def make_loader(samples: int = 12, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    """Return a training loader over this rank's share of `make_data`."""
    return build_loader(make_data(samples), batch_size=batch_size, train=True, **options)


class Value:
    """A stateful object with a plain number as state."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.value = state["value"]


class Unsized:
    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def make_state(
    *, accumulate: int = 1, run_dir: Path | None = None, dropout: float = 0.0
) -> LoopState:
    """Return the state of a new run: a small classifier, SGD with momentum; DDP inside a group."""
    seed_rng(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))
    model = SupervisedModel(net, nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    grouped = dist.is_available() and dist.is_initialized()
    wrapper = StepDistributedDataParallel(model) if grouped else SingleDevice(model)
    return LoopState(
        model=wrapper,
        optim_wrapper=OptimWrapper(optimizer, accumulative_counts=accumulate),
        run_dir=run_dir,
    )


def get_weights(state: LoopState) -> dict[str, Tensor]:
    """Return a copy of the weights of the user's model."""
    model = state.model.module
    assert isinstance(model, nn.Module)
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_identical(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fail unless both have the same names and bit-identical tensors."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


# The text that a recorder appends at each event.
_TEXTS: dict[str, Callable[..., str]] = {
    "on_run_start": lambda state: "run_start",
    "on_run_end": lambda state: "run_end",
    "on_train_start": lambda state: "train_start",
    "on_train_end": lambda state: "train_end",
    "on_epoch_start": lambda state: f"epoch_start {state.epoch}",
    "on_epoch_end": lambda state: f"epoch_end {state.epoch}",
    "on_batch_start": lambda state, batch: f"batch_start {state.iteration}",
    "on_batch_end": lambda state, batch, logs: f"batch_end {state.iteration}",
    "on_update": lambda state: f"update {state.step}",
    "on_log": lambda state, record: f"log {state.step}",
    "on_save_point": lambda state: f"save_point {state.step}",
    "on_eval_start": lambda state: f"{state.phase.value}_start",
    "on_eval_batch_start": lambda state, batch: "eval_batch_start",
    "on_eval_batch_end": lambda state, batch, outputs: "eval_batch_end",
    "on_eval_end": lambda state, metrics: f"{state.phase.value}_end {sorted(metrics)}",
}


class Recorder:
    def __init__(self) -> None:
        self.events: list[str] = []
        for event, text in _TEXTS.items():
            setattr(self, event, lambda *args, text=text: self.events.append(text(*args)))
