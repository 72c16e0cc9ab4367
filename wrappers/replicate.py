"""Copies of a module on several devices, and the callbacks that tell its parts of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, jit, nn
from torch.nn.parallel import replicate as torch_replicate

from .session import ReplicationSession

_T = TypeVar("_T", bound=nn.Module)

CALLBACK = "__data_parallel_replicate__"


class CallbackContext:
    """What the copies of one submodule share during one replication: attributes, freely set.

    Made anew for every replication. Before any callback it has ``num_copies``, ``session``
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
    master = list(modules[0].named_modules())
    contexts = [_context(len(modules), session, path) for path, _ in master]
    # All are compared before any callback runs, so that a wrong pairing changes nothing.
    copies = [_paired(module, master, copy_id) for copy_id, module in enumerate(modules)]
    for copy_id, submodules in enumerate(copies):
        for context, submodule in zip(contexts, submodules, strict=True):
            callback = getattr(submodule, CALLBACK, None)
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
    device several times): the parameters of every copy are aliases or transfers of the
    original ones, so that the gradients of all copies sum into these. Copy 0 has the very
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
        return [
            _Copy(device, is_master=index == 0).of(module) for index, device in enumerate(devices)
        ]
    copies: list[_T] = torch_replicate(module, devices, not torch.is_grad_enabled())
    return copies


class _Copy:
    """One copy in the making; remembers what it has copied, by identity."""

    def __init__(self, device: torch.device, *, is_master: bool) -> None:
        self.device = device
        self.is_master = is_master
        self.modules: dict[int, nn.Module] = {}
        self.tensors: dict[int, Tensor] = {}

    def of(self, module: _T) -> _T:
        """The copy of ``module`` and of all that is in it."""
        originals = list(module.modules())
        for one in originals:
            self.modules[id(one)] = _attributes_of(one)
        for one in originals:
            self._fill(one, self.modules[id(one)])
        return self.modules[id(module)]  # type: ignore[return-value]

    def _fill(self, original: nn.Module, replica: nn.Module) -> None:
        for name, child in original._modules.items():
            replica._modules[name] = None if child is None else self.modules[id(child)]
        for name, value in original.__dict__.items():
            # A module that another one refers to without owning it.
            if isinstance(value, nn.Module) and id(value) in self.modules:
                replica.__dict__[name] = self.modules[id(value)]
        for name, parameter in original._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
                continue
            alias = self._parameter(parameter)
            # Recurrent layers keep a list beside their parameters, which their own __setattr__
            # looks after; as a parameter it is found by `parameters()` too.
            setattr(replica, name, alias)
            replica.__dict__.pop(name, None)
            replica._parameters[name] = alias  # type: ignore[assignment]
        for name, buffer in original._buffers.items():
            replica._buffers[name] = None if buffer is None else self._buffer(buffer)

    def _parameter(self, parameter: Tensor) -> Tensor:
        known = self.tensors.get(id(parameter))
        if known is None:
            # Not view_as: its backward cannot reshape the sparse gradient of an embedding.
            known = torch.ops.aten.alias.default(parameter)
            if parameter.device != self.device:
                known = parameter.to(self.device, non_blocking=True)
            self.tensors[id(parameter)] = known
        return known

    def _buffer(self, buffer: Tensor) -> Tensor:
        if self.is_master:
            return buffer
        known = self.tensors.get(id(buffer))
        if known is None:
            known = buffer.to(self.device, copy=True)
            self.tensors[id(buffer)] = known
        return known


def refuse_compiled(module: nn.Module) -> None:
    """Raise TypeError when ``module`` or a part of it is compiled or scripted.

    Such code runs on the parameters of the original, also when it is called for a copy.
    """
    for path, part in module.named_modules():
        # By name: importing the compiler to ask takes longer than most models.
        whole = type(part).__name__ == "OptimizedModule" and hasattr(part, "_orig_mod")
        compiled = whole or part.__dict__.get("_compiled_call_impl") is not None
        if compiled or isinstance(part, jit.ScriptModule):
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


def _attributes_of(module: nn.Module) -> nn.Module:
    """A module with the attributes of ``module``; lazy and recurrent ones do it their own way."""
    return module._replicate_for_data_parallel()  # type: ignore[no-untyped-call,no-any-return]


def _context(num_copies: int, session: ReplicationSession, layer: str) -> CallbackContext:
    context = CallbackContext()
    context.num_copies, context.session, context.layer = num_copies, session, layer
    return context


def _paired(
    module: nn.Module, master: list[tuple[str, nn.Module]], copy_id: int
) -> list[nn.Module]:
    """The submodules of a copy, after a check that they are those of the master."""
    mine = list(module.modules())
    for position, ((path, theirs), own) in enumerate(zip(master, mine, strict=False)):
        if type(own) is not type(theirs):
            raise ValueError(
                f"copy {copy_id} is not a copy of the master: at position {position} "
                f"(layer {path!r}) it has {type(own).__name__}, the master {type(theirs).__name__}"
            )
    if len(mine) != len(master):
        raise ValueError(
            f"copy {copy_id} is not a copy of the master: it has {len(mine)} submodules, "
            f"the master {len(master)}"
        )
    return mine
