"""Placements follow from the documented objective and the sizes."""

import logging
import re

import pytest
import torch
from placed import Placed
from torch import nn

from stepwrap.parallel import ModelAssigner

TWO_GPUS = {"cuda:0": 1000, "cuda:1": 1000, "cpu": 1000}
APART = [["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"]]
TOGETHER = [["cuda:0", "cuda:0"], ["cuda:1", "cuda:1"]]


def two_models(size: float, free: dict[str, float], **settings: object) -> list[str]:
    """Place two connected models as machin's own tests do."""
    defaults = {"devices": ["cuda:0", "cuda:1", "cpu"], "complexity_match_weight": 10}
    assigner = ModelAssigner(
        [Placed(), Placed()],
        {(0, 1): 1},
        max_mem_ratio=0.7,
        cpu_weight=0.1,
        **{**defaults, "connection_weight": 1, **settings},
        free_mib=free,
        sizes_mib=[size, size],
    )
    assert [model.device for model in assigner._models.values()] == assigner.assignment
    return [str(device) for device in assigner.assignment]


def test_computing_alike_parts_and_connection_joins() -> None:
    assert two_models(10, TWO_GPUS) in APART
    joined = two_models(10, TWO_GPUS, connection_weight=10, complexity_match_weight=1)
    assert joined in TOGETHER


def test_sizes_part() -> None:
    strong = {"connection_weight": 100, "complexity_match_weight": 0}
    assert two_models(600, TWO_GPUS, **strong) in APART
    assert two_models(300, TWO_GPUS, **strong) in TOGETHER


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs that are not there are left out")
def test_gpus_that_are_not_there_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert two_models(10, {"cuda:0": 1000, "cpu": 1000}) == ["cuda:0", "cuda:0"]
    assert re.search("cuda:1 .*left out: 0 GPUs", caplog.text)
    assert two_models(10, {"cpu": 1000}) == ["cpu", "cpu"]
    assert two_models(10, {"cpu": 1000}, devices=None) == ["cpu", "cpu"]
    # No device is left, so the CPU is used with its current free memory.
    assigner = ModelAssigner([nn.Linear(2, 2)], {}, ["cuda:0"])
    assert assigner.assignment == [torch.device("cpu")]
    assert assigner.rooms[0].free_mib > 50


def test_too_much_for_all() -> None:
    with pytest.raises(RuntimeError, match="^Estimated model will use") as caught:
        two_models(100, {"cuda:0": 10, "cpu": 10})
    text = str(caught.value)
    assert re.search(r"209,715,200 bytes \(200 MiB\), .* 14,680,064 bytes \(14 MiB\)", text)
    assert "cuda:0: needed " in text
    assert "cpu: needed " in text
    assert re.search(r"allowed 7,340,032 .*= 0\.7 of 10,485,760 .*free", text)


@pytest.mark.parametrize("models", [3, 20])
def test_enough_for_all_but_not_on_any(models: int) -> None:
    sizes = [6.0] * models
    free = {f"cuda:{index}": 20 for index in range(models - 1)} | {"cpu": 10}
    with pytest.raises(RuntimeError, match="no placement fits") as caught:
        ModelAssigner([Placed()] * models, {}, free_mib=free, sizes_mib=sizes)
    assert caught.value.args[0].count("lacking 1,048,576 bytes (1 MiB)") == 1
    with pytest.raises(RuntimeError, match="model 0 alone.*any device"):
        ModelAssigner([Placed()], {}, free_mib={"cuda:0": 10, "cuda:1": 8}, sizes_mib=[6])


def test_one_that_is_too_large_is_named_among_many() -> None:
    free = {"cuda:0": 10, "cuda:1": 10}
    with pytest.raises(RuntimeError, match="for model 7 alone"):
        ModelAssigner([Placed()] * 30, {}, free_mib=free, sizes_mib=[0.1] * 7 + [6] + [0.1] * 22)


def test_costs_are_the_documented_terms() -> None:
    assigner = ModelAssigner(
        [Placed() for _ in range(3)],
        {(0, 1): 3, (1, 2): 1},
        devices=["cuda:0", "cpu"],
        max_mem_ratio=1,
        connection_weight=2,
        complexity_match_weight=5,
        free_mib=[7, 100],
        compute=[3, 1],
        sizes_mib=[4, 3, 3],
    )
    # The first two share the GPU: a quarter of the connection strength crosses devices, at half of
    # the total distance.
    assert assigner.placement == {
        "0": torch.device("cuda:0"),
        "1": torch.device("cuda:0"),
        "2": torch.device("cpu"),
    }
    assert assigner.costs == pytest.approx(
        {
            "connection": 0.25 * 0.5,
            "size": 0.0,
            "complexity": 0.05**2,
            "entropy": 0.0,
            "total": 2 * 0.125 + 5 * 0.0025,
        }
    )
    assert assigner.crossing == {("1", "2"): 1.0}
    assert assigner.report().splitlines() == [
        "device   size  allowed  computes  target  models",
        "cuda:0  7 MiB    7 MiB       70%     75%  0, 1",
        "cpu     3 MiB  100 MiB       30%     25%  2",
        "25% of the connections cross",
    ]


