"""Run the copies of a module at the same time, one thread each."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .replicate import note, parts_of
from .session import ReplicationSession

# Bytes of gradients; measured: a tenth of a step lost at 1 MB, none at 4, a fifth won at 8 MB.
_LARGE = 4 * 2**20


class _Surroundings:
    """What the calling thread has set for itself and every copy's thread is to have as well."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        self.default_device = torch.get_default_device()
        # (pack, unpack), as of `save_on_cpu`; only the innermost ones are used.
        self.saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self.current = torch.device("cuda", torch.cuda.current_device()) if started else None
        self.streams = {
            device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"
        }

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """In a new thread: as in the calling thread, with ``device`` as the current one."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype, cached in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
            if self.default_device.type != "cpu":
                stack.enter_context(self.default_device)
            if self.saving is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saving))
            stack.enter_context(self.on(device))
            if device in self.streams:
                stack.enter_context(torch.cuda.stream(self.streams[device]))
            yield

    def on(self, device: torch.device) -> Any:
        """With ``device``, if it is a CUDA device, else the caller's, as the current one."""
        wanted = device if device.type == "cuda" else self.current
        return nullcontext() if wanted is None else torch.cuda.device(wanted)


def run_copies(
    modules: Sequence[nn.Module],
    inputs: Sequence[Sequence[Any]],
    kwargs: Sequence[Mapping[str, Any]],
    *,
    devices: Sequence[torch.device],
    session: ReplicationSession,
) -> list[Any]:
    """Call every copy with its arguments; returns what they return, in order.

    Each runs in a thread of its own, which has ended when this returns or raises, except copy 0
    of a small model or without a backward to come: that one runs in the calling thread. A copy
    that fails wakes those that wait for it in the session.

    Raises:
        BaseException: the error of the copy that failed first, itself, with the copy and its
            device in a note.
    """
    outputs: list[Any] = [None] * len(modules)
    failures: list[tuple[int, BaseException]] = []
    around = _Surroundings(devices)
    apart = _is_first_apart(modules[0], devices)

    def work(copy_id: int) -> None:
        device = devices[copy_id]
        try:
            with around.entered(device) if copy_id or apart else around.on(device):
                outputs[copy_id] = modules[copy_id](*inputs[copy_id], **kwargs[copy_id])
        except BaseException as error:
            failures.append((copy_id, error))
            session.finish(copy_id, error)
        else:
            session.finish(copy_id)

    _run_in_threads(work, range(0 if apart else 1, len(modules)), session)
    if failures:
        failed, cause = _first(failures)
        failures.clear()
        note(cause, f"in copy {failed} of {len(modules)} on {devices[failed]}")
        try:
            raise cause
        finally:
            # Its traceback holds this frame, and so the copies' activations.
            del cause
    return outputs


def _is_first_apart(master: nn.Module, devices: Sequence[torch.device]) -> bool:
    """Whether copy 0 gets a thread as well, for a backward in which the copies take turns.

    One thread of autograd for each device takes the nodes of the graph in the order of numbers
    that every thread of a forward counts by itself. New threads count alike. The calling thread
    is far ahead, so that all gradients of its copy come first, and wait in memory for those that
    they are added to. That costs more than the thread where they do not fit into the caches.
    """
    if not torch.is_grad_enabled() or len(set(devices)) == len(devices):
        return False
    size = 0
    for part in parts_of(master):
        for parameter in part._parameters.values():
            if parameter is not None and parameter.requires_grad:
                size += parameter.nbytes
                if size > _LARGE:
                    return True
    return False


def _run_in_threads(work: Callable[[int], None], apart: range, session: ReplicationSession) -> None:
    """Call ``work`` for the copies of ``apart`` in new threads, and for copy 0 here if it is none.

    On an interrupt all of them end.
    """
    # Daemons: after a second interrupt, a copy that never ends does not keep the process.
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(work, copy_id),
            name=f"stepwrap copy {copy_id}",
            daemon=True,
        )
        for copy_id in apart
    ]
    try:
        for thread in threads:
            thread.start()
        if 0 not in apart:
            work(0)
        for thread in threads:
            thread.join()
    except BaseException as error:
        session.abort(error)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise


def _first(failures: list[tuple[int, BaseException]]) -> tuple[int, BaseException]:
    """The failure that the others, which were woken by it, come from."""
    by_identity = {id(error): (copy_id, error) for copy_id, error in failures}
    found = failures[0]
    for _ in failures:
        found = by_identity.get(id(found[1].__cause__), found)
    return found
