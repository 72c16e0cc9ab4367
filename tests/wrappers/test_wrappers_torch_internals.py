"""Undocumented state of FSDP2 that the library uses, and errors if it changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fsdp_runs import own_batches, supervised
from on_ranks import on_ranks, raises_with
from step_models import sgd
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stepwrap.wrappers import StepFullyShardedDataParallel
from stepwrap.wrappers.fsdp.torch_internals import CHECKED, get_groups, get_unsharded

CHANGED = (
    f"torch has changed the state of FSDP2 since {CHECKED}: look at what "
    "wrappers/fsdp/torch_internals.py reads, and write the new version there"
)


def _model() -> Any:
    return StepFullyShardedDataParallel(supervised(), shard=["Block"])


@on_ranks(2)
def test_the_state_of_torch_is_as_it_was() -> None:
    """Checks the private attributes between a forward under `no_sync` and the next one."""
    # From 2.15 on torch does not set `_orig_dtype` and `unsharded_accumulated_grad`.
    is_new = torch.__version__ >= (2, 15)
    model = _model()
    planted = {name for name in vars(model.module) if callable(vars(model.module)[name])}
    with model.no_sync():
        model(*own_batches(0, torch.float64)[0], mode="loss")["loss"].backward()
    context = model.module._get_fsdp_state()._state_ctx
    units = [module for module in model.module.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in get_groups(unit)]
    params: list[Any] = [param for group in groups for param in group.fsdp_params]
    unsharded: list[Any] = [get_unsharded(param) for param in params]
    dtypes = {getattr(group, "_orig_dtype", None) for group in groups}
    cast = {vars(param).get("unsharded_accumulated_grad", "gone") for param in params}
    assert planted == set(), CHANGED
    assert context.iter_forward_root is None, CHANGED
    assert not context.post_backward_final_callback_queued, CHANGED
    assert {group._partial_reduce_output for group in groups} == {None}, CHANGED
    assert dtypes == {None if is_new else torch.float64}, CHANGED
    assert cast == {"gone" if is_new else None}, CHANGED
    assert all(isinstance(param.sharded_param, DTensor) for param in params), CHANGED
    assert all(param is not None and param.grad is not None for param in unsharded), CHANGED
    assert callable(units[0].reset_iter_state), CHANGED


@contextmanager
def _remove_name(owner: Any, name: str) -> Iterator[None]:
    value = getattr(owner, name)
    delattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, value)


@on_ranks(2)
def test_a_changed_torch_is_refused() -> None:
    unit = next(module for module in _model().module.modules() if isinstance(module, FSDPModule))
    group = type(get_groups(unit)[0])
    for owner, name in (
        (group, "_init_mp_dtypes"),
        (group, "is_unsharded"),
        (torch._C, "_current_graph_task_id"),
    ):
        texts = (
            f".{name}, without which a fully sharded model could train wrongly",
            f"use torch {CHECKED}",
        )
        with _remove_name(owner, name), raises_with(RuntimeError, *texts):
            _model()


@on_ranks(2)
def test_an_error_if_torch_cannot_reset_its_state() -> None:
    model = _model()
    handle = model.module.net.head.register_forward_hook(_fail)
    with (
        _remove_name(FSDPModule, "reset_iter_state"),
        raises_with(RuntimeError, "create the model and its wrapper again"),
    ):
        model.train_step(own_batches(0, torch.float64)[0], sgd(model))
    handle.remove()


def _fail(*_: Any) -> None:
    raise KeyError("this forward fails")
