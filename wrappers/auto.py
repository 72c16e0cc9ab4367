"""A wrapper chosen by the number of ranks and the size of the model."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..collectives import all_gather_object, get_rank, get_world_size
from ..registry import MODEL_WRAPPERS
from .ddp.distributed import StepDistributedDataParallel
from .steps.preprocess import device_of
from .steps.step import SingleDevice
from .torch_functions import check_options, option_names

logger = logging.getLogger(__name__)

GIB = 2**30
WRAPPERS = ("single", "ddp", "fsdp")
# The rest is left to activations, which nobody knows before a batch has run.
_USABLE = 0.7


@dataclass(frozen=True)
class Choice:
    """A wrapper, its options, and why it was chosen."""

    name: str
    why: str
    options: Mapping[str, Any]

    @property
    def wrapper(self) -> type[nn.Module]:
        """The class."""
        return _wrapper(self.name)


@dataclass(frozen=True)
class Surroundings:
    """What the choice depends on besides the model.

    Attributes:
        data_size: among how many ranks the batches are shared out.
        device: where the model is going to be; default: where it is.
        split: parameters that are going to be shared out over a tensor group.
        tensor_size: over how many ranks.
        must_shard: why only fsdp can be; "" where all can.
    """

    data_size: int
    device: torch.device | None = None
    split: Collection[nn.Parameter] = ()
    tensor_size: int = 1
    must_shard: str = ""


@MODEL_WRAPPERS.register_module(name="auto")
def auto(
    module: nn.Module,
    *,
    memory_gib: float | None = None,
    optimizer_states: int = 2,
    single: Mapping[str, Any] | None = None,
    ddp: Mapping[str, Any] | None = None,
    fsdp: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Wrap a model by ``single``, ``ddp`` or ``fsdp``, and log why; every rank must call this.

    One data rank takes ``single``. Several take ``ddp`` when a whole copy fits into the memory
    of each, else ``fsdp``. With w bytes of weights and buffers, of which g belong to parameters
    that are trained, and s optimizer states per parameter, a copy under ddp needs::

        w + 2 g + s g       gradients, ddp's buckets for sending them, optimizer state

    and a rank of n under fsdp (w + g + s g) / n, plus the blocks that are gathered just then.

    Args:
        module: the model.
        memory_gib: what each rank may use for that, in 2**30 bytes. Default: 70% of the memory
            that the least endowed rank has: what is free on its CUDA device, or its share of
            what is available on its machine.
        optimizer_states: tensors that the optimizer keeps per parameter: 2 for Adam and its like,
            1 for SGD with momentum.
        single: options of the wrapper, where it is chosen; as ``ddp`` and ``fsdp``.

    Raises:
        TypeError: a wrapper has no such option.
    """
    options = {"memory_gib": memory_gib, "optimizer_states": optimizer_states}
    tables = {"single": single, "ddp": ddp, "fsdp": fsdp}
    choice = choose_wrapper(module, Surroundings(get_world_size()), **options, **tables)
    return choice.wrapper(module, **choice.options)


def choose_wrapper(model: nn.Module, around: Surroundings, **options: Any) -> Choice:
    """Return what suits ``model``, and log why at rank 0; every rank must call this.

    Args:
        options: those of ``auto``.

    Raises:
        TypeError: ``auto`` or a wrapper has no such option.
    """
    check_options("auto", options, [name for name in option_names(auto) if name != "module"])
    tables = {name: dict(options.get(name) or {}) for name in WRAPPERS}
    for name, table in tables.items():
        _check_table(name, table)
    name, why = _choose(model, around, options)
    if get_rank() == 0:
        logger.info("wrapper: %s, because %s", name, why)
    return Choice(name, why, tables[name])


def _wrapper(name: str) -> type[nn.Module]:
    if name == "fsdp":
        # Where it is not used, what it needs of torch is not imported.
        from .fsdp.fully_sharded import StepFullyShardedDataParallel

        return StepFullyShardedDataParallel
    return SingleDevice if name == "single" else StepDistributedDataParallel


def _check_table(name: str, table: Mapping[str, Any]) -> None:
    if not table:
        return
    wrapper: Any = _wrapper(name)
    if hasattr(wrapper, "check_options"):
        wrapper.check_options(table)
    else:
        names = [one for one in option_names(wrapper.__init__) if one != "module"]
        check_options(wrapper.__name__, table, names)


def _choose(model: nn.Module, around: Surroundings, options: Mapping[str, Any]) -> tuple[str, str]:
    if around.must_shard:
        return "fsdp", around.must_shard
    if around.data_size == 1:
        return "single", "there is one data rank"
    states = options.get("optimizer_states", 2)
    needed = _copy_bytes(model, around, states) / GIB
    limit = options.get("memory_gib")
    source = "memory_gib"
    if limit is None:
        device = around.device or device_of(model)
        limit = min(all_gather_object(_available(device))) * _USABLE / GIB
        source = f"{_USABLE:.0%} of what is free"
    fits = needed <= limit
    told = (
        f"a copy needs {needed:.3g} GiB (weights, gradients and their buckets, {states} optimizer "
        f"states) and each of {around.data_size} data ranks has {limit:.3g} GiB ({source})"
    )
    return ("ddp" if fits else "fsdp"), told


def _copy_bytes(model: nn.Module, around: Surroundings, states: int) -> float:
    """Bytes of a whole copy under ddp, with gradients and optimizer state."""
    split = {id(one) for one in around.split}
    total = float(sum(buffer.nbytes for buffer in model.buffers()))
    for parameter in model.parameters():
        size = parameter.nbytes / (around.tensor_size if id(parameter) in split else 1)
        total += size * (1 + 2 + states if parameter.requires_grad else 1)
    return total


def _available(device: torch.device) -> float:
    """Bytes that this rank may take, where several ranks share a device or a machine."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or get_world_size())
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / -(-ranks_here // torch.cuda.device_count())
    return _machine_bytes() / ranks_here


def _machine_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    fields = dict(line.split(":", 1) for line in lines)
    return float(fields["MemAvailable"].split()[0]) * 1024
