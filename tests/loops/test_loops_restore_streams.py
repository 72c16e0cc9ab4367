"""Random streams of a run that resumes with another layout of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from ranks import run_ranks
from sharded_runs import contents, make_run, same, train
from torch import Tensor, nn

from stepwrap.loops import load_checkpoint, save_checkpoint, seed_rng


def _save(kind: str, folder: Path) -> tuple[Path, float]:
    state = make_run(kind)
    group = state.model.data_group
    seed_rng(7 + dist.get_rank(group))
    path = save_checkpoint(folder, state)
    return path, torch.rand(()).item()


def _drop(module: nn.Module, inputs: Any) -> tuple[Tensor]:
    return (nn.functional.dropout(inputs[0], 0.5),)


def _resume(kind: str, path: Path) -> tuple[float, dict[str, Tensor]]:
    state = make_run(kind, seed=3)
    load_checkpoint(path).restore(state)
    state.model.module.net[3].register_forward_pre_hook(_drop)
    drawn = torch.rand(()).item()
    train(state, range(2))
    return drawn, contents(state) | {
        f"own.{name}": value.detach().clone()
        for name, value in state.model.module.net[3].named_parameters()
        if "fsdp" not in kind
    }


@pytest.mark.parametrize(
    ("before", "after", "ranks", "sources"),
    [
        (("ddp", 2), "tensor", 2, [0, 0]),
        (("ddp x tensor", 4), "ddp", 2, [0, 2]),
        *slow(
            (("ddp", 4), "ddp x tensor", 4, [0, 0, 1, 1]),
            (("ddp", 2), "fsdp x tensor", 4, [0, 0, 1, 1]),
            (("ddp x tensor", 4), "ddp x tensor", 4, [0, 1, 2, 3]),
            (("tensor", 2), "ddp x tensor", 4, [0, 0, None, None]),
        ),
    ],
)
def test_tensor_groups_draw_alike(
    before: tuple[str, int], after: str, ranks: int, sources: list[int | None], tmp_path: Path
) -> None:
    saved = run_ranks(_save, before[1], before[0], tmp_path)
    resumed = run_ranks(_resume, ranks, after, saved[0][0])
    drawn = [rank_draws[0] for rank_draws in resumed]
    for value, source in zip(drawn, sources, strict=True):
        assert source is None or value == saved[source][1]
    size = 2 if "tensor" in after else 1
    assert len(set(drawn)) == ranks // size
    for rank_draw, second in zip(resumed[::size], resumed[size - 1 :: size], strict=True):
        assert rank_draw[0] == second[0]
    # With dropout, replicated weights stay equal on all ranks.
    weights = resumed[0][1]
    for _, rank_weights in resumed:
        assert all(torch.equal(value, weights[name]) for name, value in rank_weights.items())


def _train_with_split_dropout(kind: str, folder: Path) -> tuple[dict[str, Tensor], ...]:
    """Return the state after three steps of one run, and of one that resumes after the first."""
    results = []
    for resumes in (False, True):
        state = make_run(kind)
        seed_rng(7 + dist.get_rank(state.model.data_group))
        # Between the layers of the plan, where each rank of a tensor group has its own masks.
        state.model.module.net[2].register_forward_pre_hook(_drop, prepend=True)
        train(state, range(1))
        if resumes:
            path = save_checkpoint(folder, state)
            state = make_run(kind, seed=3)
            state.model.module.net[2].register_forward_pre_hook(_drop, prepend=True)
            load_checkpoint(path).restore(state)
        train(state, range(1, 3))
        results.append(contents(state))
    return (*results,)


@pytest.mark.parametrize(
    ("kind", "ranks"), [("tensor", 2), *slow(("ddp x tensor", 4), ("fsdp x tensor", 4))]
)
def test_split_dropout_resumes_exactly(kind: str, ranks: int, tmp_path: Path) -> None:
    for at_once, resumed in run_ranks(_train_with_split_dropout, ranks, kind, tmp_path):
        assert same(at_once, resumed)
