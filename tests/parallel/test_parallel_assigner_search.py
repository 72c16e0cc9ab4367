"""The search finds the best placements, also if only few fit."""

import random
from typing import Any

import pytest
import torch
from marks import slow
from placed import Placed, overflows, written_out
from torch import Tensor

from stepwrap.parallel import ModelAssigner
from stepwrap.parallel.placement import search as _placement_search

CASES = 200
SHAPES = [(2, 6), (3, 8), (4, 7), (5, 6), (6, 5), (10, 2), (7, 3)]


def a_case(seed: int) -> dict[str, Any]:
    """Return the arguments of one assigner, its sizes loose or tight."""
    draw = random.Random(seed)
    models, devices = draw.choice(SHAPES)
    sizes = [draw.uniform(10, 400) for _ in range(models)]
    weights = [draw.uniform(0.6, 1.4) for _ in range(devices)]
    room = sum(sizes) * draw.choice([1.1, 1.3, 2, 10]) / sum(weights)
    dense = draw.choice([0.2, 0.5, 1])
    pairs = [(i, j) for i in range(models) for j in range(models) if draw.random() < dense]
    names = [f"cuda:{index}" for index in range(devices - 1)] + ["cpu"]
    return {
        "models": [Placed()] * models,
        "model_connection": {pair: draw.uniform(0, 5) for pair in pairs if pair[0] != pair[1]},
        "connection_weight": draw.choice([0.5, 2, 10]),
        "complexity_match_weight": draw.choice([0.5, 1, 10]),
        "max_mem_ratio": 1,
        "sizes_mib": sizes,
        "free_mib": dict(zip(names, [weight * room for weight in weights], strict=True)),
        "compute": {name: draw.uniform(0.1, 1) for name in names},
        "iterations": 5,
    }


def every_cost(case: dict[str, Any]) -> Tensor:
    """Return the cost of every placement of `case` that fits."""
    sizes = torch.tensor(case["sizes_mib"], dtype=torch.float64)
    free = torch.tensor([*case["free_mib"].values()], dtype=torch.float64)
    compute = torch.tensor([*case["compute"].values()], dtype=torch.float64)
    connection = torch.zeros(len(sizes), len(sizes), dtype=torch.float64)
    for pair, strength in case["model_connection"].items():
        connection[pair] = strength
    distance = torch.ones(len(free), len(free), dtype=torch.float64)
    distance[-1], distance[:, -1] = 10, 10
    distance.fill_diagonal_(0)
    every = torch.cartesian_prod(*[torch.arange(len(free))] * len(sizes))
    every = every[~overflows(every, sizes, free)]
    weights = (case["connection_weight"], case["complexity_match_weight"])
    return written_out(every, sizes, compute, connection, distance, weights)


@pytest.mark.parametrize("exhaustive", [True, *slow(False)])
def test_random_cases_against_every_placement(
    exhaustive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exhaustive:
        # Use the search for larger cases on small ones, whose best placement is known.
        monkeypatch.setattr(_placement_search, "EXHAUSTIVE_PLACEMENTS", 0)
    good = possible = impossible = 0
    while possible < CASES:
        case = a_case(possible + impossible)
        costs = every_cost(case)
        if not len(costs):
            impossible += 1
            with pytest.raises(RuntimeError, match="^Estimated model will use"):
                ModelAssigner(**case)
            continue
        possible += 1
        # It must not raise, because some placement fits.
        total = ModelAssigner(**case).costs["total"]
        assert total > float(costs.min()) * (1 - 1e-9)
        good += total <= float(costs.min()) * (1 + 1e-9 if exhaustive else 1.05)
    assert impossible > 10
    assert good >= CASES * (1 if exhaustive else 0.95)


@pytest.mark.parametrize("seed", range(5))
def test_the_only_placement_that_fits_is_found(seed: int) -> None:
    draw = random.Random(seed)
    # Five models fill each of eight devices exactly.
    sizes, free = [], {}
    for index in range(8):
        device_sizes = [float(draw.randint(3, 60)) for _ in range(5)]
        sizes += device_sizes
        free[f"cuda:{index}"] = sum(device_sizes)
    draw.shuffle(sizes)
    links = {(i, draw.randrange(40)): draw.random() for i in range(40)}
    assigner = ModelAssigner(
        [Placed()] * 40, links, max_mem_ratio=1, sizes_mib=sizes, free_mib=free, iterations=0
    )
    for name, room in free.items():
        device = torch.device(name)
        placed = zip(sizes, assigner.assignment, strict=True)
        assert sum(size for size, where in placed if where == device) <= room


def test_fifty_models_on_eight_devices_keep_their_groups() -> None:
    draw = random.Random(0)
    group = [index % 7 for index in range(50)]
    links = {(i, j): 1.0 for i in range(50) for j in range(i) if group[i] == group[j]}
    links |= {(draw.randrange(50), draw.randrange(50)): 0.01 for _ in range(40)}
    free = {f"cuda:{index}": 1000 for index in range(7)} | {"cpu": 1000}
    assigner = ModelAssigner([Placed()] * 50, links, sizes_mib=[10] * 50, free_mib=free)
    together = {}
    for name, device in zip(group, assigner.assignment, strict=True):
        together.setdefault(name, set()).add(device)
    assert all(len(devices) == 1 for devices in together.values())
    assert len(set(assigner.assignment)) == 7
    assert torch.device("cpu") not in assigner.assignment


def test_optimize_placement_is_one_step_of_the_objective() -> None:
    torch.manual_seed(0)
    sizes, capacities = torch.tensor([[30.0, 20, 50]]), torch.tensor([[40.0, 25]])
    compute = torch.tensor([[1.0, 0.5]])
    connection = torch.tensor([[1.0, 2, 0], [0, 0, 1], [0.5, 0, 0]])
    distance = torch.tensor([[0.0, 10], [10, 0]])
    logits = torch.randn(3, 2)
    expected = logits.clone().requires_grad_()
    shares = expected.softmax(-1)
    apart = shares @ (distance / 20) @ shares.T
    apart = apart - torch.diag(apart.diagonal())
    cost = (
        2 * (connection / 4.5 * apart).sum()
        + 0.01 * torch.relu(sizes @ shares - capacities).mean()
        + 3 * ((sizes / 100) @ shares - compute / 1.5).square().mean()
        + 0.7 * -(shares * shares.log()).sum(-1).mean()
    )
    cost.backward()
    placement = logits.clone().requires_grad_()
    optimizer, weights = torch.optim.SGD([placement], lr=0.1), (2, 0.01, 3, 0.7)
    before = ModelAssigner.optimize_placement(
        optimizer, placement, sizes, capacities, sizes, compute, connection, distance, *weights
    )
    torch.testing.assert_close(before, cost.detach())
    torch.testing.assert_close(placement.detach(), logits - 0.1 * expected.grad)
