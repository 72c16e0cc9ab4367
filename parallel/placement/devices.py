"""The devices for models, with their free memory and compute capacity."""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from .inputs import number

_MIB = 1024**2
_log = logging.getLogger(__name__)

DeviceName: TypeAlias = "str | torch.device"
PerDevice: TypeAlias = "Mapping[DeviceName, float] | Mapping[str, float] | Sequence[float]"


class Room(NamedTuple):
    """One device.

    Attributes:
        device: the device, with an index if it is a GPU.
        free_mib: free memory in MiB.
        compute: compute capacity relative to the other devices.
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
    """Return the devices to use; measure the values that are not given.

    Args:
        devices: the devices (default: the keys of ``free_mib`` if it is a dict, otherwise all GPUs,
            otherwise the CPU).
        free_mib: free MiB as a dict, or a list as long as ``devices``.
        compute: compute capacity as a dict, or a list as long as ``devices``.
        cpu_weight: the default compute capacity of the CPU.
        resident: the MiB that the models already occupy, by device; they count as free.
    """
    if devices is None:
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        names = (list(free_mib) if isinstance(free_mib, Mapping) else gpus) or ["cpu"]
    else:
        names = list(devices)
    named = [_one_device(name, "devices") for name in names]
    for device in named:
        if named.count(device) > 1:
            raise ValueError(f"devices: {device} is listed more than once")
    free = _map_devices("free_mib", free_mib, named)
    computing = _map_devices("compute", compute, named)
    weight = number("cpu_weight", cpu_weight)
    present = [device for device in named if device in free or _is_present(device)]
    rooms = []
    for device in present or [torch.device("cpu")]:
        space = free.get(device)
        if space is None:
            space = free_memory(device) / _MIB + resident.get(device, 0.0)
        speed = computing[device] if device in computing else _compute(device, weight)
        rooms.append(Room(device, space, speed))
    return rooms


def _one_device(name: object, setting: str) -> torch.device:
    allowed = (
        f'allowed are "cpu", "cuda:<index>" (GPUs here: {torch.cuda.device_count()}) and, with '
        'free_mib, other types with an index, such as "mps:0"'
    )
    if not isinstance(name, str | torch.device):
        raise TypeError(f"{setting}: {name!r} is not a device; {allowed}")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{setting}: {name!r} is not a device; {allowed}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "meta":
        raise ValueError(f"{setting}: the meta device holds no values; {allowed}")
    if device.index is None:
        raise ValueError(f"{setting}: {name!r} is not one device, it has no index; {allowed}")
    return device


def _map_devices(
    setting: str, numbers: PerDevice | None, devices: list[torch.device]
) -> dict[torch.device, float]:
    if numbers is None:
        return {}
    if isinstance(numbers, Mapping):
        values = {_one_device(name, setting): value for name, value in numbers.items()}
    elif len(numbers) == len(devices):
        values = dict(zip(devices, numbers, strict=True))
    else:
        raise ValueError(
            f"{setting} must be a dict or have one number per device: got {len(numbers)} numbers "
            f"and {len(devices)} devices"
        )
    for device, value in values.items():
        if device not in devices:
            listed = ", ".join(map(str, devices))
            raise ValueError(f"{setting}: {device} is not one of the devices ({listed})")
        number(f"{setting} of {device}", value)
    return values


def _is_present(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    if device.type != "cuda":
        raise ValueError(f"the free memory of {device} is not known: give free_mib for it")
    count = torch.cuda.device_count()
    if device.index >= count:
        _log.warning("%s is left out: %d GPUs are available here", device, count)
    return bool(device.index < count)


def free_memory(device: DeviceName) -> float:
    """Return the bytes of a GPU's memory, or of RAM for "cpu", that this process can still use."""
    device = torch.device(device)
    if device.type == "cpu":
        return _free_ram()
    free, _ = torch.cuda.mem_get_info(device)
    # Memory that torch's allocator has cached is free for this process.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _compute(device: torch.device, cpu_weight: float) -> float:
    if device.type == "cpu":
        return cpu_weight
    if device.type != "cuda" or device.index >= torch.cuda.device_count():
        return 1.0
    try:
        return 1.0 - torch.cuda.utilization(device) / 100
    except Exception as error:
        # pynvml is missing, or the driver does not report the load: assume an idle GPU.
        _log.debug("the load of %s is not known: %r", device, error)
        return 1.0


def _free_ram() -> float:
    try:
        free = float(importlib.import_module("psutil").virtual_memory().available)
    except ImportError:
        meminfo = Path("/proc/meminfo")
        if meminfo.exists():
            free = 1024 * float(meminfo.read_text().partition("MemAvailable:")[2].split()[0])
        else:
            # On macOS, for example, only the total is known.
            free = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(free, _free_in_container())


def _free_in_container() -> float:
    """Return the free bytes below the container's limit; MemAvailable describes the whole host."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = float((group / "memory.current").read_text())
        stat = (group / "memory.stat").read_text().split()
    except OSError:
        return math.inf
    if limit == "max":
        return math.inf
    # The system drops cached files when memory is needed.
    cached = float(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0.0
    return max(0.0, float(limit) - used + cached)
