"""Copies of a module on several devices: made, called back, and run at the same time."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, jit, nn
from torch.nn.parallel import replicate as torch_replicate

from .session import ReplicationSession

_T = TypeVar("_T", bound=nn.Module)

CALLBACK = "__data_parallel_replicate__"
# Types of attributes that are no modules; all that most modules have.
_PLAIN = frozenset({bool, int, float, str, tuple, list, dict, set, OrderedDict, type(None)})
# Bytes of gradients; measured: a tenth of a step lost at 1 MB, none at 4, a fifth won at 8 MB.
_LARGE = 4 * 2**20


class CallbackContext:
    """What the copies of one submodule share during one replication: attributes, freely set.

    Created for every replication. Before any callback it has ``num_copies``, ``session``
    (where the copies meet during the forward) and ``layer``, the path of the submodule in the
    model ("" for the model itself).
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
    """Tell the submodules of every copy that they have been copied.

    A submodule with a method ``__data_parallel_replicate__(ctx, copy_id)`` has it called with a
    fresh ``CallbackContext`` that it shares with the same submodule of the other copies. All
    callbacks of copy 0, the master, come before any of copy 1, and so on. A submodule that
    occurs twice in the model counts once.

    Args:
        modules: the copies, the master first.

    Raises:
        IndexError: there are no copies.
        ValueError: a copy has other submodules than the master.
        Exception: the error of a callback, with the copy and the submodule in a note.
    """
    if not modules:
        raise IndexError("there are no copies to call back; give at least the master")
    run_callbacks(modules, ReplicationSession(len(modules)))


def run_callbacks(modules: Sequence[nn.Module], session: ReplicationSession) -> None:
    """``exec_data_parallel_replication_callback`` within a session that exists already."""
    # All are compared before any callback runs, so that a wrong pairing changes nothing.
    copies = [_paired(module, modules[0], copy_id) for copy_id, module in enumerate(modules)]
    callbacks = [[_callback_of(one) for one in submodules] for submodules in copies]
    if not any(map(any, callbacks)):
        return
    contexts = []
    for path, _ in modules[0].named_modules():
        context = CallbackContext()
        context.num_copies, context.session, context.layer = len(modules), session, path
        contexts.append(context)
    for copy_id, own in enumerate(callbacks):
        for position, callback in enumerate(own):
            if callback is None:
                continue
            try:
                callback(contexts[position], copy_id)
            except Exception as error:
                kind = type(copies[copy_id][position]).__name__
                note(
                    error,
                    f"in {kind}.{CALLBACK} of copy {copy_id} of {len(modules)}, layer "
                    f"{contexts[position].layer!r}",
                )
                session.abort(error)
                raise


def replicate(module: _T, devices: Sequence[torch.device]) -> list[_T]:
    """Copy ``module`` to every device, through autograd; callbacks are not run.

    By torch on different CUDA devices. Else the parameters of every copy are the original ones, or
    transfers of them to its device, so that the gradients of all copies sum there; copy 0 has the
    very buffers of the module, the others have copies. What occurs twice in the module does so in
    every copy. Attributes set in a forward are lost with the copy.
    """
    refuse_compiled(module)
    if all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices):
        copies: list[_T] = torch_replicate(module, devices, not torch.is_grad_enabled())
        return copies
    originals = parts_of(module)
    return [_copy(originals, device, is_master=not index) for index, device in enumerate(devices)]


def parts_of(module: nn.Module) -> list[nn.Module]:
    """What ``module.modules()`` yields, at a fifth of its cost."""
    found: dict[int, nn.Module] = {}
    stack: list[nn.Module | None] = [module]
    while stack:
        one = stack.pop()
        if one is None or id(one) in found:
            continue
        found[id(one)] = one
        if one._modules:
            stack.extend(reversed(list(one._modules.values())))
    return list(found.values())


def _copy(originals: Sequence[nn.Module], device: torch.device, *, is_master: bool) -> Any:
    """One copy of the first of ``originals``, which are its parts."""
    replicas = [_attributes_of(one) for one in originals]
    modules: dict[int, Any] = dict(zip(map(id, originals), replicas, strict=True))
    tensors: dict[int, Tensor] = {}

    def transferred(tensor: Tensor) -> Tensor:
        if id(tensor) not in tensors:
            tensors[id(tensor)] = tensor.to(device, copy=True)
        return tensors[id(tensor)]

    for original, replica in zip(originals, replicas, strict=True):
        for name, child in original._modules.items():
            replica._modules[name] = None if child is None else modules[id(child)]
        values = original.__dict__
        if not _PLAIN.issuperset(map(type, values.values())):
            # A module that another one refers to without owning it.
            held = {name: modules.get(id(value)) for name, value in values.items()}
            replica.__dict__.update((name, one) for name, one in held.items() if one is not None)
        for name, parameter in original._parameters.items():
            # Itself where it can, not an alias: that would be one more node of the graph.
            replica._parameters[name] = parameter
            if parameter is not None and parameter.device != device:
                # Recurrent layers keep a list beside their parameters, which their own __setattr__
                # looks after; as a parameter it is found by `parameters()` too.
                del replica._parameters[name]
                setattr(replica, name, transferred(parameter))
                replica.__dict__.pop(name, None)
                replica._parameters[name] = transferred(parameter)  # type: ignore[assignment]
        for name, buffer in () if is_master else original._buffers.items():
            replica._buffers[name] = None if buffer is None else transferred(buffer)
    return replicas[0]


