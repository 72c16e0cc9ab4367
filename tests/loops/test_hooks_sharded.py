"""Hooks that read weights and gradients which are sharded over the ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from ranks import run_ranks
from sharded_runs import batch, contents, make_net, make_run, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stepwrap.loops import EMAHook, GradNormHook, LoopState, NanGuardHook, NonFiniteError
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel
from stepwrap.wrappers.layout import is_sharded, local_part

KINDS = [
    *(("fsdp", 2), ("tensor", 2)),
    *slow(("hsdp", 4), ("fsdp x tensor", 4), ("ddp x tensor", 4)),
]


def _scores(state: LoopState) -> torch.Tensor:
    """Return the scores of an evaluation; every rank must call this."""
    inputs, _ = batch(state, 99)
    with torch.inference_mode():
        return state.model.val_step([inputs])["preds"].clone()


def _evaluations(kind: str) -> dict[str, Any]:
    """Train, evaluate with the average, train more and evaluate again."""
    state = make_run(kind)
    ema: Any = state.stateful["hooks.ema"]
    scores: dict[str, Any] = {}
    for turn in range(2):
        train(state, range(2 * turn, 2 * turn + 2))
        plain = _scores(state)
        ema.on_eval_start(state)
        scores[f"average {turn}"] = _scores(state)
        ema.on_eval_end(state, {})
        scores[f"own {turn}"] = _scores(state)
        assert torch.equal(plain, scores[f"own {turn}"])
        assert not torch.equal(plain, scores[f"average {turn}"])
    return {**scores, **contents(state)}


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_evaluation_with_the_average_equals_one_process(kind: str, size: int) -> None:
    expected = _evaluations("single")
    data_ranks = {"tensor": 1, "fsdp x tensor": 2, "ddp x tensor": 2}.get(kind, size)
    for rank, got in enumerate(run_ranks(_evaluations, size, kind)):
        share = rank * data_ranks // size
        for name, expected_value in expected.items():
            if "." not in name:
                expected_value = expected_value.chunk(data_ranks)[share]
            torch.testing.assert_close(got[name], expected_value, rtol=2e-4, atol=1e-5, msg=name)


def _bare_fsdp() -> list[bool]:
    """FSDP2 without our wrapper keeps the outermost parameters gathered after an evaluation."""
    model = SupervisedModel(make_net(), nn.CrossEntropyLoss())
    fully_shard(model)
    wrapper = SingleDevice(model)
    state = LoopState(wrapper, OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    inputs = batch(state, 3)[0]
    ema = EMAHook(decay=0.5)
    ema.on_train_start(state)

    def scores() -> torch.Tensor:
        with torch.no_grad():
            return model(inputs, mode="tensor").clone()

    def step() -> None:
        state.optim_wrapper.update_params(model(*batch(state, 4), mode="loss")["loss"])
        state.step += 1
        ema.on_update(state)

    step()
    plain = scores()
    ema.on_eval_start(state)
    averaged = scores()
    saved = ema.state_dict()["model"]["net.0.weight"]
    ema.on_eval_end(state, {})
    back = scores()
    assert is_sharded(saved)
    return [torch.equal(plain, averaged), torch.equal(plain, back)]


def test_weights_gathered_for_a_forward_are_swapped_as_well() -> None:
    assert run_ranks(_bare_fsdp, 2) == [[False, True]] * 2


def _communication_of_average() -> int:
    state = make_run("fsdp")
    train(state, range(1))
    ema: Any = state.stateful["hooks.ema"]
    # Only this rank calls it, so a collective would hang.
    if dist.get_rank() == 0:
        for state.step in range(2, 5):
            ema.on_update(state)
        return len(ema.state_dict()["model"])
    return 0


def test_averaging_needs_no_other_rank() -> None:
    assert run_ranks(_communication_of_average, 2)[0] == 8


def _norms(kind: str, clip: bool) -> dict[str, Any]:
    state = make_run(kind, clip_grad={"max_norm": 0.1} if clip else None)
    norms, guard, scalars = GradNormHook(), NanGuardHook(check="all"), {}
    norms.on_train_start(state)
    train(state, range(2))
    for hook in (norms, guard):
        hook.collect_logs(state, scalars)
    return {name: float(value) for name, value in scalars.items()}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_norms_equal_one_process(kind: str, size: int, clip: bool) -> None:
    expected = _norms("single", clip)
    assert expected.keys() == {"grad_norm", "param_norm"}
    for got in run_ranks(_norms, size, kind, clip):
        assert got == pytest.approx(expected, rel=1e-5)


def _guarded(kind: str) -> str:
    state = make_run(kind)
    train(state, range(1))
    guard = NanGuardHook(check="all", every_steps=1)
    if dist.get_rank() == 1:
        local_part(state.model.module.net[0].weight).data[0, 1] = float("inf")
    with pytest.raises(NonFiniteError) as caught:
        guard.on_update(state)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_a_bad_part_is_named_with_its_rank(kind: str) -> None:
    rank_0, second = run_ranks(_guarded, 2, kind)
    assert rank_0 == second
    assert re.search(r"'net\.0\.weight' .*1 of 1024 .*not finite", rank_0)
    assert "at step 1 on rank 1" in rank_0


def _averages_are_parts() -> list[bool]:
    state = make_run("fsdp")
    train(state, range(1))
    saved = state.stateful["hooks.ema"].state_dict()["model"]
    return [isinstance(value, DTensor) for value in saved.values()]


def test_the_state_of_the_average_is_sharded() -> None:
    assert run_ranks(_averages_are_parts, 2) == [[True] * 8] * 2
