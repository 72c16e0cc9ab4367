"""The modules of a model from which gathering starts, and when they are gathered and freed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..sharding.layout import holders
from ..torch_functions import refuse_double_backward, uncompiled
from .torch_internals import (
    check_torch,
    drop_gradients,
    groups_of,
    is_interrupted,
    is_running,
    note_dtypes,
    reset,
    whole_flags,
    whole_of,
)


class Root:
    """A module that ``fully_shard`` was applied to last, with the units inside it.

    It also keeps ``requires_grad`` of shards and of whole parameters the same: FSDP2 takes it over
    from the shard where it gathers, so of what is gathered already a change of the shard would
    have no effect, and one of a whole parameter would be lost later.

    Attributes:
        module: the root.
        steps_itself: whether a step of the model may call its children by themselves.
        units: all that is gathered on its own, the root first.
    """

    def __init__(self, module: nn.Module, *, steps_itself: bool) -> None:
        self.module: Any = module
        self.steps_itself = steps_itself
        self.units = [one for one in module.modules() if isinstance(one, FSDPModule)]
        for unit in self.units:
            check_torch(unit)
            unit.register_forward_hook(_refuse_double_backward)
        self._groups = [group for unit in self.units for group in groups_of(unit)]
        self._params = [one for group in self._groups for one in group.fsdp_params]
        self._known = _shard_flags(self._params)
        self._holds = self._held = False
        self._gathered_once = False
        self._inside = self._depth = 0
        holders.add(self)
        # In front of torch's own hook, which gathers.
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the forwards inside on their ranks."""
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before

    @contextmanager
    def inside(self, *, whole: bool) -> Iterator[None]:
        """Run what uses parameters outside of a forward; with ``whole``, gather them."""
        self._begin()
        if whole:
            self.module.unshard()
        self._inside += 1
        depth = self._depth
        try:
            yield
        finally:
            self._inside -= 1
            self._depth = depth

    def free(self) -> None:
        """Leave nothing gathered: after a forward without gradients no backward would free it."""
        for unit in self.units:
            unit.reshard()

    def settle(self) -> None:
        """Let the module have its shards for parameters, unless it is being used."""
        if not self._inside and not self._depth and not is_running(self.module):
            self.free()

    def leave(self) -> None:
        """Take it that no forward runs: hooks of modules do not hear of an interrupt."""
        self._depth = 0

    def recover(self) -> None:
        """Let the next forward begin anew, where one or a backward has raised.

        The gradients of the step that raised are dropped, and those of its window held so far.
        """
        # A model that calls itself in its forward has not failed.
        if not self._inside and not self._depth and is_interrupted(self.module):
            reset(self.module)
            self.drop_gradients()

    def drop_gradients(self, chosen: Collection[int] | None = None) -> None:
        """Drop gradients that wait for a reduction: all, or of parameters with these ids."""
        for group in self._groups:
            drop_gradients(group, chosen)

    def gathered(self, parameters: Iterable[Tensor]) -> Tensor | None:
        """The first of ``parameters`` that was put together for a forward and is freed after it."""
        whole = {id(whole_of(one)) for one in self._params}
        return next((one for one in parameters if id(one) in whole), None)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        try:
            # torch keeps the states of modules in a dict that garbage collection may shrink just
            # when the compiler walks through it.
            _untraced(self._begin)
            if not self._depth:
                _untraced(self._unify_flags)
        finally:
            # The hook after it is called in any case.
            self._depth += 1

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # Another hook may have raised before the first of ours.
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            _untraced(self._take_over)

    def _begin(self) -> None:
        self.recover()
        if torch.is_inference_mode_enabled():
            self._gather_once()
        elif torch.is_grad_enabled() and self._holds is not self._held:
            # torch looks at this in backward, which runs outside of `optim_context`.
            self.module.set_requires_gradient_sync(not self._holds)
            self._held = self._holds

    def _gather_once(self) -> None:
        """Make the memory of whole parameters outside of inference mode.

        It is made at the first use and reused, and what is made inside can never be trained.
        """
        if self._gathered_once:
            return
        self._gathered_once = True
        with torch.inference_mode(mode=False), torch.no_grad():
            for unit in self.units:
                unit.unshard()
                unit.reshard()

    def _unify_flags(self) -> None:
        """Make shards and whole parameters the same, as they were set last."""
        shards = _shard_flags(self._params)
        if shards != whole_flags(self._params, shards):
            # Where the shard is in the layers, its whole parameter is of the past.
            self._take_over([g.is_unsharded for g in self._groups for _ in g.fsdp_params])
            shards = _shard_flags(self._params)
            for one, flag in zip(self._params, shards, strict=True):
                _set_flag(whole_of(one), flag)
            note_dtypes(self._groups)
        self._known = shards

    def _take_over(self, chosen: list[bool] | None = None) -> None:
        """Let shards have what was set of whole parameters."""
        known = self._known
        now = whole_flags(self._params, known)
        if now == known:
            return
        for at, one in enumerate(self._params):
            if now[at] is not known[at] and (chosen is None or chosen[at]):
                _set_flag(one.sharded_param, now[at])
        note_dtypes(self._groups)


def _shard_flags(parameters: Iterable[Any]) -> list[bool]:
    return [one.sharded_param.requires_grad for one in parameters]


def _refuse_double_backward(unit: nn.Module, inputs: Any, output: Any) -> None:
    refuse_double_backward(
        output,
        "meets blocks that fsdp has freed by then; compute it inside of the model's forward with "
        "no block named in shard, or use ddp",
    )


def _set_flag(parameter: Any, flag: bool) -> None:
    if parameter is not None and parameter.requires_grad is not flag:
        parameter.requires_grad_(flag)


def _untraced(call: Callable[[], None]) -> None:
    if torch.compiler.is_compiling():
        _outside_of_graphs(call)
    else:
        call()


@uncompiled("what is trained is looked at outside of graphs")
def _outside_of_graphs(call: Callable[[], None]) -> None:
    call()
