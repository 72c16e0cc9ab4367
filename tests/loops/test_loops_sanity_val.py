"""One validation batch before training finds mistakes and changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hook_runs import loader, metrics, new_state, train, weights
from listeners import Records
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from stepwrap.collectives import get_rank
from stepwrap.loops import (
    EpochTrainLoop,
    HookList,
    LoopState,
    MeanLoss,
    ValLoop,
    build_loader,
)
from stepwrap.wrappers import BaseModel, OptimWrapper, SingleDevice


class Everything(Records):
    """Collect records and results in one list, and count the training batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.records = self.evaluated
        self.batches = 0

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        self.batches += 1


class Noisy(Dataset[Any]):
    """Samples with noise from the data set's own generator and from the global ones."""

    def __init__(self) -> None:
        self.own = numpy.random.default_rng(0)
        self.inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = self.own.normal() + random.random() + numpy.random.rand() + torch.rand(3)
        return self.inputs[index] + noise.float(), self.inputs[index].sum(0, keepdim=True)


class Memory(nn.Module):
    """A net with dropout, statistics, a call counter, and a tensor kept from the first call."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
        self.register_buffer("calls", torch.zeros(()))
        # torch does not write into expanded tensors.
        self.register_buffer("scale", torch.ones(1).expand(3))
        self.count = 0
        self.kept: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        if self.kept is None:
            self.kept = torch.ones(1) * inputs.shape[0]
        return self.net(inputs) + self.kept * 1e-3 + self.calls * 1e-3 + self.count * 1e-3


class Forgetless(Metric):
    """A metric that counts samples over all validations, because `reset` does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = 0

    def update(self, num_samples: int) -> None:
        self.samples += num_samples

    def compute(self) -> Tensor:
        return torch.tensor(self.samples)


def val_loop(workers: int) -> ValLoop:
    val_metrics = {**metrics(), "samples": Forgetless()}
    if workers:
        return ValLoop(build_loader(Noisy(), batch_size=3, num_workers=workers), val_metrics)
    generator = torch.Generator().manual_seed(3)
    return ValLoop(
        DataLoader(Noisy(), batch_size=3, shuffle=True, generator=generator), val_metrics
    )


def noisy_run(workers: int, *, tried: bool) -> tuple[list[Tensor], list[dict[str, float]], Any]:
    torch.manual_seed(0)
    everything, state = Everything(), new_state(net=Memory())
    random.seed(0)
    numpy.random.seed(0)
    train(state, [everything], val_loop=val_loop(workers), sanity_val=tried)
    drawn = (random.random(), numpy.random.rand(), torch.rand(1).item())
    return [*weights(state), *state.model.buffers()], everything.seen, drawn


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_of_the_run_depends_on_it(workers: int) -> None:
    plain, records, drawn = noisy_run(workers, tried=False)
    tried, same_records, same_drawn = noisy_run(workers, tried=True)
    assert all(map(torch.equal, plain, tried))
    assert records == same_records
    assert drawn == same_drawn
    assert records[-1]["samples"] == 16


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise OSError("no such image")


