"""The state of FSDP2 that torch does not document: what is used of it, and what if it changes."""

from typing import Any

import pytest
import torch
from fsdp_runs import network, own_batches
from ranks import run_ranks
from step_models import sgd
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stepwrap.wrappers import StepFullyShardedDataParallel, SupervisedModel
from stepwrap.wrappers.fsdp.torch_internals import CHECKED, groups_of, whole_of

CHANGED = (
    f"torch has changed the state of FSDP2 since {CHECKED}: look at what "
    "wrappers/fsdp/torch_internals.py reads, and write the new version there"
)


def _model() -> Any:
    bare = SupervisedModel(network("Net", torch.float64), nn.CrossEntropyLoss())
    return StepFullyShardedDataParallel(bare, shard=["Block"])


def _state() -> dict[str, Any]:
    """What the names hold between a forward under `no_sync` and the next one."""
    model = _model()
    planted = {name for name in vars(model.module) if callable(vars(model.module)[name])}
    with model.no_sync():
        model(*own_batches(0, torch.float64)[0], mode="loss")["loss"].backward()
    context = model.module._get_fsdp_state()._state_ctx
    units = [one for one in model.module.modules() if isinstance(one, FSDPModule)]
    groups = [group for unit in units for group in groups_of(unit)]
    params: list[Any] = [one for group in groups for one in group.fsdp_params]
    held: list[Any] = [whole_of(one) for one in params]
    return {
        "planted": planted,
        "ended": context.iter_forward_root is None,
        "queued": context.post_backward_final_callback_queued,
        "partial": {group._partial_reduce_output for group in groups},
        "dtypes": {getattr(group, "_orig_dtype", None) for group in groups},
        "cast": {vars(one).get("unsharded_accumulated_grad", "gone") for one in params},
        "shards": {isinstance(one.sharded_param, DTensor) for one in params},
        "held": sum(one is not None and one.grad is not None for one in held) == len(params),
        "reset": callable(units[0].reset_iter_state),
    }


def test_the_state_of_torch_is_as_it_was() -> None:
    # From 2.15 on it keeps neither of them.
    is_new = torch.__version__ >= (2, 15)
    for seen in run_ranks(_state, 2):
        assert seen == {
            "planted": set(),
            "ended": True,
            "queued": False,
            "partial": {None},
            "dtypes": {None if is_new else torch.float64},
            "cast": {"gone" if is_new else None},
            "shards": {True},
            "held": True,
            "reset": True,
        }, CHANGED


def _without(names: list[tuple[str, str]]) -> list[str]:
    """Wrap a model where torch lacks something; what is said."""
    told = []
    unit = next(one for one in _model().module.modules() if isinstance(one, FSDPModule))
    kinds = {
        "module": FSDPModule,
        "group": type(groups_of(unit)[0]),
        "backward": torch._C,
    }
    for kind, name in names:
        owner: Any = kinds[kind]
        kept = getattr(owner, name)
        delattr(owner, name)
        try:
            with pytest.raises(RuntimeError) as caught:
                _model()
        finally:
            setattr(owner, name, kept)
        told.append(str(caught.value))
    return told


def test_a_torch_that_has_changed_is_refused() -> None:
    names = [
        ("group", "_init_mp_dtypes"),
        ("group", "is_unsharded"),
        ("backward", "_current_graph_task_id"),
    ]
    for told in run_ranks(_without, 2, names):
        for (_, name), text in zip(names, told, strict=True):
            assert f".{name}, without which a fully sharded model could train wrongly" in text
            assert f"use torch {CHECKED}" in text


def _cannot_go_on() -> str:
    model = _model()
    handle = model.module.net.head.register_forward_hook(_fail)
    reset = FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        with pytest.raises(RuntimeError) as caught:
            model.train_step(own_batches(0, torch.float64)[0], sgd(model))
    finally:
        FSDPModule.reset_iter_state = reset  # type: ignore[method-assign]
        handle.remove()
    return str(caught.value)


def _fail(*_: Any) -> None:
    raise KeyError("this forward fails")


def test_a_torch_that_cannot_go_on_after_an_error() -> None:
    for told in run_ranks(_cannot_go_on, 2):
        assert "make the model and its wrapper again" in told
