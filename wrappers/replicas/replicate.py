"""Copies of a module on several devices, and the callbacks that tell its parts of them."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, jit, nn
from torch.nn.parallel import replicate as torch_replicate

from .session import ReplicationSession

_T = TypeVar("_T", bound=nn.Module)

CALLBACK = "__data_parallel_replicate__"
# Types of attributes that are no modules; all that most modules have.
_PLAIN = frozenset({bool, int, float, str, tuple, list, dict, set, OrderedDict, type(None)})


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
    layers = [path for path, _ in modules[0].named_modules()]
    contexts = [_context(len(modules), session, path) for path in layers]
    for copy_id, (submodules, own) in enumerate(zip(copies, callbacks, strict=True)):
        for context, submodule, callback in zip(contexts, submodules, own, strict=True):
            if callback is None:
                continue
            try:
                callback(context, copy_id)
            except Exception as error:
                note(
                    error,
                    f"in {type(submodule).__name__}.{CALLBACK} of copy {copy_id} of "
                    f"{len(modules)}, layer {context.layer!r}",
                )
                session.abort(error)
                raise


def replicate(module: _T, devices: Sequence[torch.device]) -> list[_T]:
    """Copy ``module`` to every device, through autograd; callbacks are not run.

    On different CUDA devices this is torch's ``replicate``. Everywhere else (CPU, the same
    device several times): the parameters of every copy are the original ones, or transfers of
    them to its device, so that the gradients of all copies sum there. Copy 0 has the very
    buffers of the module, which its forward updates; the other copies have copies of them,
    which are lost. What occurs twice in the module (tied parameters, shared modules) does so
    in every copy. Hooks, training flags and other attributes are those of the module.
    Attributes set in a forward are lost with the copy.

    Raises:
        TypeError: a part of the module is compiled.
    """
    cuda = all(device.type == "cuda" for device in devices)
    own = not cuda or len(set(devices)) < len(devices)
    refuse_compiled(module)
    if own:
        originals = parts_of(module)
        return [
            _Copy(device, is_master=index == 0).of(module, originals)
            for index, device in enumerate(devices)
        ]
    copies: list[_T] = torch_replicate(module, devices, not torch.is_grad_enabled())
    return copies


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


class _Copy:
    """One copy in the making; remembers what it has copied, by identity."""

    def __init__(self, device: torch.device, *, is_master: bool) -> None:
        self.device = device
        self.is_master = is_master
        self.modules: dict[int, nn.Module | None] = {id(None): None}
        self.tensors: dict[int, Tensor] = {}

    def of(self, module: _T, originals: Sequence[nn.Module]) -> _T:
        """The copy of ``module``, whose parts are ``originals``."""
        replicas = [_attributes_of(one) for one in originals]
        self.modules.update(zip(map(id, originals), replicas, strict=True))
        for one, replica in zip(originals, replicas, strict=True):
            self._fill(one, replica)
        return self.modules[id(module)]  # type: ignore[return-value]

    def _fill(self, original: nn.Module, replica: nn.Module) -> None:
        for name, child in original._modules.items():
            replica._modules[name] = self.modules[id(child)]
        values = original.__dict__
        if not _PLAIN.issuperset(map(type, values.values())):
            for name, value in values.items():
                # A module that another one refers to without owning it.
                if isinstance(value, nn.Module) and id(value) in self.modules:
                    replica.__dict__[name] = self.modules[id(value)]
        for name, parameter in original._parameters.items():
            if parameter is None or parameter.device == self.device:
                # Itself, not an alias: that would be one more node of the graph for each copy.
                replica._parameters[name] = parameter
                continue
            transfer = self._transfer(parameter)
            # Recurrent layers keep a list beside their parameters, which their own __setattr__
            # looks after; as a parameter it is found by `parameters()` too.
            setattr(replica, name, transfer)
            replica.__dict__.pop(name, None)
            replica._parameters[name] = transfer  # type: ignore[assignment]
        if not self.is_master:
            for name, buffer in original._buffers.items():
                replica._buffers[name] = None if buffer is None else self._transfer(buffer)

    def _transfer(self, tensor: Tensor) -> Tensor:
        known = self.tensors.get(id(tensor))
        if known is None:
            known = tensor.to(self.device, copy=True)
            self.tensors[id(tensor)] = known
        return known


def refuse_compiled(module: nn.Module) -> None:
    """Raise TypeError when ``module`` or a part of it is compiled or scripted.

    Such code runs on the parameters of the original, also when it is called for a copy.
    """
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


def _context(num_copies: int, session: ReplicationSession, layer: str) -> CallbackContext:
    context = CallbackContext()
    context.num_copies, context.session, context.layer = num_copies, session, layer
    return context


def _paired(module: nn.Module, master: nn.Module, copy_id: int) -> list[nn.Module]:
    """The submodules of a copy, after a check that they are those of the master."""
    mine, theirs = parts_of(module), parts_of(master)
    kinds, expected = list(map(type, mine)), list(map(type, theirs))
    if kinds == expected:
        return mine
    layers = [path for path, _ in master.named_modules()]
    for position, (layer, own, other) in enumerate(zip(layers, kinds, expected, strict=False)):
        if own is not other:
            raise ValueError(
                f"copy {copy_id} is not a copy of the master: at position {position} "
                f"(layer {layer!r}) it has {own.__name__}, the master {other.__name__}"
            )
    raise ValueError(
        f"copy {copy_id} is not a copy of the master: it has {len(mine)} submodules, "
        f"the master {len(theirs)}"
    )
