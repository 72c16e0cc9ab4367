"""A program for a GPU as a CUDA graph: one launch, however many kernels it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .program import Program
from .trace import NotCompilableError, first_line


class CudaGraph:
    """Does to the same tensors what a program did when it was captured.

    A graph knows tensors by their addresses; nobody checks that they still lie there.

    Args:
        inputs: what the program takes, all on one GPU. It reads and changes them where they lie,
            but for the last ``given``, which are copied before each launch to where it reads them.
        changed: so many of those that are given are changed, and copied back.

    Raises:
        NotCompilableError: the program does what no graph holds, as waiting for the GPU.
    """

    def __init__(
        self, program: Program, inputs: Sequence[Tensor], given: int, changed: int
    ) -> None:
        self._fixed, self._changed = len(inputs) - given, changed
        self._copies = [one.clone() for one in inputs[self._fixed :]]
        with _undisturbed(inputs[0].device):
            self._graph, self._outputs = capture(program, [*inputs[: self._fixed], *self._copies])

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        given = inputs[self._fixed :]
        for copy, one in zip(self._copies, given, strict=True):
            copy.copy_(one)
        self._graph.replay()
        for copy, one in zip(self._copies[: self._changed], given, strict=False):
            one.copy_(copy)
        # The next launch writes to the same ones.
        return [one.clone() for one in self._outputs]


def capture(program: Program, inputs: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Return a graph of what a program does, which is not done, and the outputs it will have."""
    graph = torch.cuda.CUDAGraph()
    # Not "global": other threads may pin memory meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        return graph, program(inputs)


def warm_up(program: Program, inputs: Sequence[Tensor]) -> None:
    """Run a program on copies, on a stream of its own: a first run loads and tunes kernels.

    Raises:
        NotCompilableError: it fails.
    """
    with _undisturbed(inputs[0].device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            program([one.clone() for one in inputs])
        torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Work on a GPU without autocast, and leave random numbers as they are."""
    autocast = torch.autocast(device.type, enabled=False)
    try:
        with torch.cuda.device(device), torch.random.fork_rng([device]), torch.no_grad(), autocast:
            yield
    except RuntimeError as error:
        raise NotCompilableError(f"no CUDA graph: {first_line(error)}") from error
