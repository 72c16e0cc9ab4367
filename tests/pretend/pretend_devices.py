"""Pretend devices of CUDA, XPU or MPS on a build of torch for the CPU only.

A tensor on a pretend device is a plain `torch.Tensor` with the device `cuda:0` and the dispatch
keys of CUDA, whose memory is that of the host. Operations run on the host. What a real device would
do otherwise is recorded or raised: an operation that waits for the device is noted with its line,
tensors of two devices raise, a copy that does not wait finishes late, and memory can run out.

PRETEND_CUDA is the number of devices. With PRETEND_KIND=xpu or mps they have that type and torch's
functions for it; `pretend_kinds.py` lists what differs.

They cannot show NCCL itself, the collectives of XPUs, operations that a device lacks, races between
streams, speed, the numerics of kernels, or Triton.

`prepare` must be called before torch is imported; `site/sitecustomize.py` does so in each process.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import pretend_build
from pretend_kinds import KIND

# Why there are no devices although PRETEND_CUDA asks for them.
reason: str | None = None


def prepare() -> None:
    """Give torch PRETEND_CUDA devices as soon as it is imported, or set `reason`."""
    global reason
    try:
        library = pretend_build.build_guard()
    except pretend_build.UnavailableError as error:
        reason = str(error)
        return
    sys.meta_path.insert(0, _TorchFinder(str(library), int(os.environ["PRETEND_CUDA"])))


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Find torch as usual, with a loader that also installs the devices."""

    def __init__(self, library: str, count: int) -> None:
        self.library, self.count = library, count

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        specification = importlib.machinery.PathFinder.find_spec(name, path)
        if specification is not None and specification.loader is not None:
            specification.loader = _TorchLoader(specification.loader, self.library, self.count)
        return specification


class _TorchLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, library: str, count: int) -> None:
        self.loader, self.library, self.count = loader, library, count

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import pretend_library

        # Before torch, which asks for the hooks of CUDA only once, while it is imported.
        pretend_library.load(self.library, self.count)
        self.loader.exec_module(module)
        import pretend_collectives
        import pretend_operations
        import pretend_runtime

        pretend_operations.install()
        pretend_runtime.install(pretend_library.device_count)
        if KIND.type == "cuda":
            pretend_collectives.install()


@dataclass
class Work:
    """What the devices did in a block of code.

    Attributes:
        waits: the operations for which the host waited, each with the line that called it.
        launches: the number of operations by name.
        copies: the number of copies "to the host" and "from the host".
        collectives: the number of collectives by name.
    """

    waits: list[str] = field(default_factory=list)
    launches: dict[str, int] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)


@contextmanager
def recording_work() -> Iterator[Work]:
    """Record what the devices do inside this context, in all threads of this process."""
    import pretend_runtime

    work = Work()
    pretend_runtime.recorders.append(work)
    try:
        yield work
    finally:
        pretend_runtime.recorders.remove(work)


@contextmanager
def limited_memory(limit: int, device: int = 0) -> Iterator[None]:
    """Let a device have ``limit`` bytes; an allocation beyond raises ``OutOfMemoryError``."""
    from pretend_library import library

    library.pretend_set_limit(device, limit)
    try:
        yield
    finally:
        library.pretend_set_limit(device, 0)
