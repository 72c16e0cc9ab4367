"""Several named sets, heads, transforms and the validation before training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hook_runs import data, new_state, weights
from listeners import Records, failing, on
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from stepwrap.collectives import get_world_size
from stepwrap.loops import (
    EpochTrainLoop,
    EvalSets,
    HookList,
    LogHook,
    LoopState,
    MeanLoss,
    MetricInputs,
    TestLoop,
    ValLoop,
    build_loader,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.loops.metrics.inputs import MetricInputsError
from stepwrap.wrappers import SingleDevice, StepDistributedDataParallel, SupervisedModel

SIZES = {"clean": 7, "noisy": 10}
RANKS = [1, 2, 3]


class Heads(nn.Module):
    """A model that returns scores of three classes and a distance."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.far = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"side": self.side(inputs), "far": self.far(inputs)}


class Labelled(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self.inputs, self.far = data(samples, seed=samples).tensors
        self.side = torch.arange(samples) % 3

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, at: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self.inputs[at], {"side": self.side[at], "far": self.far[at]}


def head_loss(preds: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    side = nn.functional.cross_entropy(preds["side"], target["side"])
    return side + nn.functional.mse_loss(preds["far"], target["far"])


def heads_model() -> SupervisedModel:
    torch.manual_seed(0)
    return SupervisedModel(Heads(), head_loss)


def head_metrics() -> dict[str, Any]:
    classes = partial(torch.argmax, dim=1)
    return {
        "loss": MeanLoss(),
        "accuracy": MetricInputs(MulticlassAccuracy(3, average="micro"), head="side"),
        "distance": MetricInputs(MeanAbsoluteError(), head="side", transform=classes),
        "far": MetricInputs(MeanSquaredError(), head="far", transform=torch.relu),
    }


def evaluate_heads() -> dict[str, float]:
    wrapper = StepDistributedDataParallel if get_world_size() > 1 else SingleDevice
    loops = {
        name: TestLoop(build_loader(Labelled(size), batch_size=2), head_metrics())
        for name, size in SIZES.items()
    }
    return EvalSets(loops).run(LoopState(wrapper(heads_model())), HookList())


@pytest.mark.parametrize("ranks", RANKS)
def test_sets_heads_and_transforms_are_exact(ranks: int) -> None:
    expected = {}
    for name, size in SIZES.items():
        samples = Labelled(size)
        target = {"side": samples.side, "far": samples.far}
        with torch.no_grad():
            preds = heads_model().net(samples.inputs)
        classes = preds["side"].argmax(1)
        expected[f"{name}/loss"] = head_loss(preds, target)
        expected[f"{name}/accuracy"] = (classes == samples.side).float().mean()
        expected[f"{name}/distance"] = (classes - samples.side).abs().float().mean()
        expected[f"{name}/far"] = (preds["far"].relu() - samples.far).square().mean()
    for metrics in run_ranks(evaluate_heads, ranks):
        assert metrics == pytest.approx({key: value.item() for key, value in expected.items()})


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (MetricInputs(MeanSquaredError(), head="fra"), r"no head 'fra'; did you mean far\?; the"),
        (MetricInputs(MeanSquaredError(), head="side", transform=len), "argument 'other'|int"),
    ],
)
def test_outputs_that_a_metric_cannot_get_are_named(inputs: MetricInputs, text: str) -> None:
    loop = ValLoop(build_loader(Labelled(4), batch_size=2), {"one": inputs})
    with pytest.raises((MetricInputsError, TypeError, AttributeError), match=text) as caught:
        loop.run(LoopState(SingleDevice(heads_model())), HookList())
    if isinstance(caught.value, MetricInputsError):
        assert caught.value.setting == "metrics.one.head"


def test_a_model_without_heads_is_named() -> None:
    loop = ValLoop(
        build_loader(data(4), batch_size=2), {"one": MetricInputs(MeanSquaredError(), head="far")}
    )
    with pytest.raises(MetricInputsError, match="by head, .*preds is float"):
        loop.run(new_state(), HookList())


def test_a_transform_of_outputs_without_names_gets_them() -> None:
    inputs = MetricInputs(MeanSquaredError(), transform=lambda outputs: outputs * 2)
    assert torch.equal(inputs.select("one", torch.ones(2)), torch.full((2,), 2.0))


def test_loops_of_two_kinds_are_refused() -> None:
    loader = build_loader(data(4), batch_size=2)
    with pytest.raises(ValueError, match="one kind, .*got ValLoop, TestLoop"):
        EvalSets({"a": ValLoop(loader), "b": TestLoop(loader)})
    with pytest.raises(ValueError, match="got none"):
        EvalSets({})


def sets() -> EvalSets:
    loops = {}
    for name, size in SIZES.items():
        samples: TensorDataset = data(size, seed=size)
        loops[name] = ValLoop(build_loader(samples, batch_size=2), {"error": MeanSquaredError()})
    return EvalSets(loops)


