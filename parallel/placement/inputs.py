"""What a caller says of models and devices: checked, and measured where it is not given."""

from __future__ import annotations

import difflib
import importlib
import logging
import math
import numbers
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

_MIB = 1024**2
_log = logging.getLogger(__name__)

T = TypeVar("T")
# One value per model: by name, or in the order of the models.
PerModel: TypeAlias = "Mapping[str, T] | Sequence[T]"
DeviceName: TypeAlias = "str | torch.device"
PerDevice: TypeAlias = "Mapping[DeviceName, float] | Mapping[str, float] | Sequence[float]"


def number(setting: str, value: object, *, most: float = math.inf) -> float:
    """Return `value` as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, not finite, or more than `most`.
    """
    # NumPy's too.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{setting} must be a number, got {value!r}")
    result = float(value)
    if not (0 <= result <= most and math.isfinite(result)):
        bound = "0 or more, and finite" if most == math.inf else f"from 0 to {most:g}"
        raise ValueError(f"{setting} must be {bound}, got {value}")
    return result


def name_models(models: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """Return models by name; those of a list are named by their index.

    Raises:
        ValueError: there are none, or two of one name.
        TypeError: one of them cannot be moved, having no `to`.
    """
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList | nn.ModuleDict):
        raise TypeError("models must be a list or dict of models, got one model")
    if isinstance(models, Mapping | nn.ModuleDict):
        named = {str(name): model for name, model in models.items()}
    else:
        named = {str(index): model for index, model in enumerate(models)}
    if not named:
        raise ValueError("models must hold at least one model, got none")
    if len(named) < len(models):
        raise ValueError(f"models: two of them have the same name as a text ({', '.join(named)})")
    for name, model in named.items():
        if not callable(getattr(model, "to", None)):
            raise TypeError(f"model {name} is a {type(model).__name__} and has no method `to`")
    return named


def per_model(setting: str, given: PerModel[T], names: list[str]) -> list[T]:
    """Return one value per model, in the order of `names`.

    Raises:
        ValueError: there are too few or too many.
    """
    if isinstance(given, Mapping):
        for name in given:
            _index(setting, name, names)
        missing = [name for name in names if name not in given]
        if missing:
            raise ValueError(f"{setting} lacks the models {', '.join(missing)}")
        return [given[name] for name in names]
    if len(given) != len(names):
        raise ValueError(
            f"{setting} must have one value per model: got {len(given)} values and "
            f"{len(names)} models"
        )
    return list(given)


def connection_matrix(connection: Mapping[Any, float], names: list[str]) -> Tensor:
    """Return how strongly model i is connected with model j, `(models, models)`.

    Raises:
        TypeError: it is no dict from pairs to numbers.
        ValueError: a model is not there, or a strength is negative.
    """
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
        first, second = (_index(setting, one, names) for one in pair)
        matrix[first, second] += number(setting, strength)
    return matrix


