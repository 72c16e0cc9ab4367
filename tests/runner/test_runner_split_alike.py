"""Parameters replicated in a tensor group must get the same gradient on each rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
from parallel_runs import SEQUENCE_PLAN, settings, trained
from ranks import run_ranks

FORMS = [
    (2, {"mesh": {"tensor": 2}}),
    (4, {"mesh": {"data": 2, "tensor": 2}}),
    (4, {"mesh": {"data": 2, "tensor": 2}, "wrapper": {"type": "fsdp", "shard": ["Block"]}}),
]


def _catch_error(config: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        trained(config)
    return str(caught.value)


@pytest.mark.parametrize(("ranks", "form"), FORMS)
@pytest.mark.parametrize(
    ("left_out", "param_name", "optim"),
    [
        ("net.norm", "net.norm.weight", {}),
        ("net.blocks.*norm?", "net.blocks.0.norm1.weight", {"accumulative_counts": 2}),
        ("net.norm", "net.norm.weight", {"type": "AmpOptimWrapper", "dtype": "bfloat16"}),
    ],
)
@pytest.mark.slow
def test_norms_left_out_of_a_sequence_plan(
    ranks: int, form: dict[str, Any], left_out: str, param_name: str, optim: dict[str, Any]
) -> None:
    plan = {name: style for name, style in SEQUENCE_PLAN.items() if name != left_out}
    config = settings(ranks // 2, tensor_parallel={"plan": plan}, **form)
    if optim:
        config["optim_wrapper"] = optim
    for message in run_ranks(_catch_error, ranks, config):
        assert re.search(f"gradient of {param_name!r} must .*same .*tensor group", message)


@pytest.mark.parametrize(("ranks", "form"), FORMS)
@pytest.mark.slow
def test_a_whole_sequence_plan_passes_in_half_precision(ranks: int, form: dict[str, Any]) -> None:
    config = settings(ranks // 2, tensor_parallel={"plan": SEQUENCE_PLAN}, **form)
    config["model"]["net"]["dtype"] = "float32"
    config["optim_wrapper"] = {"type": "AmpOptimWrapper", "dtype": "bfloat16"}
    run_ranks(trained, ranks, config)
