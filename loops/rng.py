"""Save, restore and preserve the random number generators of this process and of its data."""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

logger = logging.getLogger(__name__)

_MAX_DEPTH = 6
# Longer lists and dicts hold samples, not the parts of a data set.
_MAX_ENTRIES = 64
_MAX_VALUES = 2000
# The process-wide generator, which torch's samplers use unless they have their own.
_GLOBAL = "torch.default_generator"


def mix_seed(*numbers: int) -> int:
    """Return a seed below 2**63 that depends on all ``numbers`` and their order."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_rng(seed: int) -> None:
    """Seed Python, torch on every device and, if it is imported, NumPy."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Return the streams of Python, torch and NumPy as tensors and numbers.

    ``device`` is the device of the model; without it, or if it is the CPU, the stream of an
    accelerator is captured if this process uses one. A resumed run restores the stream on the
    device of its model, and the streams of all devices, which ``DataParallel`` uses, by index.
    """
    streams: dict[str, Any] = {"python": _python_state(random), "torch": torch.get_rng_state()}
    accelerator = device if has_own_stream(device) else used_accelerator()
    if accelerator is not None:
        module: Any = torch.get_device_module(accelerator)
        streams[accelerator.type] = device_state(accelerator)
        # torch.mps has one device.
        if hasattr(module, "get_rng_state_all"):
            streams[f"{accelerator.type}_devices"] = module.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        streams["numpy"] = {
            "kind": str(kind),
            "keys": torch.from_numpy(keys.astype("int64")),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    return streams


def restore_rng(streams: dict[str, Any], device: torch.device | None = None) -> None:
    """Restore the streams of ``capture_rng``; skip those that this process lacks."""
    _set_python_state(random, streams["python"])
    torch.set_rng_state(streams["torch"])
    accelerator = device if has_own_stream(device) else _present_accelerator()
    if accelerator is not None and accelerator.type in streams:
        module: Any = torch.get_device_module(accelerator)
        # Checkpoints of earlier releases lack the streams of all devices.
        for index, state in enumerate(streams.get(f"{accelerator.type}_devices", ())):
            if index < module.device_count():
                module.set_rng_state(state, index)
        module.set_rng_state(streams[accelerator.type], *_index(accelerator))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in streams:
        saved = streams["numpy"]
        keys = saved["keys"].numpy().astype("uint32")
        numpy.random.set_state(
            (saved["kind"], keys, saved["position"], saved["has_gauss"], saved["cached"])
        )


@contextmanager
def preserved_rng(device: torch.device | None = None) -> Iterator[None]:
    """Restore the random streams after the block."""
    streams = capture_rng(device)
    try:
        yield
    finally:
        restore_rng(streams, device)


def is_generator(value: Any) -> bool:
    """Return whether ``value`` is a generator of Python, torch or NumPy with a state."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def generator_state(generator: Any) -> Any:
    """Return a copy of a generator's state as tensors, numbers, strings and dicts."""
    if isinstance(generator, random.Random):
        return _python_state(generator)
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "bit_generator"):
        return _to_tensors(generator.bit_generator.state)
    return _to_tensors(generator.get_state(legacy=False))


def set_generator_state(generator: Any, state: Any) -> None:
    """Set a state that ``generator_state`` returned."""
    if isinstance(generator, random.Random):
        _set_python_state(generator, state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _restore_arrays(state)
    else:
        generator.set_state(_restore_arrays(state))


def _python_state(generator: Any) -> dict[str, Any]:
    version, words, gauss = generator.getstate()
    # Through an array, because torch converts a tuple slowly, number by number.
    numbers = torch.frombuffer(array("q", words), dtype=torch.int64)
    return {"version": version, "words": numbers, "gauss": gauss}


def _set_python_state(generator: Any, state: dict[str, Any]) -> None:
    generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))


def module_generators(model: nn.Module) -> dict[str, Any]:
    """Return the generators in attributes of the modules of a model, each by path."""
    generators: dict[str, Any] = {}
    for path, module in model.named_modules():
        visited = {id(module.__dict__[name]) for name in ("_modules", "_parameters", "_buffers")}
        for name, value in vars(module).items():
            generators |= _walk(value, f"{path}.{name}", visited)
    return generators


def get_states(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of generators by path."""
    return {path: generator_state(generator) for path, generator in generators.items()}


def set_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Set the states of those generators whose paths have one."""
    for path in generators.keys() & states.keys():
        set_generator_state(generators[path], states[path])


def _to_tensors(state: Any) -> Any:
    """Replace the arrays and scalars of NumPy in a state."""
    if isinstance(state, dict):
        return {name: _to_tensors(entry) for name, entry in state.items()}
    if hasattr(state, "dtype"):
        return torch.from_numpy(state.copy()) if state.ndim else state.item()
    return state


def _restore_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _restore_arrays(entry) for name, entry in state.items()}
    return state.numpy() if isinstance(state, torch.Tensor) else state


@contextmanager
def preserved_generators(owners: Iterable[Any]) -> Iterator[None]:
    """Restore, after the block, the random generators that are attributes of ``owners``."""
    values = [v for owner in owners for v in getattr(owner, "__dict__", {}).values()]
    states = [(value, generator_state(value)) for value in values if is_generator(value)]
    try:
        yield
    finally:
        for generator, state in states:
            set_generator_state(generator, state)


