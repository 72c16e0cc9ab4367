"""A program for a GPU as a CUDA graph: one launch, however many kernels it has."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .errors import NotCompilableError, first_line
from .program import Program


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
        # It has the constants that the graph reads.
        self._program = program
        self._copies = [one.clone() for one in inputs[self._fixed :]]
        with _side_stream(inputs[0].device) as stream:
            self._graph, self._outputs = capture(
                program, [*inputs[: self._fixed], *self._copies], stream
            )

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        given = inputs[self._fixed :]
        for copy, one in zip(self._copies, given, strict=True):
            copy.copy_(one)
        self._graph.replay()
        for copy, one in zip(self._copies[: self._changed], given, strict=False):
            one.copy_(copy)
        # The next launch writes to the same ones.
        return [one.clone() for one in self._outputs]


def capture(
    program: Program, inputs: list[Tensor], stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Return a graph of what a program does, which is not done, and the outputs it will have."""
    graph = torch.cuda.CUDAGraph()
    # Not "global": other threads may pin memory meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        return graph, program(inputs)


def warm_up(program: Program, inputs: Sequence[Tensor]) -> None:
    """Run a program on copies, twice: a first run loads and tunes kernels, which no graph holds.

    Raises:
        NotCompilableError: it fails, or waits for the GPU, after which a capture could not go on.
    """
    with _side_stream(inputs[0].device):
        program([one.clone() for one in inputs])
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            program([one.clone() for one in inputs])
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Work on another stream, without autocast, and leave random numbers as they are."""
    stream, autocast = _stream(device), torch.autocast(device.type, enabled=False)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        # Here too, as a capture that fails does not take its stream back.
        with torch.cuda.stream(stream), torch.random.fork_rng([device]), torch.no_grad(), autocast:
            yield stream
    except Exception as error:
        raise NotCompilableError(f"no CUDA graph: {first_line(error)}") from error
    torch.cuda.current_stream(device).wait_stream(stream)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # One for all: libraries keep memory for each that they have met.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