def _index(setting: str, model: object, names: list[str]) -> int:
    if isinstance(model, str):
        if model in names:
            return names.index(model)
        near = difflib.get_close_matches(model, names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{setting}: no model is named {model!r} ({', '.join(names)}){hint}")
    if isinstance(model, bool) or not isinstance(model, int):
        raise TypeError(f"{setting}: {model!r} is neither an index nor a name of a model")
    if not 0 <= model < len(names):
        raise ValueError(f"{setting}: there is no model {model}; allowed are 0..{len(names) - 1}")
    return model


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


class Room(NamedTuple):
    """One device.

    Attributes:
        device: a single one: a GPU has its index.
        free_mib: free memory.
        compute: relative to the other devices.
    """

    device: torch.device
    free_mib: float
    compute: float


def find_rooms(
    devices: Sequence[DeviceName] | None,
    free_mib: PerDevice | None,
    compute: PerDevice | None,
    cpu_weight: float,
    resident: Mapping[torch.device, float],
) -> list[Room]:
    """Return the devices to be used; what is not given of them is measured.

    Args:
        devices: None takes those of `free_mib`, where it is a dict, else every GPU, else the CPU.
        free_mib: a dict, or a list as long as `devices`.
        compute: likewise.
        cpu_weight: compute of the CPU where not given.
        resident: MiB that may be counted as free where free memory is measured.
    """
    if devices is None:
        names = list(free_mib) if isinstance(free_mib, Mapping) else _gpus()
    else:
        names = list(devices)
    named = [one_device(name, "devices") for name in names]
    for device in named:
        if named.count(device) > 1:
            raise ValueError(f"devices: {device} is there more than once")
    free = _per_device("free_mib", free_mib, named)
    computing = _per_device("compute", compute, named)
    weight = number("cpu_weight", cpu_weight)
    present = [device for device in named if device in free or _is_present(device)]
    rooms = []
    for device in present or [torch.device("cpu")]:
        space = free[device] if device in free else _free(device) + resident.get(device, 0.0)
        speed = computing[device] if device in computing else _compute(device, weight)
        rooms.append(Room(device, space, speed))
    return rooms


def one_device(name: object, setting: str) -> torch.device:
    """Return the device that `name` means.

    Raises:
        ValueError: there is no such kind, or a GPU without an index is meant.
    """
    allowed = f'allowed are "cpu" and "cuda:<index>" (GPUs here: {torch.cuda.device_count()})'
    if not isinstance(name, str | torch.device):
        raise TypeError(f"{setting}: {name!r} is no device; {allowed}")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{setting}: {name!r} is no device; {allowed}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "meta":
        raise ValueError(f"{setting}: the meta device holds no values; {allowed}")
    if device.index is None:
        raise ValueError(f"{setting}: {name!r} is not one device, it has no index; {allowed}")
    return device


def _gpus() -> list[str]:
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def _per_device(
    setting: str, given: PerDevice | None, devices: list[torch.device]
) -> dict[torch.device, float]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        values = {one_device(name, setting): value for name, value in given.items()}
    elif len(given) == len(devices):
        values = dict(zip(devices, given, strict=True))
    else:
        raise ValueError(
            f"{setting} must be a dict or have one number per device: got {len(given)} numbers "
            f"and {len(devices)} devices"
        )
    for device, value in values.items():
        if device not in devices:
            held = ", ".join(map(str, devices))
            raise ValueError(f"{setting}: {device} is none of the devices ({held})")
        number(f"{setting} of {device}", value)
    return values


def _is_present(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    if device.type != "cuda":
        raise ValueError(f"the free memory of {device} is not known: give free_mib for it")
    present = device.index < torch.cuda.device_count()
    if not present:
        _log.warning(
            "%s is left out: %d GPUs are available here", device, torch.cuda.device_count()
        )
    return present


def _free(device: torch.device) -> float:
    if device.type == "cpu":
        return _free_ram() / _MIB
    free, _ = torch.cuda.mem_get_info(device)
    # What the allocator of this process keeps but does not use is free to us.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + kept) / _MIB


def _compute(device: torch.device, cpu_weight: float) -> float:
    if device.type != "cuda":
        return cpu_weight if device.type == "cpu" else 1.0
    if device.index >= torch.cuda.device_count():
        return 1.0
    try:
        return 1.0 - torch.cuda.utilization(device) / 100
    except Exception as error:
        # Without pynvml, or where the driver does not tell: taken as idle.
        _log.debug("the load of %s is not known: %r", device, error)
        return 1.0


def _free_ram() -> float:
    """Return the bytes of RAM that this process could take."""
    free = next((bytes_ for ask in _ASKED if (bytes_ := ask()) is not None), None)
    if free is None:
        raise RuntimeError(
            'the free memory of the CPU is not known here: give free_mib={"cpu": ...}, or install '
            "psutil"
        )
    limit = _room_of_container()
    return free if limit is None else min(free, limit)


def _by_psutil() -> float | None:
    try:
        psutil = importlib.import_module("psutil")
    except ImportError:
        return None
    return float(psutil.virtual_memory().available)


def _by_meminfo() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return float(kib[0]) * 1024 if kib else None


def _by_sysconf() -> float | None:
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return None


_ASKED: tuple[Callable[[], float | None], ...] = (_by_psutil, _by_meminfo, _by_sysconf)


def _room_of_container() -> float | None:
    """Return what the limit of the container leaves; MemAvailable is that of the whole host."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = float((group / "memory.current").read_text())
        stat = (group / "memory.stat").read_text().split()
    except OSError:
        return None
    if limit == "max":
        return None
    # Cached files are given back when memory is wanted.
    cached = float(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0.0
    return max(0.0, float(limit) - used + cached)
