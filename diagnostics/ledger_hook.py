"""Record hashes of each step, so that two runs can be compared step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..collectives import get_rank, get_world_size
from ..loops.hook import Hook
from ..loops.hooks.monitors import get_optimizers
from ..loops.logs import fetch
from ..loops.schedule import positive
from ..loops.state import LoopState
from ..registry import HOOKS
from ..wrappers.layout import reshard
from ..wrappers.steps.preprocess import get_device
from ..wrappers.unwrap import plain_name, user_model
from .fingerprint import get_bits, hash_bytes, hash_streams, hash_tensors
from .ledger import Item, LedgerWriter

Named = list[tuple[str, Tensor]]
# The stages that belong to a whole accumulation window, not to each of its batches.
_OF_THE_WINDOW = ("gradient", "update")
# The depth to which nested objects are searched for tensors.
_MAX_DEPTH = 8


@HOOKS.register_module()
class LedgerHook(Hook):
    """Write hashes of data, random streams, losses, gradients and weights for ``stepwrap bisect``.

    Every rank writes a file, ``<run_dir>/ledger/rank_<rank>.bin``; nothing is written if
    ``state.run_dir`` is None. The hook does not communicate. docs/exactness.md lists the hashed
    values and the cost. In a config the section ``ledger`` has the same arguments.

    Args:
        every_steps: optimizer updates between two entries.
        full: also hash each parameter, gradient and buffer separately, and the output of each
            innermost module (not of a compiled model).
        max_mib: the maximum size of a rank's file, in MiB. The interval between entries doubles
            each time that half of the remaining size has been used.
        until: the update after which training ends, for a run that repeats a part of another one.

    Raises:
        ValueError: ``every_steps`` or ``max_mib`` is not positive.
    """

    # Called after all other hooks, whose changes of batches and weights are part of the step.
    order = 99

    def __init__(
        self,
        *,
        every_steps: int = 1,
        full: bool = False,
        max_mib: float = 64.0,
        until: int | None = None,
    ) -> None:
        if not max_mib > 0:
            raise ValueError(f"LedgerHook: max_mib must be > 0, got {max_mib!r}")
        self._every_steps = self._interval = positive("every_steps", every_steps)
        self._full = full
        self._max_bytes = int(max_mib * 2**20)
        self._until = until
        self._writer: LedgerWriter | None = None
        self._handles: list[RemovableHandle] = []
        # The names by the parameters' ids.
        self._names: dict[int, str] = {}
        self._entry: dict[Item, int | Tensor] = {}
        # Whether the running update will have an entry, and the suffix of names in its second and
        # later batches.
        self._due = False
        self._where = ""

    def on_train_start(self, state: LoopState) -> None:
        self._close()
        if state.run_dir is None:
            return
        rank = get_rank()
        self._writer = LedgerWriter(
            state.run_dir / "ledger" / f"rank_{rank}.bin",
            full=self._full,
            rank=rank,
            world_size=get_world_size(),
            step=state.step,
            max_bytes=self._max_bytes,
        )
        model = user_model(state.model)
        self._names = {id(p): plain_name(name) for name, p in model.named_parameters()}
        for name, _, optimizer in get_optimizers(state):
            hash_gradients = partial(self._hash_gradients, name)
            self._handles.append(optimizer.register_step_pre_hook(hash_gradients))
        if self._full and not any(map(_is_compiled, state.model.modules())):
            self._watch_outputs(model)
        self._hash_weights(state)
        groups = (
            group_params
            for name, _, optim in get_optimizers(state)
            for _, group_params in _groups(name, optim)
        )
        trained = {id(p) for group_params in groups for p in group_params}
        frozen = [p for p in model.parameters() if id(p) not in trained]
        self._add_group("update", "parameters in no optimizer", self._add_names(frozen))
        self._write(state.step)

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        self._due = (state.step + 1) % self._interval == 0 and self._writer is not None
        if not self._due:
            return
        # After a resume inside a window `updated_at` is None: the entry lacks earlier batches.
        began = state.iteration if state.updated_at is None else state.updated_at[2]
        number = state.iteration - began + 1
        self._where = f" of batch {number}" if number > 1 else ""
        sampler: Any = getattr(state.dataloader, "batch_sampler", None)
        if hasattr(sampler, "get_indices"):
            indices = sampler.get_indices(state.epoch, state.batch)
            self._add("data", "sample ids", hash_bytes(repr(indices).encode()))
        for name, value in hash_streams(get_device(state.model)):
            self._add("random state", name, value)
        for key, entry in _get_entries(batch) or [("", batch)]:
            self._add("data", f"batch.{key}".rstrip("."), hash_tensors(_tensors_in(entry)))

    def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Tensor]) -> None:
        if self._due:
            for name, value in logs.items():
                self._add("forward", name, get_bits(value))

    def on_update(self, state: LoopState) -> None:
        if self._due:
            self._hash_weights(state)
            self._write(state.step)
            self._due = False
        if self._until is not None and state.step >= self._until:
            state.request_stop(f"update {self._until} is done (LedgerHook: until)")

    def on_train_end(self, state: LoopState) -> None:
        self._close()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._close()

    def _hash_gradients(self, name: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._due:
            return
        for group, parameters in _groups(name, optimizer):
            gradients = [(n, p.grad) for n, p in self._add_names(parameters) if p.grad is not None]
            self._add_group("gradient", group, gradients)

    def _hash_weights(self, state: LoopState) -> None:
        reshard(state.model)
        for name, _, optimizer in get_optimizers(state):
            for group, parameters in _groups(name, optimizer):
                self._add_group("update", group, self._add_names(parameters))
        buffers = [(plain_name(n), buffer) for n, buffer in user_model(state.model).named_buffers()]
        self._add_group("update", "buffers", buffers)

    def _add_group(self, stage: str, group: str, named: Named) -> None:
        # Members come before their group, so that a difference is reported for the member.
        for name, tensor in named if self._full else ():
            self._add(stage, name, hash_tensors([tensor]))
        if named:
            self._add(stage, group, hash_tensors(tensor for _, tensor in named))

    def _add(self, stage: str, name: str, value: int | Tensor) -> None:
        name = name if stage in _OF_THE_WINDOW else f"{name}{self._where}"
        entry_item = Item(stage, name)
        number = 1
        while entry_item in self._entry:
            # A module was called again, or an optimizer stepped twice for a batch.
            number += 1
            entry_item = Item(stage, f"{name} ({number})")
        self._entry[entry_item] = value

    def _write(self, step: int) -> None:
        assert self._writer is not None
        # The log values of the last batch were added after the gradients; put them first.
        entry_items = sorted(self._entry, key=lambda entry_item: entry_item.stage in _OF_THE_WINDOW)
        hashes = fetch([torch.as_tensor(self._entry[entry_item]) for entry_item in entry_items])
        self._writer.write(step, dict(zip(entry_items, hashes, strict=True)))
        self._entry.clear()
        self._interval = self._every_steps * self._writer.stride

    def _add_names(self, parameters: Iterable[Tensor]) -> Named:
        return [(self._names.get(id(p), "a parameter"), p) for p in parameters]

    def _watch_outputs(self, model: nn.Module) -> None:
        def watch(name: str, layer: nn.Module) -> None:
            def note(module: nn.Module, inputs: Any, output: Any) -> None:
                # Replicas run in threads, in any order, and are left out.
                if self._due and module is layer:
                    self._add("forward", f"output of {name}", hash_tensors(_tensors_in(output)))

            self._handles.append(layer.register_forward_hook(note))

        for name, layer in model.named_modules():
            if name and not any(True for _ in layer.children()):
                watch(name, layer)

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._entry.clear()
        self._due = False
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _groups(name: str, optimizer: Optimizer) -> Iterator[tuple[str, list[Tensor]]]:
    for at, group in enumerate(optimizer.param_groups):
        group_name = f"group {group.get('name', at)}"
        yield f"{name}/{group_name}" if name else group_name, group["params"]


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _get_entries(value: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a batch, or of an object in it, by key; [] for a single value."""
    if isinstance(value, (Tensor, str, bytes)):
        return []
    if isinstance(value, Sequence):
        return list(enumerate(value))
    return list((value if isinstance(value, Mapping) else getattr(value, "__dict__", {})).items())


def _tensors_in(value: Any, depth: int = _MAX_DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in nested data, and hashes of numbers, strings and arrays."""
    if isinstance(value, Tensor):
        yield value
    elif hasattr(value, "tobytes") and getattr(getattr(value, "dtype", None), "hasobject", False):
        # The bytes of an array of Python objects are their addresses.
        yield from _tensors_in(value.tolist(), depth)
    elif hasattr(value, "tobytes"):
        yield torch.tensor(hash_bytes(value.tobytes()))
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        yield torch.tensor(hash_bytes(repr(value).encode()))
    elif depth:
        for _, entry in _get_entries(value):
            yield from _tensors_in(entry, depth - 1)
