"""Graphs as compiled programs, kept on disk from run to run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from .errors import NotCompilableError, first_line

Program = Callable[[list[Tensor]], list[Tensor]]

# What changes a program beside its graph. Random numbers are drawn as in eager mode.
_SETTINGS = {"fallback_random": True}


class Compiler:
    """Makes programs of graphs.

    Args:
        backend: "inductor", or "eager": run the graph as it is.
        announce: called before a graph is compiled that is not in the cache, with an estimate of
            the time in seconds.
    """

    def __init__(self, backend: str, announce: Callable[[float], None]) -> None:
        self._backend, self._announce = backend, announce

    def __call__(self, graph: GraphModule, inputs: Sequence[Tensor]) -> Program:
        """Return ``graph`` as a program for inputs like these, from the cache if it is there.

        It changes the inputs as the graph does. Those of the program must have the same shapes,
        data types, strides and devices, which is not checked.

        Raises:
            NotCompilableError: the compiler fails, or the cache is not for this user alone.
        """
        kind = inputs[0].device.type
        try:
            # The graph has all casts of autocast in it.
            with torch.autocast(kind, enabled=False):
                if self._backend == "eager":
                    return partial(_run_as_it_is, graph, kind)
                if kind == "cpu":
                    return self._ahead_of_time(graph, inputs)
                # A CUDA graph needs no program without Python, whose compiler needs CUDA's headers.
                settings = {**_SETTINGS, "triton.cudagraphs": False}
                self._announce(_seconds(graph))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    compiled: Any = torch._inductor.compile(
                        graph, [one.detach() for one in inputs], options=settings
                    )
                return lambda tensors: compiled(*tensors)
        except Exception as error:
            raise NotCompilableError(
                f"the compiler fails: {type(error).__name__}: {first_line(error)}"
            ) from error

    def _ahead_of_time(self, graph: GraphModule, inputs: Sequence[Tensor]) -> Program:
        path = _cache() / f"{_key(graph, inputs)}.pt2"
        if not path.exists():
            self._announce(_seconds(graph))
            with Path(f"{path}.lock").open("w") as lock:
                # One of the ranks compiles, and the others find what it made.
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _compile(graph, inputs, path)
        package: Any = torch._inductor.aoti_load_package(str(path))
        run: Program = package.loader.run
        return run


def _seconds(graph: GraphModule) -> float:
    """Estimate how long compiling takes, by the size of the graph; measured on one core."""
    # The first program of a cache prepares headers.
    is_first = not any(_cache().glob("*.pt2"))
    return 5 + 0.025 * len(graph.graph.nodes) + 10 * is_first


def _run_as_it_is(graph: GraphModule, kind: str, inputs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        outputs: list[Tensor] = graph(*inputs)
        return outputs


def _compile(graph: GraphModule, inputs: Sequence[Tensor], path: Path) -> None:
    class Flat(nn.Module):
        def forward(self, *flat: Tensor) -> list[Tensor]:
            outputs: list[Tensor] = graph(*flat)
            return outputs

    with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        warnings.simplefilter("ignore")
        # Parameters would be refused: they are changed in place.
        exported = torch.export.export(Flat(), tuple(one.detach() for one in inputs))
        made = torch._inductor.aoti_compile_and_package(
            exported, package_path=f"{folder}/step.pt2", inductor_configs=dict(_SETTINGS)
        )
        # At once: another run may be looking for it.
        os.replace(made, path)


def _key(graph: GraphModule, inputs: Sequence[Tensor]) -> str:
    """What a program depends on, as a hash."""
    described = [
        graph.code,
        *(f"{one.dtype} {tuple(one.shape)} {one.stride()} {one.device}" for one in inputs),
        *(f"{name} {value!r}" for name, value in sorted(_SETTINGS.items())),
        torch.__version__,
        torch.__config__.show(),
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        f"{torch.get_num_threads()} threads",
    ]
    digest = hashlib.sha256("\n".join(described).encode())
    for name, value in sorted(graph.named_buffers()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _cache() -> Path:
    """The folder of the programs, which must be this user's own: they are run."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    place = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    folder = Path(chosen or place, "stepwrap")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"{folder} can be written by others, whose programs would run here: set "
            "TORCHINDUCTOR_CACHE_DIR to a folder of your own"
        )
    return folder
