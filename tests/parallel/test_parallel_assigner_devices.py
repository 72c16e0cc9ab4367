"""The free memory of a device if it is not given."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from placed import Placed
from torch import nn

from stepwrap.parallel import ModelAssigner, free_memory

GIB = 1024**3


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate two GPUs: one half used, one filled by this process's cache."""

    def no_pynvml(device: torch.device) -> int:
        raise ModuleNotFoundError("pynvml")

    free = {0: 8 * GIB, 1: 1 * GIB}
    reserved = {0: 3 * GIB, 1: 12 * GIB}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[device.index])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "utilization", no_pynvml)


@pytest.mark.usefixtures("two_gpus")
def test_free_memory_and_load_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"models": [Placed()], "model_connection": {}, "sizes_mib": [10]}
    rooms = ModelAssigner(**options).rooms
    assert [(str(room.device), room.free_mib, room.compute) for room in rooms] == [
        ("cuda:0", 8 * 1024, 1.0),
        ("cuda:1", 10 * 1024, 1.0),
    ]
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 75 * device.index)
    rooms = ModelAssigner(**options, devices=["cpu", "cuda:1", "cuda:2"], cpu_weight=0.2).rooms
    assert [(str(room.device), room.compute) for room in rooms] == [("cpu", 0.2), ("cuda:1", 0.25)]
    rooms = ModelAssigner(**options, devices=["cuda:0"], free_mib=[100]).rooms
    assert rooms[0].free_mib == 100


@pytest.mark.parametrize("options", [{"compute": {"cpu": 3}}, {"free_mib": [20], "compute": [3]}])
def test_numbers_for_the_cpu_that_is_the_default(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (room,) = ModelAssigner([Placed()], {}, sizes_mib=[1], **options).rooms
    assert (str(room.device), room.compute) == ("cpu", 3)
    if "free_mib" in options:
        assert room.free_mib == 20


def test_ram_with_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=64 * 1024**2)
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(virtual_memory=lambda: memory))
    assert free_memory("cpu") == 64 * 1024**2
    # The models' own memory counts as free.
    model = nn.Linear(1024, 1024, bias=False)
    (room,) = ModelAssigner([model, model], {}, ["cpu"]).rooms
    assert room.free_mib == 68


def test_ram_without_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with open("/proc/meminfo") as file:
        total = float(file.readline().split()[1]) / 1024
    (room,) = ModelAssigner([Placed()], {}, ["cpu"], sizes_mib=[1]).rooms
    assert 64 < room.free_mib < total


@pytest.mark.gpu
def test_models_go_to_a_real_gpu() -> None:
    models = [nn.Linear(64, 64), nn.Linear(64, 64)]
    assigner = ModelAssigner(models, {(0, 1): 1}, example_inputs=[torch.ones(2, 64)] * 2)
    for model, device in zip(models, assigner.assignment, strict=True):
        assert device.type == "cuda"
        assert model.weight.device == device
    free, total = torch.cuda.mem_get_info(assigner.rooms[0].device)
    assert 0 < assigner.rooms[0].free_mib <= total / 1024**2
    again = ModelAssigner(models, {(0, 1): 1})
    assert again.assignment == assigner.assignment
