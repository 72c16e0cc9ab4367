"""A program for a GPU as a CUDA graph: all of its kernels run in one launch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .capture import NotCompilableError, first_line
from .program import Program


class CudaGraph:
    """Replay a program on the tensors with which it was captured.

    A graph uses tensors by their addresses and does not check whether these are still valid.

    Args:
        inputs: the inputs of the program, all on one GPU. The graph reads and changes them in
            place, except for the last ``num_given`` inputs, which are copied to fixed tensors
            before each launch.
        num_given: number of inputs at the end of ``inputs`` that differ from call to call.
        changed: number of these given inputs that the program changes, which come first among them;
            they are copied back after each launch.
        pool: the memory of another graph, which must not run at the same time; None for its own.

    Raises:
        NotCompilableError: the program does something that a graph cannot contain, such as waiting
            for the GPU.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[Tensor],
        *,
        num_given: int,
        changed: int,
        pool: Any = None,
    ) -> None:
        self._fixed, self._changed = len(inputs) - num_given, changed
        # Keeps the constants alive that the graph reads.
        self._program = program
        self._copies = [tensor.clone() for tensor in inputs[self._fixed :]]
        self._graph = torch.cuda.CUDAGraph()
        with (
            _side_stream(inputs[0].device) as stream,
            # Not "global", because other threads may pin memory during the capture.
            torch.cuda.graph(
                self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ),
        ):
            self._outputs = program([*inputs[: self._fixed], *self._copies])

    @property
    def pool(self) -> Any:
        """The memory of the graph, for other graphs."""
        return self._graph.pool()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        varying = inputs[self._fixed :]
        for copy, tensor in zip(self._copies, varying, strict=True):
            copy.copy_(tensor)
        self._graph.replay()
        for copy, tensor in zip(self._copies[: self._changed], varying, strict=False):
            tensor.copy_(copy)
        # Copies, because the next launch writes to the same tensors.
        return [output.clone() for output in self._outputs]


def warm_up(program: Program, inputs: Sequence[Tensor]) -> None:
    """Run a program twice on copies, because kernels cannot be loaded or tuned during a capture.

    Raises:
        NotCompilableError: the program fails, or waits for the GPU, which a capture does not allow.
    """
    with _side_stream(inputs[0].device):
        program([tensor.clone() for tensor in inputs])
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            program([tensor.clone() for tensor in inputs])
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Enter another stream, without autocast, and restore the random state afterwards."""
    stream, autocast = _stream(device), torch.autocast(device.type, enabled=False)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        # Entered here as well, because a capture that fails does not restore the stream.
        with torch.cuda.stream(stream), torch.random.fork_rng([device]), torch.no_grad(), autocast:
            yield stream
    except Exception as error:
        raise NotCompilableError(f"no CUDA graph: {first_line(error)}") from error
    torch.cuda.current_stream(device).wait_stream(stream)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # One stream per device, because libraries keep memory for each stream.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
