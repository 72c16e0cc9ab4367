"""Copy a module to several devices, run the callbacks of the copies, and run the copies."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, jit, nn
from torch.nn.parallel import replicate as torch_replicate

from .session import ReplicationSession

_T = TypeVar("_T", bound=nn.Module)

CALLBACK = "__data_parallel_replicate__"


class CallbackContext:
    """A namespace that the copies of one submodule share during one replication.

    A new context is created for every replication, and callbacks may set any attribute on it.
    Before the first callback it has ``num_copies``, ``session`` (where the copies meet during the
    forward) and ``layer``, the path of the submodule in the model ("" for the model itself).
    """

    num_copies: int
    session: ReplicationSession
    layer: str

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the context of layer {self.__dict__.get('layer', '')!r} has no attribute {name!r}: "
            "no callback of this replication has set it"
        )


def exec_data_parallel_replication_callback(modules: Sequence[nn.Module]) -> None:
    """Run the replication callbacks of all submodules of all copies.

    The method ``__data_parallel_replicate__(ctx, copy_id)`` of a submodule is called with a new
    ``CallbackContext``, which is shared with the same submodule of the other copies. All
    callbacks of copy 0, the master, run before the first one of copy 1, and so on. A submodule
    that occurs twice in the model is called once.

    Args:
        modules: the copies, the master first.

    Raises:
        IndexError: ``modules`` is empty.
        ValueError: a copy and the master have different submodules.
        Exception: the error of a callback, with the copy and the submodule in a note.
    """
    if not modules:
        raise IndexError("modules must hold at least the master, got no copies")
    run_callbacks(modules, ReplicationSession(len(modules)))


def run_callbacks(modules: Sequence[nn.Module], session: ReplicationSession) -> None:
    """Run the callbacks of all copies within ``session``."""
    # All copies are checked before the first callback runs, so that a mismatch changes nothing.
    copies = [_submodules(module, modules[0], copy_id) for copy_id, module in enumerate(modules)]
    contexts = []
    for path, _ in modules[0].named_modules():
        context = CallbackContext()
        context.num_copies, context.session, context.layer = len(modules), session, path
        contexts.append(context)
    for copy_id, submodules in enumerate(copies):
        for context, submodule in zip(contexts, submodules, strict=True):
            callback = getattr(submodule, CALLBACK, None)
            if callback is None:
                continue
            try:
                callback(context, copy_id)
            except Exception as error:
                kind = type(submodule).__name__
                place = f"copy {copy_id} of {len(modules)}, layer {context.layer!r}"
                _add_note(error, f"in {kind}.{CALLBACK} of {place}")
                session.abort(error)
                raise


def replicate(module: _T, devices: Sequence[torch.device]) -> list[_T]:
    """Copy ``module`` to every device, through autograd, without running callbacks.

    On different CUDA devices torch makes the copies. Otherwise the parameters of every copy are
    the original ones, or are moved to its device, so that the gradients of all copies are summed
    there. Copy 0 uses the buffers of the module itself, the others have copies. A submodule or
    tensor that occurs twice in the module does so in every copy. Attributes that are set in a
    forward are lost with the copy.
    """
    refuse_compiled(module)
    if all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices):
        copies: list[_T] = torch_replicate(module, devices, not torch.is_grad_enabled())
        return copies
    return [_copy(module, device, is_master=not index) for index, device in enumerate(devices)]


def _copy(module: nn.Module, device: torch.device, *, is_master: bool) -> Any:
    """Copy ``module`` to ``device``."""
    originals = list(module.modules())
    replicas: list[Any] = [one._replicate_for_data_parallel() for one in originals]  # type: ignore[no-untyped-call]
    replica_of = dict(zip(map(id, originals), replicas, strict=True))
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device, copy=True)
        return moved[id(tensor)]

    for original, replica in zip(originals, replicas, strict=True):
        for name, child in original._modules.items():
            replica._modules[name] = None if child is None else replica_of[id(child)]
        # Plain attributes may refer to other parts of the model as well.
        for name, value in vars(original).items():
            if id(value) in replica_of:
                replica.__dict__[name] = replica_of[id(value)]
        for name, parameter in original._parameters.items():
            # The parameter itself if possible: an alias would be one more node of the graph.
            replica._parameters[name] = parameter
            if parameter is not None and parameter.device != device:
                # The __setattr__ of recurrent layers updates their list of weights. Assigning to
                # _parameters afterwards lets `parameters()` find the tensor too.
                del replica._parameters[name]
                setattr(replica, name, move(parameter))
                replica.__dict__.pop(name, None)
                replica._parameters[name] = move(parameter)
        for name, buffer in () if is_master else original._buffers.items():
            replica._buffers[name] = None if buffer is None else move(buffer)
    return replicas[0]


def refuse_compiled(module: nn.Module) -> None:
    """Raise TypeError if a part of ``module`` is compiled or scripted."""
    for path, part in module.named_modules():
        if _is_compiled(part):
            kind = type(getattr(part, "_orig_mod", part)).__name__
            raise TypeError(
                f"{path or 'the module'} ({kind}) is compiled, and compiled code runs on the "
                "original's parameters, not on a copy's; leave it uncompiled, or use ddp, which "
                "takes compiled models"
            )


def _is_compiled(part: nn.Module) -> bool:
    # Compared by name, because importing the compiler takes a second.
    is_wrapper = type(part).__name__ == "OptimizedModule" and hasattr(part, "_orig_mod")
    is_compiled = part.__dict__.get("_compiled_call_impl") is not None
    return is_wrapper or is_compiled or isinstance(part, jit.ScriptModule)


def _add_note(error: BaseException, text: str) -> None:
    """Add a note to ``error``; before Python 3.11, append it to a message that is a string."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} ({text})",)


