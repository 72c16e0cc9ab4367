"""Invalid arguments raise errors that name the allowed values."""

from typing import Any

import pytest
import torch
from placed import Placed
from torch import nn

from stepwrap.parallel import ModelAssigner

FREE = {"cuda:0": 10, "cuda:1": 10}


def place(**settings: Any) -> ModelAssigner:
    options = {"models": [Placed(), Placed()], "model_connection": {}, "sizes_mib": [1, 1]}
    return ModelAssigner(**{**options, "free_mib": FREE, **settings})


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        (
            {"model_connection": {(0, 2): 1}},
            ValueError,
            r"model 2 does not exist; allowed are 0\.\.1",
        ),
        (
            {"model_connection": {(-1, 0): 1}},
            ValueError,
            r"model -1 does not exist; allowed are 0\.\.1",
        ),
        ({"model_connection": {(0, 1): -1}}, ValueError, r"\(0, 1\)\] must be 0 or more.*got -1"),
        ({"model_connection": {(0, 1): "x"}}, TypeError, "must be a number, got 'x'"),
        ({"model_connection": {0: 1}}, TypeError, "0 must be a pair of models"),
        ({"model_connection": {(0, 1.5): 1}}, TypeError, "1.5 is neither an index nor a name"),
        ({"model_connection": [(0, 1)]}, TypeError, "must be a dict .* got list"),
        ({"models": []}, ValueError, "at least one model"),
        ({"models": {"1": Placed(), 1: Placed()}}, ValueError, "names must differ as text"),
        ({"models": nn.Linear(2, 2)}, TypeError, "a list or dict of models, got one model"),
        ({"models": [Placed(), "actor"]}, TypeError, "model 1 is a str and has no method `to`"),
        ({"devices": ["cuda", "cpu"]}, ValueError, "'cuda' is not one device, it has no index"),
        ({"devices": ["gpu0"]}, ValueError, "'gpu0' is not a device; allowed are .cpu., .cuda"),
        ({"devices": ["mps"]}, ValueError, "with free_mib, other types with an index, such as"),
        ({"devices": [0]}, TypeError, "0 is not a device"),
        ({"devices": ["meta"]}, ValueError, "the meta device holds no values"),
        ({"devices": ["cpu", "cpu:0"]}, ValueError, "cpu is listed more than once"),
        ({"devices": ["xpu:0"], "free_mib": None}, ValueError, "free memory of xpu:0 is not known"),
        ({"free_mib": {"cuda": 1}}, ValueError, "'cuda' is not one device"),
        ({"free_mib": {"cuda:0": -1}}, ValueError, "free_mib of cuda:0 must be 0 or more"),
        ({"devices": ["cuda:0"]}, ValueError, "cuda:1 is not one of the devices \\(cuda:0\\)"),
        ({"devices": ["cpu"], "free_mib": [1, 2]}, ValueError, "got 2 numbers and 1 devices"),
        ({"compute": {"cpu": 1}}, ValueError, "compute: cpu is not one of the devices"),
        ({"compute": {"cuda:0": float("nan")}}, ValueError, "must be 0 or more, and finite"),
        ({"connection_weight": -1}, ValueError, "connection_weight must be 0 or more"),
        ({"entropy_weight": None}, TypeError, "entropy_weight must be a number, got None"),
        ({"max_mem_ratio": 1.5}, ValueError, "max_mem_ratio must be from 0 to 1, got 1.5"),
        ({"cpu_weight": -0.5}, ValueError, "cpu_weight must be"),
        ({"gpu_gpu_distance": float("inf")}, ValueError, "gpu_gpu_distance must be"),
        (
            {"model_size_multiplier": -2, "sizes_mib": None},
            ValueError,
            "model_size_multiplier must be",
        ),
        ({"iterations": 0.5}, ValueError, "iterations must be a whole number"),
        ({"iterations": -1}, ValueError, "iterations must be a whole number"),
        ({"sizes_mib": [1]}, ValueError, "sizes_mib must have one value per model: got 1"),
        ({"sizes_mib": None}, TypeError, "model must be a torch.nn.Module, got Placed"),
        ({"complexities": [1, -1]}, ValueError, "complexities of model 1 must be 0 or more"),
        ({"complexities": {"0": 1}}, ValueError, "complexities lacks the models 1"),
        ({"complexities": [1, 1], "example_inputs": [1, 1]}, ValueError, "not both"),
    ],
)
def test_mistakes(settings: dict[str, Any], kind: type[Exception], text: str) -> None:
    settings = {"models": [Placed(), Placed()], **settings}
    with pytest.raises(kind, match=text):
        place(**settings)


def test_other_devices_need_their_memory() -> None:
    assert place(free_mib={"mps:0": 10}).assignment == [torch.device("mps:0")] * 2


def test_a_wrong_name_has_the_nearest_one() -> None:
    models = {"actor": Placed(), "critic": Placed()}
    with pytest.raises(ValueError, match=r"'critik' \(actor, critic\).*mean 'critic'"):
        place(models=models, model_connection={("actor", "critik"): 1})


@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="needs a GPU that is not there")
def test_moving_to_a_gpu_that_is_not_there_moves_nothing() -> None:
    models = [nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2)]
    with pytest.raises(ValueError, match=r"cannot be moved to cuda:7.*move_models=False"):
        ModelAssigner(models, {}, free_mib={"cuda:7": 10})
    assigner = ModelAssigner(models, {}, free_mib={"cuda:7": 10}, move_models=False)
    assert assigner.assignment == [torch.device("cuda:7")] * 2


def test_a_model_that_cannot_be_moved_is_named() -> None:
    with pytest.raises(RuntimeError, match="model 0 .*moved .*cpu: Cannot copy"):
        ModelAssigner([nn.Linear(2, 2, device="meta")], {}, ["cpu"])


def test_numbers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    strength = {(0, 1): numpy.float32(2)}
    assert place(model_connection=strength, sizes_mib=numpy.ones(2)).crossing == {}
