"""Settings that differ between ranks, or are wrong on one, raise the same error on all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import gathered, on_ranks, raises_with
from step_models import classifier
from torch import nn

from stepwrap.wrappers import (
    Preparation,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    build_mesh,
    wrap_model,
)

DDP, FSDP = StepDistributedDataParallel, StepFullyShardedDataParallel
Case = Callable[[int], Any]


def _split(plan: dict[str, str]) -> Any:
    mesh = build_mesh({"tensor": 2})
    return wrap_model(None, classifier(), mesh=mesh, prepare=Preparation(tensor_parallel=plan))


def _prepared(kind: Any, **settings: Any) -> Any:
    return wrap_model(kind, classifier(), prepare=Preparation(**settings))


def _frozen() -> nn.Module:
    model = classifier()
    model.net[0].requires_grad_(False)
    return model


# Cases in which the ranks differ, by a part of the error's text.
DIFFERENT: dict[str, Case] = {
    "'freeze' is [] on rank 0 and ['net.0.weight'": lambda rank: _prepared(
        DDP, freeze=["net.0"] if rank else []
    ),
    "'activation_checkpointing' is None on rank 0 and ['net.0'] on rank 1": lambda rank: _prepared(
        DDP, activation_checkpointing=["net.0"] if rank else None
    ),
    "'compile' is [] on rank 0 and ['net.2'] on rank 1": lambda rank: _prepared(
        FSDP, compile={"blocks": ["net.2"]} if rank else False
    ),
    "'wrapper' is StepFullySharded": lambda rank: wrap_model(DDP if rank else FSDP, classifier()),
    "'tensor_parallel' is [('net.0', 'colwise')] on rank 0": lambda rank: _split(
        {"net.2": "rowwise"} if rank else {"net.0": "colwise"}
    ),
    "'net.0.weight.requires_grad' is True on rank 0 and False on rank 1": lambda rank: FSDP(
        _frozen() if rank else classifier()
    ),
    "'net.0.weight' is ((16, 6), 'torch.float32') on rank 0": lambda rank: FSDP(
        classifier(torch.float64 if rank else torch.float32)
    ),
    "'shard' is [] on rank 0 and ['net.0', 'net.2'] on rank 1": lambda rank: FSDP(
        classifier(), shard="Linear" if rank else None
    ),
    "'reshard_after_forward' is True on rank 0 and False": lambda rank: FSDP(
        classifier(), reshard_after_forward=not rank
    ),
    "'mixed_precision' is ": lambda rank: FSDP(
        classifier(), mixed_precision={"param_dtype": "bfloat16"} if rank else None
    ),
}
# Cases in which only one rank is wrong.
WRONG: dict[str, Case] = {
    "no parameter of the model has the name": lambda rank: _prepared(
        DDP, freeze=["net.7"] if rank else []
    ),
    "colwise can split only Linear": lambda rank: _split({"net.1" if rank else "net.0": "colwise"}),
    "find_unused": lambda rank: wrap_model(
        DDP, classifier(), **({"find_unused_paramters": True} if rank else {})
    ),
    "shard": lambda rank: FSDP(classifier(), **({"shart": "Linear"} if rank else {})),
    "sharding_strategy NO_SHARD": lambda rank: FSDP(
        classifier(), sharding_strategy="NO_SHARD" if rank else "FULL_SHARD"
    ),
    "'Lineer'": lambda rank: FSDP(classifier(), shard="Lineer" if rank else "Linear"),
}


@on_ranks(2)
def test_all_ranks_raise_the_same_error() -> None:
    for text, case in (DIFFERENT | WRONG).items():
        with pytest.raises((ValueError, TypeError)) as caught:
            case(dist.get_rank())
        (kind, message), other = gathered((type(caught.value).__name__, str(caught.value)))
        assert (kind, message) == other
        assert text in message
        assert message.startswith("on rank 1: ") or text in DIFFERENT


@on_ranks(4)
def test_over_two_axes() -> None:
    mesh = build_mesh({"replicate": 2, "shard": 2})
    shard = "Linear" if dist.get_rank() == 3 else None
    with raises_with(ValueError, "'shard' is [] on rank 0 and ['net.0', 'net.2'] on rank 3"):
        FSDP(classifier(), mesh=mesh, shard=shard)


class CustomError(Exception):
    pass


def failing_policy(**_: Any) -> bool:
    if dist.get_rank():
        raise CustomError("of the user")
    return True


@on_ranks(2)
def test_a_custom_error_of_one_rank() -> None:
    with pytest.raises(CustomError, match="^on rank 1: of the user$") as caught:
        FSDP(classifier(), auto_wrap_policy=failing_policy)
    assert isinstance(caught.value.__cause__, CustomError) == bool(dist.get_rank())