def _submodules(module: nn.Module, master: nn.Module, copy_id: int) -> list[nn.Module]:
    """Return the submodules of a copy; raise ValueError if they differ from the master's."""
    own, expected = list(module.modules()), list(master.modules())
    if list(map(type, own)) == list(map(type, expected)):
        return own
    problem = f"it has {len(own)} submodules, the master {len(expected)}"
    for position, ((layer, other), one) in enumerate(
        zip(master.named_modules(), own, strict=False)
    ):
        if type(one) is not type(other):
            kinds = f"{type(one).__name__}, the master {type(other).__name__}"
            problem = f"at position {position} (layer {layer!r}) it has {kinds}"
            break
    raise ValueError(f"copy {copy_id} is not a copy of the master: {problem}")


class _ThreadState:
    """The settings of the calling thread that the threads of the copies take over."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        # Functions that create the contexts, in the order in which the contexts are entered.
        self._contexts: list[Callable[[], Any]] = []
        if torch.is_inference_mode_enabled():
            self._contexts.append(torch.inference_mode)
        self._contexts.append(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                dtype, cached = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
                self._contexts.append(partial(torch.autocast, kind, dtype, cache_enabled=cached))
        default = torch.get_default_device()
        if default.type != "cpu":
            self._contexts.append(lambda: default)
        # The pair (pack, unpack) of the innermost hooks; torch ignores the outer ones.
        saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if saving is not None:
            self._contexts.append(partial(torch.autograd.graph.saved_tensors_hooks, *saving))
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._current = torch.device("cuda", torch.cuda.current_device()) if started else None
        self._streams = {
            device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"
        }

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Apply the settings to this thread, and make a CUDA ``device`` the current one."""
        # The call applies `set_num_threads` to this thread; otherwise oneDNN and OpenMP would use
        # all cores.
        torch.get_num_threads()
        current = device if device.type == "cuda" else self._current
        with ExitStack() as stack:
            for make in self._contexts:
                stack.enter_context(make())
            if current is not None:
                stack.enter_context(torch.cuda.device(current))
            if device in self._streams:
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield


def run_copies(
    modules: Sequence[nn.Module],
    inputs: Sequence[Sequence[Any]],
    kwargs: Sequence[Mapping[str, Any]],
    *,
    devices: Sequence[torch.device],
    session: ReplicationSession,
) -> list[Any]:
    """Call every copy with its arguments; returns their outputs, in order.

    A single copy runs in the calling thread, several copies run in one new thread each, which has
    ended when this returns or raises. A copy that fails wakes the others; the error of the first
    one is raised, with the copy in a note.
    """
    outputs: list[Any] = [None] * len(modules)
    failures: list[tuple[int, BaseException]] = []
    state = _ThreadState(devices)

    def work(copy_id: int) -> None:
        try:
            with state.entered(devices[copy_id]):
                outputs[copy_id] = modules[copy_id](*inputs[copy_id], **kwargs[copy_id])
        except BaseException as error:
            failures.append((copy_id, error))
            session.finish(copy_id, error)
        else:
            session.finish(copy_id)

    if len(modules) == 1:
        work(0)
    else:
        _run_in_threads(work, len(modules), session)
    if failures:
        # The errors of the copies that were woken have the first error as their cause.
        errors = {id(error) for _, error in failures}
        failed, first = next(one for one in failures if id(one[1].__cause__) not in errors)
        failures.clear()
        _add_note(first, f"in copy {failed} of {len(modules)} on {devices[failed]}")
        try:
            raise first
        finally:
            # Its traceback refers to this frame, and so to the activations of the copies.
            del first
    return outputs


def _run_in_threads(
    work: Callable[[int], None], num_copies: int, session: ReplicationSession
) -> None:
    """Call ``work`` for every copy in a new thread, and wait for all of them.

    Copy 0 gets a thread too. Autograd runs nodes by numbers that each thread of the forward counts
    from its start, so a copy in the calling thread would run its whole backward first, and its
    gradients would wait in memory for the ones that they are added to.
    """
    # Daemon threads do not keep the process alive if a copy hangs after a second interrupt.
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(work, copy_id),
            name=f"stepwrap copy {copy_id}",
            daemon=True,
        )
        for copy_id in range(num_copies)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:
        session.abort(error)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