class Unmeasured(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Mismeasured(Unmeasured):
    """A sampler that claims to be empty."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("sampler", [Unmeasured(), Mismeasured()])
def test_it_does_not_depend_on_the_length_of_the_sampler(sampler: Unmeasured) -> None:
    val_loop = ValLoop(DataLoader(Broken(), batch_size=2, sampler=sampler))
    hook = Everything()
    with pytest.raises(OSError, match="no such image"):
        train(new_state(), [hook], val_loop=val_loop)
    assert hook.batches == 0


@pytest.mark.parametrize(
    ("val_loop", "kind", "text"),
    [
        (
            ValLoop(loader(8), {"accuracy": MulticlassAccuracy(3)}),
            RuntimeError,
            r"in metric 'accuracy' \(MulticlassAccuracy\), which was given \{preds: float32 \(4, 1",
        ),
        (
            ValLoop(loader(8), {"mean": MeanMetric()}),
            ValueError,
            "metrics.mean: MeanMetric needs value",
        ),
        (
            ValLoop([[torch.ones(4, 5), torch.ones(4, 1)]]),
            RuntimeError,
            r"in net \(Linear\) of SupervisedModel .*\nbatch 1 of the validation: \[float32 \(4, 5",
        ),
        (
            ValLoop(build_loader(Broken(), batch_size=2)),
            OSError,
            r"while reading batch 1 of the validation from Broken at .*test_loops_sanity_val.py",
        ),
        (ValLoop([]), ValueError, "the val loader has no batches"),
    ],
    ids=["metric", "argument", "batch", "data set", "empty"],
)
def test_a_mistake_ends_the_run_before_its_first_batch(
    val_loop: ValLoop, kind: type[Exception], text: str
) -> None:
    everything, state = Everything(), new_state()
    with pytest.raises(kind, match=text):
        train(state, [everything], val_loop=val_loop)
    assert (everything.batches, state.metrics) == (0, {})
    with pytest.raises(kind):
        train(new_state(), [everything], val_loop=val_loop, sanity_val=False)
    assert everything.batches == 4


class OneShot:
    def __init__(self) -> None:
        self.batches = iter(list(loader(8)))

    def __iter__(self) -> Any:
        return self.batches


class Own(ValLoop):
    def evaluate(self, state: LoopState, hooks: Any, watch: Any) -> dict[str, float]:
        return {"own": 1.0}


def test_loaders_that_would_notice_are_not_read() -> None:
    state = new_state()
    once = OneShot()
    ValLoop(once, {"accuracy": MulticlassAccuracy(3)}).try_batch(state)
    assert len(list(once.batches)) == 2
    train(state, [], epochs=1, val_loop=Own([object()]))
    lazy = new_state(net=nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1)))
    train(lazy, [], epochs=1)
    assert lazy.step == 4


class _Centred(BaseModel):
    """An evaluation step that changes its batch in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: Tensor, mode: str = "loss") -> dict[str, Tensor]:
        return {"loss": self.layer(inputs).square().mean()}

    def val_step(self, data: Any) -> dict[str, Any]:
        inputs = data[0]
        inputs -= 1.0
        return {"loss": inputs.mean(), "num_samples": len(inputs)}


def test_the_batch_is_not_changed() -> None:
    model = _Centred()
    state = LoopState(
        model=SingleDevice(model),
        optim_wrapper=OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.0)),
    )
    batches = [[torch.full((2, 3), 5.0)]]
    validation = ValLoop(batches, {"loss": MeanLoss()})
    EpochTrainLoop([[torch.ones(2, 3)]], max_epochs=1, val_loop=validation).run(state, HookList())
    assert state.metrics["loss"] == 4.0


class Doubled(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * 2


@pytest.mark.slow
def test_compiled_code_is_made_for_training_first() -> None:
    """An earlier batch of another size would recompile it for dynamic sizes."""

    def compiled_for(*, tried: bool) -> list[str]:
        torch.compiler.reset()
        shapes: list[str] = []

        def backend(graph: Any, inputs: list[Any]) -> Any:
            shapes.append(str([tensor.shape for tensor in inputs if isinstance(tensor, Tensor)]))
            return graph.forward

        # torch.compile skips functions that only torch's own files call.
        net = Doubled(3, 1)
        net.compile(backend=backend)
        val_loop = ValLoop(loader(8, batch_size=2), metrics())
        train(new_state(net=net), [], epochs=1, val_loop=val_loop, sanity_val=tried)
        return shapes

    shapes = compiled_for(tried=False)
    assert "[4, 3]" in shapes[0]
    assert compiled_for(tried=True) == shapes


def _fails_on_rank_1() -> str:
    class Bad(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if not self.training and get_rank() == 1:
                raise OSError("disk")
            return super().forward(inputs)

    try:
        train(new_state(net=Bad(3, 1)), [])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_a_mistake_of_one_rank_ends_all() -> None:
    rank_0, second = run_ranks(_fails_on_rank_1, 2)
    assert second == "OSError: disk"
    assert "rank 1" in rank_0
    assert "OSError: disk" in rank_0
