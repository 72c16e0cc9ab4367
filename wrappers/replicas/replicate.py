"""Copy a module to several devices, run the callbacks of the copies, and run the copies."""

from __future__ import annotations

import contextvars
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

from ...primitives.notes import add_note
from .session import ReplicationSession

_T = TypeVar("_T", bound=nn.Module)

CALLBACK = "__data_parallel_replicate__"
# Types whose values cannot be modules. Most modules have only attributes of these types.
_PLAIN = frozenset({bool, int, float, str, tuple, list, dict, set, OrderedDict, type(None)})
# With more bytes of gradients than this, copy 0 gets a thread. A step with this thread was a tenth
# slower at 1 MB, equally fast at 4 MB, and a fifth faster at 8 MB.
_LARGE = 4 * 2**20


class CallbackContext:
    """A namespace that the copies of one submodule share during one replication.

    A new context is created for every replication, and callbacks may set any attribute on it. At
    first it has these:

    Attributes:
        num_copies: number of copies of the model.
        session: the session through which the copies exchange messages during the forward.
        layer: path of the submodule in the model; "" for the model itself.
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

    A callback is the method ``__data_parallel_replicate__(ctx, copy_id)`` of a submodule. It is
    called with a new ``CallbackContext``, which is shared with the same submodule of the other
    copies. All callbacks of copy 0, the *master*, run before the first one of copy 1, and so on. A
    submodule that occurs twice in the model is called once.

    Args:
        modules: the copies, the master first.

    Raises:
        IndexError: ``modules`` is empty.
        ValueError: a copy and the master have different submodules.
        Exception: the error of a callback, with the copy and the submodule in a note.
    """
    if not modules:
        raise IndexError("modules must contain at least the master (copy 0), got no copies")
    run_callbacks(modules, ReplicationSession(len(modules)))


def run_callbacks(modules: Sequence[nn.Module], session: ReplicationSession) -> None:
    """Run the callbacks of all copies within ``session``."""
    # All copies are checked before the first callback runs, so that a mismatch changes nothing.
    copies = [_submodules(module, modules[0], copy_id) for copy_id, module in enumerate(modules)]
    callbacks = [[_get_callback(submodule) for submodule in submodules] for submodules in copies]
    if not any(map(any, callbacks)):
        return
    contexts = []
    for path, _ in modules[0].named_modules():
        context = CallbackContext()
        context.num_copies, context.session, context.layer = len(modules), session, path
        contexts.append(context)
    for copy_id, submodules in enumerate(copies):
        of_copy = zip(contexts, submodules, callbacks[copy_id], strict=True)
        for context, submodule, callback in of_copy:
            if callback is None:
                continue
            try:
                callback(context, copy_id)
            except Exception as error:
                kind = type(submodule).__name__
                location = f"copy {copy_id} of {len(modules)}, layer {context.layer!r}"
                add_note(error, f"in {kind}.{CALLBACK} of {location}")
                session.abort(error)
                raise


def replicate(module: _T, devices: Sequence[torch.device]) -> list[_T]:
    """Copy ``module`` to every device, through autograd, without running callbacks.

    If all devices are different CUDA devices, torch creates the copies. Otherwise each copy uses
    the original parameters that are on its device already, and the others are copied to its device
    as part of the autograd graph. Either way the gradients of all copies are summed in the original
    parameters. Copy 0 uses the buffers of the module itself, the others have copies. A submodule or
    tensor that occurs twice in the module also occurs twice in every copy. Attributes that a
    forward sets are lost with the copy.
    """
    refuse_compiled(module)
    if all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices):
        copies: list[_T] = torch_replicate(module, devices, not torch.is_grad_enabled())
        return copies
    originals = get_parts(module)
    return [_copy(originals, device, is_master=not index) for index, device in enumerate(devices)]


def get_parts(module: nn.Module) -> list[nn.Module]:
    """Return ``list(module.modules())``, five times faster."""
    modules: dict[int, nn.Module] = {}
    stack: list[nn.Module | None] = [module]
    while stack:
        child = stack.pop()
        if child is None or id(child) in modules:
            continue
        modules[id(child)] = child
        if child._modules:
            stack.extend(reversed(list(child._modules.values())))
    return list(modules.values())


