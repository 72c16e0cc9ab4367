"""Functions that check the arguments of a placement, group models and move them to devices."""

from __future__ import annotations

import math
import numbers
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ...primitives.suggestions import did_you_mean

T = TypeVar("T")
_MIB = 1024**2
# One value per model, by name or in the order of the models.
PerModel: TypeAlias = "Mapping[str, T] | Sequence[T]"


def number(setting: str, value: object, *, most: float = math.inf) -> float:
    """Return ``value`` as a float, or raise an error that names the setting."""
    # NumPy's numbers are Real too.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{setting} must be a number, got {value!r}")
    result = float(value)
    if not (0 <= result <= most and math.isfinite(result)):
        bound = "0 or more, and finite" if most == math.inf else f"from 0 to {most:g}"
        raise ValueError(f"{setting} must be {bound}, got {value}")
    return result


def name_models(models: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """Return the models by name; the models of a list are named by their indices."""
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList | nn.ModuleDict):
        raise TypeError("models must be a list or dict of models, got one model")
    if isinstance(models, Mapping | nn.ModuleDict):
        named = {str(name): model for name, model in models.items()}
    else:
        named = {str(index): model for index, model in enumerate(models)}
    if not named:
        raise ValueError("models must hold at least one model, got none")
    if len(named) < len(models):
        raise ValueError(f"models: their names must differ as text, got {[*models]}")
    for name, model in named.items():
        if not callable(getattr(model, "to", None)):
            raise TypeError(f"model {name} is a {type(model).__name__} and has no method `to`")
    return named


def per_model(setting: str, per_name: PerModel[T], names: list[str]) -> list[T]:
    """Return one value per model, in the order of ``names``."""
    if isinstance(per_name, Mapping):
        for name in per_name:
            _index(setting, name, names)
        missing = [name for name in names if name not in per_name]
        if missing:
            raise ValueError(f"{setting} lacks the models {', '.join(missing)}")
        return [per_name[name] for name in names]
    if len(per_name) != len(names):
        raise ValueError(
            f"{setting} must have one value per model: got {len(per_name)} values and "
            f"{len(names)} models"
        )
    return list(per_name)


def connection_matrix(connection: Mapping[Any, float], names: list[str]) -> Tensor:
    """Return the strengths of the connections from model i to model j, ``(models, models)``."""
    matrix = torch.zeros(len(names), len(names), dtype=torch.float64)
    if not isinstance(connection, Mapping):
        raise TypeError(
            "model_connection must be a dict {(model, model): strength}, got "
            f"{type(connection).__name__}"
        )
    for pair, strength in connection.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"model_connection: {pair!r} must be a pair of models")
        setting = f"model_connection[{pair!r}]"
        source, second = (_index(setting, name, names) for name in pair)
        matrix[source, second] += number(setting, strength)
    return matrix


def _index(setting: str, model: object, names: list[str]) -> int:
    if isinstance(model, str):
        if model in names:
            return names.index(model)
        hint = did_you_mean(model, names, limit=1, quoted=True)
        raise ValueError(f"{setting}: no model is named {model!r} ({', '.join(names)}){hint}")
    if isinstance(model, bool) or not isinstance(model, int):
        raise TypeError(f"{setting}: {model!r} is neither an index nor a name of a model")
    if not 0 <= model < len(names):
        raise ValueError(
            f"{setting}: model {model} does not exist; allowed are 0..{len(names) - 1}"
        )
    return model


def sharing_groups(models: Mapping[str, Any]) -> list[list[int]]:
    """Return groups of the models that share parameters directly or through other models."""
    groups: list[tuple[set[int], list[int]]] = []
    for index, model in enumerate(models.values()):
        parameters = model.parameters() if isinstance(model, nn.Module) else ()
        identities, members = {id(param) for param in parameters}, [index]
        joined = [group for group in groups if not identities.isdisjoint(group[0])]
        groups = [group for group in groups if identities.isdisjoint(group[0])]
        for their_parts, further in joined:
            identities |= their_parts
            members += further
        groups.append((identities, sorted(members)))
    return sorted(members for _, members in groups)


def resident_mib(models: Mapping[str, Any]) -> dict[torch.device, float]:
    """Return the MiB that the modules among ``models`` currently use, by device.

    This memory counts as free, because the models leave it or stay in it.
    """
    modules = [model for model in models.values() if isinstance(model, nn.Module)]
    tensors = (param for model in modules for param in (*model.parameters(), *model.buffers()))
    sizes: dict[torch.device, float] = defaultdict(float)
    for tensor in dict.fromkeys(tensors):
        if not nn.parameter.is_lazy(tensor):
            size = tensor.numel() * tensor.element_size() / _MIB
            sizes[torch.device("cpu") if tensor.device.type == "cpu" else tensor.device] += size
    return sizes


def move(models: Mapping[str, Any], devices: Sequence[torch.device]) -> None:
    """Move each model to its device."""
    gpus = torch.cuda.device_count()
    pairs = list(zip(models.items(), devices, strict=True))
    remedy = "move_models=False only computes the placement"
    for (name, model), device in pairs:
        if isinstance(model, nn.Module) and device.type == "cuda" and device.index >= gpus:
            problem = f"cannot be moved to {device}: {gpus} GPUs are available here"
            raise ValueError(f"model {name} {problem}; {remedy}")
    for (name, model), device in pairs:
        try:
            model.to(device)
        except Exception as error:
            problem = f"could not be moved to {device}: {error}"
            raise RuntimeError(f"model {name} {problem}; {remedy}") from error
