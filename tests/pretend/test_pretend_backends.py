"""Which transport ranks choose, by the devices that they see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

pytestmark = pytest.mark.pretend

PROGRAM = """
import json
import logging
import sys

import torch.distributed as dist
from torch import nn

from stepwrap.runner import launch
from stepwrap.wrappers import StepDistributedDataParallel


def main():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("stepwrap").addHandler(handler)
    model = StepDistributedDataParallel(nn.Linear(2, 2).cuda())
    return str(model.module.weight.device), dist.get_backend_config(), records


print(json.dumps(launch(main, backend=sys.argv[1])))
"""


def _run(folder: Path, backend: str, devices: list[dict[str, str]]) -> list[list[Any]]:
    """Run a rank with the variables of each entry; return device, back-end and warnings."""
    (folder / "program.py").write_text(PROGRAM)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(len(devices)), "LOCAL_WORLD_SIZE": str(len(devices))}
    processes = [
        subprocess.Popen(
            [sys.executable, "program.py", backend],
            cwd=folder,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **variables},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, variables in enumerate(devices)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    return [json.loads(output)[str(rank)] for rank, output in enumerate(outputs)]


BOTH = "cpu:gloo,cuda:nccl"
ONE_EACH = [{"PRETEND_CUDA": "1", "CUDA_VISIBLE_DEVICES": index} for index in ("0", "1")]


@pytest.mark.parametrize(
    ("devices", "used"),
    [([{}, {}], ["cuda:0", "cuda:1"]), (ONE_EACH, ["cuda:0", "cuda:0"])],
)
def test_ranks_with_a_device_of_their_own_use_nccl(
    tmp_path: Path, devices: list[dict[str, str]], used: list[str]
) -> None:
    for (device, backend, records), expected in zip(
        _run(tmp_path, "auto", devices), used, strict=True
    ):
        assert (device, backend, records) == (expected, BOTH, [])


@pytest.mark.parametrize(
    ("backend", "devices"),
    [("auto", [{"PRETEND_CUDA": "1"}] * 2), ("gloo", [{}, {}])],
)
def test_gloo_for_a_model_on_a_device_is_a_warning(
    tmp_path: Path, backend: str, devices: list[dict[str, str]]
) -> None:
    results = _run(tmp_path, backend, devices)
    assert [used for _, used, _ in results] == ["cpu:gloo,cuda:gloo"] * 2
    (warning,) = results[0][2]
    assert "gloo" in warning
    assert f"visible here: {devices[0].get('PRETEND_CUDA', '2')}, processes: 2" in warning
    assert results[1][2] == []
