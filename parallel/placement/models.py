"""The modules that are placed: what they share, where they are, and how they move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_MIB = 1024**2


def sharing(models: Mapping[str, Any]) -> list[list[int]]:
    """Return groups of models that share parameters, directly or by others; most have one model."""
    groups: list[tuple[set[int], list[int]]] = []
    for index, model in enumerate(models.values()):
        held = model.parameters() if isinstance(model, nn.Module) else ()
        parts, members = {id(one) for one in held}, [index]
        joined = [group for group in groups if not parts.isdisjoint(group[0])]
        groups = [group for group in groups if parts.isdisjoint(group[0])]
        for their_parts, others in joined:
            parts |= their_parts
            members += others
        groups.append((parts, sorted(members)))
    return sorted(members for _, members in groups)


def held_mib(models: Mapping[str, Any]) -> dict[torch.device, float]:
    """Return what the modules among `models` take now, by device, in MiB.

    They will leave that place or stay in it, so for them it is free.
    """
    sizes: dict[torch.device, float] = defaultdict(float)
    for tensor in {id(one): one for one in _tensors(models)}.values():
        size = tensor.numel() * tensor.element_size() / _MIB
        sizes[torch.device("cpu") if tensor.device.type == "cpu" else tensor.device] += size
    return dict(sizes)


def move(models: Mapping[str, Any], devices: Sequence[torch.device]) -> None:
    """Move each model to its device.

    Raises:
        ValueError: a GPU is not there; nothing has been moved.
        RuntimeError: a model could not be moved.
    """
    gpus = torch.cuda.device_count()
    for (name, model), device in zip(models.items(), devices, strict=True):
        if isinstance(model, nn.Module) and device.type == "cuda" and device.index >= gpus:
            raise ValueError(
                f"model {name} cannot be moved to {device}: {gpus} GPUs are available here; "
                "move_models=False makes the placement alone"
            )
    for (name, model), device in zip(models.items(), devices, strict=True):
        try:
            model.to(device)
        except Exception as error:
            raise RuntimeError(
                f"model {name} could not be moved to {device}: {error}; move_models=False makes "
                "the placement alone"
            ) from error


def _tensors(models: Mapping[str, Any]) -> Iterator[Tensor]:
    for model in models.values():
        if isinstance(model, nn.Module):
            yield from (one for one in model.parameters() if not nn.parameter.is_lazy(one))
            yield from (one for one in model.buffers() if not nn.parameter.is_lazy(one))
