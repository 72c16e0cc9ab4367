"""Whether a parameter is trained, said by its shard and by the whole one that layers see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..sharding.held_gradients import groups_of, take_down_dtypes
from ..torch_functions import uncompiled


class Flags:
    """Keeps ``requires_grad`` of shards and of whole parameters the same.

    FSDP2 takes it over from the shard where it gathers. Of what is gathered already a change of
    the shard would have no effect, and one of a whole parameter would be lost later.

    Args:
        units: what is gathered on its own.
    """

    def __init__(self, units: Iterable[nn.Module]) -> None:
        self._groups = [one for unit in units for one in groups_of(unit)]
        self._params = [one for group in self._groups for one in group.fsdp_params]
        self._known = self._of_shards()

    def before_forward(self) -> None:
        """Make them the same, as they were set last; not collective."""
        if torch.compiler.is_compiling():
            _untraced(self._meet)
        else:
            self._meet()

    def after_forward(self) -> None:
        """Let shards take over what the forward has changed; not collective."""
        if torch.compiler.is_compiling():
            _untraced(self._take_over)
        else:
            self._take_over()

    def _meet(self) -> None:
        shards = self._of_shards()
        if shards != self._of_whole(shards):
            # What is in shards, layers have not seen since: its whole parameters are of the past.
            gathered = [group.is_unsharded for group in self._groups for _ in group.fsdp_params]
            self._take_over(gathered)
            shards = self._of_shards()
            for one, flag in zip(self._params, shards, strict=True):
                _set(getattr(one, "_unsharded_param", None), flag)
            self._take_down()
        self._known = shards

    def _take_over(self, chosen: list[bool] | None = None) -> None:
        known = self._known
        now = self._of_whole(known)
        if now == known:
            return
        for at, one in enumerate(self._params):
            if now[at] is not known[at] and (chosen is None or chosen[at]):
                _set(one.sharded_param, now[at])
        self._take_down()

    def _take_down(self) -> None:
        for group in self._groups:
            take_down_dtypes(group)

    def _of_shards(self) -> list[bool]:
        return [one.sharded_param.requires_grad for one in self._params]

    def _of_whole(self, otherwise: list[bool]) -> list[bool]:
        try:
            return [one._unsharded_param.requires_grad for one in self._params]
        except AttributeError:
            # There are none before the first forward that uses them.
            pairs = zip(self._params, otherwise, strict=True)
            whole = [(getattr(one, "_unsharded_param", None), flag) for one, flag in pairs]
            return [flag if one is None else one.requires_grad for one, flag in whole]


@uncompiled("what is trained is looked at outside of graphs")
def _untraced(call: Any) -> None:
    call()


def _set(parameter: Any, flag: bool) -> None:
    if parameter is not None and parameter.requires_grad is not flag:
        parameter.requires_grad_(flag)
