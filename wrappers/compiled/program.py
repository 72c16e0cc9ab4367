"""Compile graphs into programs, with a cache on disk for CPUs."""

from __future__ import annotations

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

from ...primitives.files import locked, replacing
from ...primitives.tensor_bits import tensor_bytes
from .capture import NotCompilableError, first_line

Program = Callable[[list[Tensor]], list[Tensor]]

# Options of Inductor; with this one, programs draw the same random numbers as eager mode.
_SETTINGS = {"fallback_random": True}


class Compiler:
    """Compile graphs into programs.

    Args:
        backend: "inductor", or "eager" to run the graph without a compiler.
        announce: called with the estimated time in seconds before compiling a graph that is not in
            the cache.
    """

    def __init__(self, backend: str, announce: Callable[[float], None]) -> None:
        self._backend, self._announce = backend, announce

    def __call__(self, graph: GraphModule, inputs: Sequence[Tensor]) -> Program:
        """Return ``graph`` as a program, from the cache if possible.

        The program changes its inputs in place, as the graph does. Its inputs must have the shapes,
        data types, strides and devices of ``inputs``, which is not checked.

        Raises:
            NotCompilableError: the compiler fails, or other users can write to the cache.
        """
        kind = inputs[0].device.type
        try:
            # The graph contains the casts of autocast already.
            with torch.autocast(kind, enabled=False):
                if self._backend == "eager":
                    return partial(_run_eagerly, graph, kind)
                if kind == "cpu":
                    return self._ahead_of_time(graph, inputs)
                # Ahead-of-time compilation needs CUDA's headers and gains nothing for CUDA graphs.
                settings = {**_SETTINGS, "triton.cudagraphs": False}
                self._announce(_seconds(graph))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    compiled: Any = torch._inductor.compile(
                        graph, [tensor.detach() for tensor in inputs], options=settings
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
            # One of the ranks compiles, and the others load its program.
            with locked(Path(f"{path}.lock")):
                if not path.exists():
                    _compile(graph, inputs, path)
        package: Any = torch._inductor.aoti_load_package(str(path))
        run: Program = package.loader.run
        return run


def _seconds(graph: GraphModule) -> float:
    """Estimate the seconds for compiling from the size of the graph; measured on one core."""
    # The first program in a cache also compiles headers.
    is_first = not any(_cache().glob("*.pt2"))
    return 5 + 0.025 * len(graph.graph.nodes) + 10 * is_first


def _run_eagerly(graph: GraphModule, kind: str, inputs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        outputs: list[Tensor] = graph(*inputs)
        return outputs


def _compile(graph: GraphModule, inputs: Sequence[Tensor], path: Path) -> None:
    class Flat(nn.Module):
        def forward(self, *flat: Tensor) -> list[Tensor]:
            outputs: list[Tensor] = graph(*flat)
            return outputs

    # Another run may read the file.
    with warnings.catch_warnings(), replacing(path) as draft:
        warnings.simplefilter("ignore")
        # Detached, because export does not allow parameters to be changed in place.
        exported = torch.export.export(Flat(), tuple(tensor.detach() for tensor in inputs))
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(draft), inductor_configs=dict(_SETTINGS)
        )


def _key(graph: GraphModule, inputs: Sequence[Tensor]) -> str:
    """Return a hash of everything that determines a program."""
    described = [
        graph.code,
        *(
            f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device}"
            for tensor in inputs
        ),
        *(f"{name} {value!r}" for name, value in sorted(_SETTINGS.items())),
        torch.__version__,
        torch.__config__.show(),
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        f"{torch.get_num_threads()} threads",
    ]
    digest = hashlib.sha256("\n".join(described).encode())
    for name, value in sorted(graph.named_buffers()):
        digest.update(name.encode())
        digest.update(tensor_bytes(value.cpu()).numpy().data)
    return digest.hexdigest()[:32]


def _cache() -> Path:
    """Return the folder of the programs, to which only this user may write.

    Raises:
        PermissionError: others can write to it; they could replace programs, which are executed.
    """
    default = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default, "stepwrap")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"the cache of programs must be writable for this user only, but others can write to "
            f"{folder}: set TORCHINDUCTOR_CACHE_DIR to a private folder"
        )
    return folder