def refuse_compiled(module: nn.Module) -> None:
    """Raise TypeError when a part of ``module`` is compiled or scripted."""
    if not any(map(_is_compiled, parts_of(module))):
        return
    path, part = next(one for one in module.named_modules() if _is_compiled(one[1]))
    named = f"{path or 'the module'} ({type(getattr(part, '_orig_mod', part)).__name__})"
    raise TypeError(
        f"{named} is compiled, and compiled code runs on the original's parameters, not "
        "on a copy's; leave it uncompiled, or use ddp, which takes compiled models"
    )


def note(error: BaseException, text: str) -> None:
    """Add a line to the printed error; before Python 3.11 to its text, if it is one."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} ({text})",)


def _is_compiled(part: nn.Module) -> bool:
    # By name: importing the compiler to ask takes longer than most models.
    whole = type(part).__name__ == "OptimizedModule" and hasattr(part, "_orig_mod")
    own = part.__dict__.get("_compiled_call_impl") is not None
    return whole or own or isinstance(part, jit.ScriptModule)


def _attributes_of(module: nn.Module) -> nn.Module:
    """A module with the attributes of ``module``, without its parameters."""
    kind = type(module)
    if kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
        # Lazy and recurrent ones do it their own way.
        return module._replicate_for_data_parallel()  # type: ignore[no-untyped-call,no-any-return]
    # The same without five calls of nn.Module's __setattr__, which take most of its time.
    replica = kind.__new__(kind)
    attributes = module.__dict__.copy()
    attributes["_parameters"] = {}
    attributes["_buffers"] = module._buffers.copy()
    attributes["_modules"] = module._modules.copy()
    attributes["_is_replica"] = True
    object.__setattr__(replica, "__dict__", attributes)
    return replica


def _callback_of(module: nn.Module) -> Callable[[CallbackContext, int], None] | None:
    kind = type(module)
    if (
        kind.__getattr__ is nn.Module.__getattr__
        and not hasattr(kind, CALLBACK)
        and CALLBACK not in module.__dict__
    ):
        # nn.Module takes long to find nothing.
        return None
    return getattr(module, CALLBACK, None)


def _paired(module: nn.Module, master: nn.Module, copy_id: int) -> list[nn.Module]:
    """The submodules of a copy, after a check that they are those of the master."""
    mine, theirs = parts_of(module), parts_of(master)
    kinds, expected = list(map(type, mine)), list(map(type, theirs))
    if kinds == expected:
        return mine
    told = f"it has {len(mine)} submodules, the master {len(theirs)}"
    layers = [path for path, _ in master.named_modules()]
    for position, (layer, own, other) in enumerate(zip(layers, kinds, expected, strict=False)):
        if own is not other:
            place = f"at position {position} (layer {layer!r})"
            told = f"{place} it has {own.__name__}, the master {other.__name__}"
            break
    raise ValueError(f"copy {copy_id} is not a copy of the master: {told}")


class _Surroundings:
    """What the calling thread has set for itself and every copy's thread is to have as well."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        # What makes each context, in the order in which they are entered.
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
        # (pack, unpack), as of `save_on_cpu`; only the innermost ones are used.
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
        """In a new thread: as in the calling thread, with ``device`` as the current one."""
        # Sets for this thread what set_num_threads was told: else oneDNN and OpenMP take all cores.
        torch.get_num_threads()
        with ExitStack() as stack:
            for make in self._contexts:
                stack.enter_context(make())
            stack.enter_context(self.on(device))
            if device in self._streams:
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield

    def on(self, device: torch.device) -> Any:
        """With ``device``, if it is a CUDA device, else the caller's, as the current one."""
        wanted = device if device.type == "cuda" else self._current
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
    that fails wakes the others; the error of the first one is raised, with the copy in a note.
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
        # The one that the others, which were woken by it, come from.
        by_identity = {id(error): (copy_id, error) for copy_id, error in failures}
        failed, cause = failures[0]
        for _ in failures:
            failed, cause = by_identity.get(id(cause.__cause__), (failed, cause))
        by_identity.clear()
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
    sizes = (
        one.nbytes
        for part in parts_of(master)
        for one in part._parameters.values()
        if one is not None and one.requires_grad
    )
    return any(total > _LARGE for total in accumulate(sizes))


def _run_in_threads(work: Callable[[int], None], apart: range, session: ReplicationSession) -> None:
    """Call ``work`` for the copies ``apart`` in new threads, and for copy 0 here if it is none."""
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
