"""Save and restore the buffers of a model, such as running statistics, on this rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...primitives.tensor_bits import tensor_bytes
from ..features import model_features
from ..unwrap import plain_name, user_model

# For each buffer: the dict that holds it, its name in it, the buffer, and a copy of its values.
_Saved: TypeAlias = list[tuple[dict[str, Any], str, Tensor, Tensor]]


def save_buffers(model: nn.Module, without: Iterable[nn.Module] = ()) -> _Saved:
    """Return the buffers of the model inside wrappers, with copies of their values.

    Args:
        model: the model or its wrapper.
        without: modules whose own buffers are left out.
    """
    left_out = set(without)
    return [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in user_model(model).modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and module not in left_out
    ]


@torch.no_grad()
def restore_buffers(saved: _Saved) -> None:
    """Restore the tensors and their values; other objects may refer to the tensors."""
    for owner, name, buffer, value in saved:
        owner[name] = buffer
        # torch never writes into an expanded tensor.
        if not _is_expanded(buffer):
            buffer.copy_(value)


def _is_expanded(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def transient_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers inside wrappers that are not in state dicts (``persistent=False``)."""
    return {
        plain_name(f"{path}.{name}".lstrip(".")): module._buffers[name]
        for path, module in user_model(model).named_modules()
        for name in sorted(module._non_persistent_buffers_set & module._buffers.keys())
        if module._buffers[name] is not None
    }


def digest(tensor: Tensor) -> str:
    """Return a hash of the values of a tensor."""
    if tensor.is_meta:
        return ""
    values = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return hashlib.sha256(tensor_bytes(values.detach().cpu()).numpy().tobytes()).hexdigest()


def count_changes(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def buffers_of_first_rank(model: nn.Module) -> Iterator[None]:
    """Give all ranks the buffers of the first one; then give each rank its own ones back.

    Buffers that change inside this context keep their new values. Every rank must enter it.
    """
    features = model_features(model)
    own_buffers = save_buffers(model) if features.own_buffers else []
    features.sync_buffers()
    # Inference tensors have no versions, and cannot be restored outside of inference mode.
    own_buffers = [entry for entry in own_buffers if not entry[2].is_inference()]
    versions = [buffer._version for _, _, buffer, _ in own_buffers]
    try:
        yield
    finally:
        restore_buffers(
            [
                (owner, name, buffer, value)
                for (owner, name, buffer, value), version in zip(own_buffers, versions, strict=True)
                if owner.get(name) is buffer and buffer._version == version
            ]
        )


@contextmanager
def uncounted_batch(wrapper: nn.Module, optim_wrapper: Any) -> Iterator[None]:
    """Give the training step in this context the weight 0, and leave no trace of it in buffers.

    A rank without data runs such steps, because other ranks wait for its communication. Layers that
    share their statistics with other ranks, which have the attribute ``leaves_out``, leave out the
    samples of this rank. All other buffers are restored at the end.

    Args:
        wrapper: the model wrapper whose ``train_step`` is called.
        optim_wrapper: an optimizer wrapper, or several, with a ``loss_weight``.
    """
    sharing: list[Any] = [
        module for module in wrapper.modules() if getattr(module, "shares_statistics", False)
    ]
    saved = save_buffers(wrapper, without=sharing)
    before, optim_wrapper.batch_counts = optim_wrapper.batch_counts, False
    for layer in sharing:
        layer.leaves_out = True
    try:
        yield
    finally:
        optim_wrapper.batch_counts = before
        for layer in sharing:
            layer.leaves_out = False
        restore_buffers(saved)