def train_sets(
    state: LoopState, hooks: Sequence[Any] = (), *, epochs: int = 2, val_begin: int = 0
) -> LoopState:
    loader = build_loader(data(12), batch_size=12 // (2 * get_world_size()), train=True, seed=0)
    loop = EpochTrainLoop(loader, max_epochs=epochs, val_loop=sets(), val_begin=val_begin)
    return loop.run(state, HookList(hooks))


def stop_in(name: str, step: int) -> Any:
    """Return a hook that requests a stop inside a set."""

    def on_eval_batch_end(state: LoopState, batch: Any, outputs: Any) -> None:
        if (state.eval_set, state.step) == (name, step):
            state.request_stop("enough")

    return on(on_eval_batch_end=on_eval_batch_end)


def interrupted(folder: Path, name: str, step: int) -> dict[str, Any]:
    """Return an uninterrupted run, and one that is stopped inside a validation and resumed."""
    uninterrupted, records = new_state(), Records()
    train_sets(uninterrupted, [records])
    stopped = new_state(run_dir=folder)
    cut = Records()
    train_sets(stopped, [stop_in(name, step), cut, LogHook()])
    saved = save_checkpoint(folder / "checkpoints", stopped)
    second, later_records = new_state(run_dir=folder), Records()
    load_checkpoint(saved).restore(second)
    train_sets(second, [later_records, LogHook()])
    return {
        "whole": records.evaluated,
        "cut": [*filter(None, cut.evaluated)],
        "rest": later_records.evaluated,
        "evaluated_at": stopped.evaluated_at,
        "same": all(map(torch.equal, weights(uninterrupted), weights(second))),
    }


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("step", "done"), [(0, -1), (2, 0)])
def test_a_stop_in_the_second_set_repeats_the_validation(
    tmp_path: Path, ranks: int, step: int, done: int
) -> None:
    for result in run_ranks(interrupted, ranks, tmp_path, "noisy", step):
        assert result["evaluated_at"] == done
        assert result["same"]
        assert [*result["cut"], *result["rest"]] == result["whole"]
        assert [*result["whole"][0]] == ["clean/error", "noisy/error"]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if record["phase"] == "val"]
    assert steps == [0, 2, 4]


def test_the_validation_before_training_is_of_the_new_model_and_is_not_repeated(
    tmp_path: Path,
) -> None:
    samples = data(SIZES["noisy"], seed=SIZES["noisy"])
    model = new_state().model.module.net
    with torch.no_grad():
        error = (model(samples.tensors[0]) - samples.tensors[1]).square().mean().item()
    state, records = new_state(run_dir=tmp_path), Records()
    save = on(
        order=75,
        on_save_point=lambda state: (
            save_checkpoint(tmp_path / "checkpoints", state) if state.step == 0 else None
        ),
    )
    train_sets(state, [records, LogHook(), save])
    assert records.evaluated[0]["noisy/error"] == pytest.approx(error)
    assert len(records.evaluated) == 3
    (saved,) = (tmp_path / "checkpoints").iterdir()
    resumed, later_records = new_state(run_dir=tmp_path), Records()
    load_checkpoint(saved).restore(resumed)
    train_sets(resumed, [later_records, LogHook()])
    assert later_records.evaluated == records.evaluated[1:]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if '"val"' in line] == [0, 2, 4]
    plain = new_state()
    train_sets(plain, val_begin=1)
    assert all(map(torch.equal, weights(plain), weights(resumed)))


def test_an_error_in_the_second_set_leaves_no_results() -> None:
    state = new_state()

    def fail(state: LoopState, *_: object) -> None:
        if state.eval_set == "noisy":
            raise OSError("no more")

    with pytest.raises(OSError, match="no more") as caught:
        sets().run(state, HookList([on(on_eval_batch_start=fail)]))
    assert "in the set 'noisy'" in caught.value.__notes__
    assert (state.evaluated_at, state.metrics, state.eval_set) == (-1, {}, "")
    sets().run(state, HookList())
    assert state.evaluated_at == 0
    assert state.higher_is_better == {"clean/error": False, "noisy/error": False}


def test_a_mistake_in_the_second_set_is_found_before_training() -> None:
    broken = TensorDataset(torch.zeros(4, 5), torch.zeros(4, 1))
    loops = {**sets().loops, "broken": ValLoop(build_loader(broken, batch_size=2))}
    loop = EpochTrainLoop(
        build_loader(data(4), batch_size=2), max_epochs=1, val_loop=EvalSets(loops)
    )
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        loop.run(new_state(), HookList([failing(AssertionError(), "on_batch_start")]))
    assert "in the set 'broken'" in caught.value.__notes__