def has_own_stream(device: torch.device | None) -> bool:
    """Return whether random numbers on ``device`` do not come from the stream of the CPU."""
    return device is not None and device.type not in ("cpu", "meta")


def device_state(device: torch.device) -> torch.Tensor:
    """Return the state of the random stream of an accelerator."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(*_index(device))
    return state


def _index(device: torch.device) -> tuple[torch.device, ...]:
    # There is only one MPS device, and some releases of torch take none here.
    return () if device.type == "mps" else (device,)


def used_accelerator() -> torch.device | None:
    """Return the kind of accelerator that this process uses; None for only the CPU."""
    device = _present_accelerator()
    if device is None:
        return None
    # torch.mps does not know whether it is used.
    is_used = getattr(torch.get_device_module(device), "is_initialized", lambda: True)
    return device if is_used() else None


def _present_accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)


class DataGenerators:
    """The generators of the training data, and their states when the running pass began.

    A sampler draws the order of a pass when the pass begins, and a data set draws from its own
    generator whenever a sample is read. A run that resumes inside a pass needs both states: the
    one at the beginning of the pass to draw the order again, and the one now to continue.
    """

    def __init__(self) -> None:
        self._loader: Any = None
        self._begin: dict[str, Any] = {}
        self._restored: dict[str, dict[str, Any]] | None = None

    def start_pass(self, loader: Any, batch: int) -> None:
        """Continue from the restored states; record them if ``batch`` is 0, the pass's first."""
        self._loader = loader
        restored, self._restored = self._restored or {}, None
        order, samples = _find_generators(loader)
        if restored and (batch or getattr(loader, "persistent_workers", False)):
            _warn_of_workers(loader, samples)
        if batch:
            self._begin = restored.get("begin", self._begin)
            set_states(samples, restored.get("now", {}))
        else:
            set_states({**order, **samples}, restored.get("now", {}))
            self._begin = get_states({**order, **samples})

    def know_order(self, loader: Any) -> bool:
        """Return whether all generators of the order have a state for the beginning of the pass."""
        return _find_generators(loader)[0].keys() <= self._begin.keys()

    def rewind(self, loader: Any, *, samples: bool) -> None:
        """Set the generators of the order to their states at the beginning of the pass.

        Args:
            loader: the loader.
            samples: whether to do the same with the generators of the data set.
        """
        order, of_samples = _find_generators(loader)
        set_states({**order, **of_samples} if samples else order, self._begin)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the states when the pass began and now; {} without generators."""
        if self._restored is not None or not self._begin:
            return self._restored or {}
        order, samples = _find_generators(self._loader)
        return {"begin": self._begin, "now": get_states({**order, **samples})}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Set the states from which the next pass continues."""
        self._begin, self._restored = {}, state


def _find_generators(loader: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the generators of the order and of the data set, each by path.

    A loader with a ``state_dict`` saves what it needs.
    """
    # A loader of which only the first batches are read.
    loader = getattr(loader, "loader", loader)
    if hasattr(loader, "state_dict"):
        return {}, {}
    batch_sampler = getattr(loader, "batch_sampler", None)
    # The generators of a sampler of `build_loader` continue without being restored.
    visited = {id(getattr(batch_sampler, "order", None))}
    dataset = getattr(loader, "dataset", None)
    samples = dict(_walk(dataset, "dataset", visited))
    # A loader that was divided among ranks has the same paths as one that was not.
    batch_sampler = getattr(batch_sampler, "undivided", batch_sampler)
    order = dict(_walk(batch_sampler, "batch_sampler", visited))
    for name, value in getattr(loader, "__dict__", {}).items():
        if name not in ("dataset", "batch_sampler", "_iterator"):
            order |= _walk(value, name, visited)
    sampler = getattr(batch_sampler, "sampler", None)
    if isinstance(loader, DataLoader) and not order and type(sampler) is not SequentialSampler:
        order[_GLOBAL] = torch.default_generator
    return order, samples


def _walk(
    value: Any, path: str, visited: set[int], depth: int = _MAX_DEPTH
) -> Iterator[tuple[str, Any]]:
    """Yield the generators inside a value with their paths, each generator once."""
    is_leaf = isinstance(value, (Tensor, type, ModuleType))
    if is_leaf or id(value) in visited or len(visited) > _MAX_VALUES:
        return
    visited.add(id(value))
    if is_generator(value):
        if value is not torch.default_generator:
            yield path, value
        return
    entries: Any = ()
    if isinstance(value, Mapping):
        entries = value.items() if len(value) <= _MAX_ENTRIES else ()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value) if len(value) <= _MAX_ENTRIES else ()
    elif depth:
        entries = list(getattr(value, "__dict__", {}).items())
    for name, entry in entries if depth else ():
        yield from _walk(entry, f"{path}.{name}", visited, depth - 1)


def _warn_of_workers(loader: Any, samples: Mapping[str, Any]) -> None:
    if getattr(loader, "num_workers", 0) and samples:
        logger.warning(
            "%s: the generators %s of the copies in workers begin again, because a checkpoint does "
            "not contain them: draw from random, torch or numpy.random instead, or use "
            "num_workers=0",
            *(type(loader).__name__, ", ".join(samples)),
        )
