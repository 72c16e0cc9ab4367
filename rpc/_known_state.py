"""What a client knows that the server has: copies to compare a model with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._model_state import copied, on_cpu
from ._state_server import Mark, Update

# An integer of the same size, by which tensors are compared: NaN is itself, and -0 is not 0.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class KnownState:
    """The state with which a model was last pushed or pulled.

    Attributes:
        version: the model's.
        mark: the server's, None for none.
        state: the state.
        lacking: names of what belongs to it, but is not known here any more.
    """

    version: int = 0
    mark: Mark | None = None
    state: dict[str, Any] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)

    def belongs_to(self, own: Mapping[str, Any]) -> bool:
        """Return whether a model's state has the same names."""
        return own.keys() == self.state.keys() | self.lacking

    def changes(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return what of a model's state differs, on the CPU; not copied where it is there."""
        here = {name: on_cpu(value) for name, value in own.items()}
        return {
            name: value for name, value in here.items() if not _is_same(self.state.get(name), value)
        }

    def keep(self, changes: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Copy what was sent into what is known, without new memory where there is some."""
        for name, value in changes.items():
            kept = self.state.get(name)
            if value is not own[name]:
                self.state[name] = value
            elif kept is not None and _is_alike(kept, value):
                kept.copy_(value)
            else:
                self.state[name] = copied(value)

    def forget(self, names: Mapping[str, Any]) -> None:
        """Note that what is known under these names is not the server's."""
        self.lacking |= names.keys()
        for name in names:
            self.state.pop(name, None)

    def updated(self, update: Update) -> KnownState:
        """Return what is known after an update."""
        assert update.state is not None
        state = dict(update.state) if update.is_whole else {**self.state, **update.state}
        return KnownState(update.version, update.mark, state)


def _is_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return one.dtype == other.dtype and one.shape == other.shape


def _is_same(one: Any, other: Any) -> bool:
    if not _is_alike(one, other):
        return False
    bits = _BITS.get(one.element_size())
    return (
        torch.equal(one, other) if bits is None else torch.equal(one.view(bits), other.view(bits))
    )