@pytest.mark.parametrize(
    ("connection", "free", "sizes"),
    [
        ({}, {"cuda:0": 10, "cuda:1": 10}, [1, 1]),
        ({(0, 1): 0}, {"cuda:0": 10, "cuda:1": 10}, [1, 1]),
        ({(0, 1): 1}, {"cpu": 10}, [1, 1]),
        ({(0, 1): 1}, {"cpu": 0, "cuda:0": 0}, [0, 0]),
        ({(0, 0): 1}, {"cuda:0": 10, "cuda:1": 0}, [1, 1]),
    ],
)
def test_nothing_is_divided_by_zero(
    connection: dict[tuple[int, int], float], free: dict[str, float], sizes: list[float]
) -> None:
    assigner = ModelAssigner([Placed(), Placed()], connection, free_mib=free, sizes_mib=sizes)
    assert all(0 <= cost < 2 for cost in assigner.costs.values())
    assert "nan" not in assigner.report()
    if connection != {(0, 1): 1} and free.get("cuda:1"):
        # Without connections equal GPUs share the work.
        assert len(set(assigner.assignment)) == 2


def test_the_global_random_state_plays_no_part() -> None:
    sizes = [float(1 + index % 7) for index in range(20)]
    links = {(index, (index * 3 + 1) % 20): 1.0 + index for index in range(20)}
    assignments = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        free = {f"cuda:{index}": 60 for index in range(4)}
        assigner = ModelAssigner([Placed()] * 20, links, free_mib=free, sizes_mib=sizes, seed=3)
        assert torch.equal(torch.get_rng_state(), before)
        assignments.append(assigner.assignment)
    assert assignments[0] == assignments[1]


def test_models_by_name_are_measured_and_moved() -> None:
    models = {"actor": nn.Linear(512, 512, bias=False), "critic": nn.Linear(512, 256, bias=False)}
    assigner = ModelAssigner(models, {("actor", "critic"): 1}, ["cpu"], free_mib=[8])
    assert assigner.sizes_mib == [2.0, 1.0]
    assert assigner.placement == dict.fromkeys(models, torch.device("cpu"))
    inputs = {"critic": torch.ones(1, 512), "actor": torch.ones(4, 512)}
    free = {"cuda:0": 8, "cuda:1": 8}
    options = {"free_mib": free, "compute": {"cuda:0": 1, "cuda:1": 8}, "move_models": False}
    # The model with more operations goes to the faster device.
    by_flops = ModelAssigner(models, {}, **options, example_inputs=inputs)
    assert [str(device) for device in by_flops.assignment] == ["cuda:1", "cuda:0"]
    by_hand = ModelAssigner(models, {}, **options, complexities={"actor": 1, "critic": 8})
    assert [str(device) for device in by_hand.assignment] == ["cuda:0", "cuda:1"]
    options["max_mem_ratio"] = 0.8
    adam = ModelAssigner(models, {}, **options, optimizer=torch.optim.Adam)
    assert adam.sizes_mib == pytest.approx([4.0, 2.0], abs=1e-4)


def test_models_that_share_parameters_stay_together_and_count_once() -> None:
    trunk = nn.Linear(512, 512, bias=False)
    models = {
        "actor": nn.Sequential(trunk, nn.Linear(512, 256, bias=False)),
        "other": nn.Linear(512, 512, bias=False),
        "critic": nn.Sequential(trunk, nn.Linear(512, 256, bias=False)),
    }
    free = {"cuda:0": 4.0, "cuda:1": 2.0}
    options = {"free_mib": free, "max_mem_ratio": 1, "move_models": False}
    assigner = ModelAssigner(models, {("critic", "other"): 9}, **options)
    assert assigner.sizes_mib == [3.0, 2.0, 1.0]
    assert [str(device) for device in assigner.assignment] == ["cuda:0", "cuda:1", "cuda:0"]
    with pytest.raises(RuntimeError, match="models actor, critic .*share parameters"):
        ModelAssigner(models, {}, **{**options, "free_mib": {"cuda:0": 3.5, "cuda:1": 3}})