def _copy(originals: Sequence[nn.Module], device: torch.device, *, is_master: bool) -> Any:
    """Copy a module to ``device``; ``originals`` is the module followed by its submodules."""
    replicas = [_get_attributes(module) for module in originals]
    replica_of: dict[int, Any] = dict(zip(map(id, originals), replicas, strict=True))
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device, copy=True)
        return moved[id(tensor)]

    for original, replica in zip(originals, replicas, strict=True):
        for name, child in original._modules.items():
            replica._modules[name] = None if child is None else replica_of[id(child)]
        values = vars(original)
        if not _PLAIN.issuperset(map(type, values.values())):
            # Attributes may refer to other parts of the model as well.
            replacements = {name: replica_of.get(id(value)) for name, value in values.items()}
            replica.__dict__.update(
                (name, replica_value)
                for name, replica_value in replacements.items()
                if replica_value is not None
            )
        for name, parameter in original._parameters.items():
            # Use the parameter itself if possible: an alias would add a node to the graph.
            replica._parameters[name] = parameter
            if parameter is not None and parameter.device != device:
                # Set as an attribute first, because the __setattr__ of recurrent layers updates
                # their list of weights. Then moved to _parameters, so that parameters() finds it.
                del replica._parameters[name]
                setattr(replica, name, move(parameter))
                replica.__dict__.pop(name, None)
                replica._parameters[name] = move(parameter)  # type: ignore[assignment]
        for name, buffer in () if is_master else original._buffers.items():
            replica._buffers[name] = None if buffer is None else move(buffer)
    return replicas[0]


def refuse_compiled(module: nn.Module) -> None:
    """Raise TypeError if a part of ``module`` is compiled or scripted."""
    if not any(map(_is_compiled, get_parts(module))):
        return
    path, compiled_module = next(
        named for named in module.named_modules() if _is_compiled(named[1])
    )
    kind = type(getattr(compiled_module, "_orig_mod", compiled_module)).__name__
    raise TypeError(
        f"{path or 'the module'} ({kind}) must not be compiled, because compiled code would use "
        "the parameters of the original module instead of a copy's; do not compile it, or use ddp, "
        "which accepts compiled models"
    )


def _is_compiled(module: nn.Module) -> bool:
    # Compared by name, because importing the compiler takes a second.
    is_wrapper = type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")
    is_compiled = module.__dict__.get("_compiled_call_impl") is not None
    return is_wrapper or is_compiled or isinstance(module, jit.ScriptModule)


def _get_attributes(module: nn.Module) -> nn.Module:
    """Return a module of the same class with the attributes of ``module``, without parameters."""
    kind = type(module)
    if kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
        # Lazy and recurrent layers override this method.
        return module._replicate_for_data_parallel()  # type: ignore[no-untyped-call,no-any-return]
    # Does the same as the method, without five calls of nn.Module's slow __setattr__.
    replica = kind.__new__(kind)
    attributes = module.__dict__.copy()
    attributes["_parameters"] = {}
    attributes["_buffers"] = module._buffers.copy()
    attributes["_modules"] = module._modules.copy()
    attributes["_is_replica"] = True
    object.__setattr__(replica, "__dict__", attributes)
    return replica


def _get_callback(module: nn.Module) -> Callable[[CallbackContext, int], None] | None:
    kind = type(module)
    if (
        kind.__getattr__ is nn.Module.__getattr__
        and not hasattr(kind, CALLBACK)
        and CALLBACK not in module.__dict__
    ):
        # Skips nn.Module's __getattr__, which is slow if the attribute does not exist.
        return None
    return getattr(module, CALLBACK, None)


def _submodules(module: nn.Module, master: nn.Module, copy_id: int) -> list[nn.Module]:
    """Return the submodules of a copy; raise ValueError if they differ from the master's."""
    modules, expected = get_parts(module), get_parts(master)
    if list(map(type, modules)) == list(map(type, expected)):
        return modules
    problem = f"it has {len(modules)} submodules, the master {len(expected)}"
    for position, ((layer, other), child) in enumerate(
        zip(master.named_modules(), modules, strict=False)
    ):
        if type(child) is not type(other):
            kinds = f"{type(child).__name__}, the master {type(other).__name__}"
            problem = f"at position {position} (layer {layer!r}) it has {kinds}"
            break
    raise ValueError(f"copy {copy_id} is not a copy of the master: {problem}")


