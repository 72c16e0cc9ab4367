"""Contradicting settings are reported with their keys before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parallel_runs import PLAN, settings

from stepwrap.registry import ConfigError, load_config
from stepwrap.runner.failure import BuildError
from stepwrap.runner.parts import build_parts
from stepwrap.runner.sections import read_sections

TP = {"tensor_parallel": {"plan": PLAN}}


def problems(ranks: int, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_sections(settings(**sections, launch={"nproc": ranks}))
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "sections", "message"),
    [
        (2, {"mesh": {"data": 2, "tensor": 2}, **TP}, "mesh: data 2 x tensor 2 = 4 ranks, but lau"),
        (2, {"mesh": {"dat": 2}}, "mesh: a mesh has no axis 'dat'"),
        (2, TP, "tensor_parallel: needs a tensor axis in mesh"),
        (
            2,
            {"mesh": {"tensor": 2}},
            "mesh.tensor: has several ranks, but there is no tensor_parallel",
        ),
        (2, {"init_device": "meta"}, "init_device: the model has parameters on the meta device"),
        (1, {"init_device": "metta"}, "init_device: must be auto or meta, got 'metta'; did you"),
        (2, {"wrapper": {"type": "single"}}, "SingleDevice works in one process only, got 2"),
        (2, {"wrapper": {"type": "dp"}}, "StepDataParallel works in one process only, got 2"),
        (2, {"mesh": {"shard": 2}}, "mesh: StepDistributedDataParallel does not shard the model"),
        (
            2,
            {"mesh": {"tensor": 2}, "wrapper": {"type": "dp"}, **TP},
            "wrapper.type: StepDataParallel cannot copy a model that is split over ranks",
        ),
        (
            1,
            {"compile": {"fulgraph": True}},
            "compile: compile has no argument 'fulgraph'; did you",
        ),
        (1, {"compile": "yes"}, "compile: must be true or false, step or a section of settings"),
        (1, {"freeze": "net.*"}, "freeze: must be a list of text"),
        (
            1,
            {"activation_checkpointing": {"bloks": []}},
            "no argument 'bloks'; did you mean blocks",
        ),
        (1, {"tensor_parallel": {"plans": {}}}, "tensor_parallel.plans: there is no such setting"),
        (
            2,
            {"wrapper": {"type": "auto", "ddp": {"find_unused": True}}},
            "wrapper.ddp.find_unused: StepDistributedDataParallel has no such argument; did you",
        ),
        (
            2,
            {"wrapper": {"type": "auto", "memory": 2}},
            "wrapper.memory: auto has no such argument",
        ),
    ],
)
def test_reported_before_any_process(ranks: int, sections: dict[str, Any], message: str) -> None:
    assert message in problems(ranks, **sections)


def test_all_at_once_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {type: torch.nn.Linear, in_features: 2, out_features: 2}\n"
        "init_device: meta\n"
        "mesh: {data: 2, tensor: 2}\n"
        "tensor_parallel:\n"
        "  plan:\n"
        "    net.up: columnwise\n"
        "launch: {nproc: 2}\n"
        "data: {train: {dataset: {type: parallel_runs.Sentences}, batch_size: 2}}\n"
        "train: {type: EpochTrainLoop, max_epochs: 1}\n"
        "optimizer: {type: SGD, lr: 0.1}\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_sections(load_config(path))
    lines = str(caught.value).splitlines()
    for at, message in ((2, "init_device:"), (3, "mesh:"), (6, "tensor_parallel.plan.net.up:")):
        assert any(f"run.yaml:{at}: {message}" in line for line in lines), lines


@pytest.mark.parametrize(
    ("sections", "section", "message"),
    [
        ({"freeze": ["net.embedding"]}, "freeze", "did you mean net.embed"),
        ({"activation_checkpointing": ["Blok"]}, "activation_checkpointing", "did you mean Block"),
        ({"compile": {"blocks": ["Blok"]}}, "compile", "did you mean Block"),
        (
            {"mesh": {"tensor": 2}, "tensor_parallel": {"plan": {"net.hed": "colwise"}}},
            "tensor_parallel.plan",
            "did you mean net.head",
        ),
        (
            {"mesh": {"tensor": 5}, "tensor_parallel": {"plan": {"net.head": "colwise"}}},
            "tensor_parallel.plan",
            "out_features=12, which 5 ranks cannot split evenly",
        ),
    ],
)
def test_reported_when_the_model_is_there(
    sections: dict[str, Any], section: str, message: str
) -> None:
    """`stepwrap check` finds them in one process."""
    ranks = sections.get("mesh", {}).get("tensor", 1)
    with pytest.raises(BuildError, match=message) as caught:
        build_parts(read_sections(settings(**sections), ranks))
    assert caught.value.section == section


def test_one_process_builds_the_parts_of_several() -> None:
    run = read_sections(settings(mesh={"data": 2, "tensor": 2}, **TP), 4)
    assert build_parts(run).model.data_group is None
