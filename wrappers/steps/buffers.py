"""Save and restore the buffers of a model, such as running statistics, on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..features import model_features
from ..unwrap import user_model

# For each buffer: the dict that holds it, its name in it, the buffer, and a copy of its values.
_Saved: TypeAlias = list[tuple[dict[str, Any], str, Tensor, Tensor]]


def save_buffers(model: nn.Module) -> _Saved:
    """Return the buffers of the model inside wrappers, with copies of their values."""
    return [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in user_model(model).modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


@torch.no_grad()
def restore_buffers(saved: _Saved) -> None:
    """Restore the tensors and their values; other objects may refer to the tensors."""
    for owner, name, buffer, value in saved:
        owner[name] = buffer.copy_(value)


@contextmanager
def buffers_of_first_rank(model: nn.Module) -> Iterator[None]:
    """Give all ranks the buffers of the first one; then give each rank its own ones back.

    Buffers that change inside this context keep their new values. Every rank must enter it.
    """
    features = model_features(model)
    own = save_buffers(model) if features.own_buffers else []
    features.sync_buffers()
    # Inference tensors have no versions, and cannot be restored outside of inference mode.
    own = [entry for entry in own if not entry[2].is_inference()]
    versions = [buffer._version for _, _, buffer, _ in own]
    try:
        yield
    finally:
        restore_buffers(
            [
                (owner, name, buffer, value)
                for (owner, name, buffer, value), version in zip(own, versions, strict=True)
                if owner.get(name) is buffer and buffer._version == version
            ]
        )
