"""What a bug report should say about the machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import torch
import torch.distributed as dist

_PACKAGES = (
    *("stepwrap", "torch", "torchmetrics", "omegaconf", "rich", "numpy"),
    *("matplotlib", "tensorboard", "scikit-learn", "pytorch-lightning", "mmengine", "mpi4py"),
)


def describe_environment() -> Iterator[tuple[str, str]]:
    """Yield (what, value) pairs: versions, devices, back-ends, system."""
    yield "python", f"{platform.python_version()} ({sys.executable})"
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"
    yield "system", f"{platform.platform()}, {os.cpu_count()} cores"
    yield "threads", f"{torch.get_num_threads()} (OMP_NUM_THREADS={_variable('OMP_NUM_THREADS')})"
    yield from _accelerators()
    backends = ("gloo", "nccl", "mpi", "ucc", "xccl")
    present = [name for name in backends if dist.is_backend_available(name)]
    yield "back-ends", ", ".join(present) or "none"


def _accelerators() -> Iterator[tuple[str, str]]:
    if not torch.cuda.is_available():
        yield "cuda", f"no device (torch built for CUDA {torch.version.cuda or 'none'})"
        return
    yield "cuda", f"{torch.version.cuda}, cudnn {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{card.name}, {card.total_memory / 2**30:.0f} GiB"
    yield "CUDA_VISIBLE_DEVICES", _variable("CUDA_VISIBLE_DEVICES")


def _variable(name: str) -> str:
    return os.environ.get(name, "not set")
