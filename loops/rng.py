"""Save, restore and preserve the random number generators of this process."""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch


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
    """Return the streams of Python, torch (CPU and CUDA) and NumPy as tensors and numbers."""
    version, words, gauss = random.getstate()
    # Through an array, because torch converts a tuple slowly, number by number.
    numbers = torch.frombuffer(array("q", words), dtype=torch.int64)
    streams: dict[str, Any] = {
        "python": {"version": version, "words": numbers, "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        streams["cuda"] = torch.cuda.get_rng_state(_cuda(device))
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
    """Restore the streams of ``capture_rng``; skip CUDA or NumPy if this process lacks them."""
    python = streams["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(streams["torch"])
    if "cuda" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state(streams["cuda"], _cuda(device))
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


@contextmanager
def preserved_generators(owners: Iterable[Any]) -> Iterator[None]:
    """Restore, after the block, the random generators that are attributes of ``owners``."""
    values = [v for owner in owners for v in getattr(owner, "__dict__", {}).values()]
    restore = [_make_restorer(value) for value in values]
    try:
        yield
    finally:
        for restore_one in filter(None, restore):
            restore_one()


def _make_restorer(value: Any) -> Callable[[], Any] | None:
    """Return a function that restores a generator's current state; None for other values."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", deepcopy(value.bit_generator.state))
    is_legacy = numpy is not None and isinstance(value, numpy.random.RandomState)
    if is_legacy or isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    return None


def _cuda(device: torch.device | None) -> torch.device:
    return device if device is not None and device.type == "cuda" else torch.device("cuda")