class _ThreadState:
    """The settings of the calling thread that the threads of the copies inherit."""

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
        # The functions (pack, unpack) of the innermost hooks; torch ignores outer ones.
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
        """Apply the settings to a new thread, and make a CUDA ``device`` the current one."""
        # This call applies the limit of `set_num_threads` to the new thread; without it, oneDNN and
        # OpenMP would use all cores.
        torch.get_num_threads()
        with ExitStack() as stack:
            for make in self._contexts:
                stack.enter_context(make())
            stack.enter_context(self.on(device))
            if device in self._streams:
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield

    def on(self, device: torch.device) -> Any:
        """Return a context in which ``device`` is the current CUDA device.

        For the CPU, the calling thread's CUDA device is the current one.
        """
        current = device if device.type == "cuda" else self._current
        return nullcontext() if current is None else torch.cuda.device(current)


def run_copies(
    modules: Sequence[nn.Module],
    inputs: Sequence[Sequence[Any]],
    kwargs: Sequence[Mapping[str, Any]],
    *,
    devices: Sequence[torch.device],
    session: ReplicationSession,
) -> list[Any]:
    """Call every copy with its arguments; return their outputs, in order.

    Each copy runs in a new thread, which has ended when this returns or raises. Copy 0 runs in the
    calling thread instead if the model is small, gradients are disabled, or all devices differ. If
    a copy fails, the others stop waiting for it. The first error is raised, with a note that names
    the copy.
    """
    outputs: list[Any] = [None] * len(modules)
    failures: list[tuple[int, BaseException]] = []
    state = _ThreadState(devices)
    first_in_thread = _is_first_in_thread(modules[0], devices)

    def work(copy_id: int) -> None:
        device = devices[copy_id]
        try:
            # The calling thread already has all settings, including some that cannot be copied.
            is_new_thread = copy_id > 0 or first_in_thread
            with state.entered(device) if is_new_thread else state.on(device):
                outputs[copy_id] = modules[copy_id](*inputs[copy_id], **kwargs[copy_id])
        except BaseException as error:
            failures.append((copy_id, error))
            session.finish(copy_id, error)
        else:
            session.finish(copy_id)

    _run_in_threads(work, range(0 if first_in_thread else 1, len(modules)), session)
    if failures:
        # Copies that waited for the failed one raise errors whose cause is the first error.
        errors = {id(error) for _, error in failures}
        failed, error = next(
            failure for failure in failures if id(failure[1].__cause__) not in errors
        )
        failures.clear()
        add_note(error, f"in copy {failed} of {len(modules)} on {devices[failed]}")
        try:
            raise error
        finally:
            # The traceback refers to this frame, which would keep the activations in memory.
            del error
    return outputs


def _is_first_in_thread(master: nn.Module, devices: Sequence[torch.device]) -> bool:
    """Return whether copy 0 gets a thread too, so that the copies take turns in the backward.

    Autograd has one thread per device, and runs the node with the highest number first. Each thread
    numbers the nodes of its forward, and the calling thread has counted further than a new thread.
    So the backward of a copy in the calling thread would run completely before the others, and its
    gradients would stay in memory until the gradients of the others are added. If they are larger
    than the CPU's caches, this costs more than a thread.
    """
    if not torch.is_grad_enabled() or len(set(devices)) == len(devices):
        return False
    sizes = (
        parameter.nbytes
        for child in get_parts(master)
        for parameter in child._parameters.values()
        if parameter is not None and parameter.requires_grad
    )
    return any(total > _LARGE for total in accumulate(sizes))


def _run_in_threads(
    work: Callable[[int], None], in_threads: range, session: ReplicationSession
) -> None:
    """Call ``work`` for the copies ``in_threads`` in new threads, and wait for them.

    Copy 0 runs in this thread if ``in_threads`` does not contain it.
    """
    # Daemon threads, so that a copy that hangs does not keep the process alive after a second
    # interrupt.
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(work, copy_id),
            name=f"stepwrap copy {copy_id}",
            daemon=True,
        )
        for copy_id in in_threads
    ]
    try:
        for thread in threads:
            thread.start()
        if 0 not in in_threads:
            work(0)
        for thread in threads:
            thread.join()
    except BaseException as error:
        session.abort(error)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
