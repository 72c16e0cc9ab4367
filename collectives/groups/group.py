"""CollectiveGroup: messages and collectives among some of the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist

from ..errors import Group
from ..objects import objects
from ..objects.agree import results_of_all
from ..process.init import delay_nccl
from ..process.ranks import distributed_available, members
from ..tensors.tensors import start_barrier, synchronize
from ..trace.calling import calling
from . import operations
from .operations import CollectiveHandle, ReduceOp, Steps

T = TypeVar("T")
_Tensors: TypeAlias = "Sequence[torch.Tensor]"
_Handle: TypeAlias = "CollectiveHandle[None] | None"
_SUM = dist.ReduceOp.SUM


class CollectiveGroup:
    """A group of ranks with messages and collectives; created by ``create`` or by a ``World``.

    All members must make the same calls in the same order, except for messages between two ranks.
    ``src`` and ``dst`` are global ranks. Tensors may have any dense layout, dtype and device, but
    dtypes must be the same on all ranks, and so must shapes unless stated otherwise. Reductions are
    sum, product, min, max, band, bor, bxor and mean, given by these names or as torch's
    ``ReduceOp``. Complex numbers only have sum, product and mean. The mean of integers is rounded.

    With ``async_op`` a call returns a handle, whose ``wait()`` must be called before the tensors
    are used. Without it, the call returns None when everything is done.

    The group lives until ``destroy()`` or the end of the default group, even if this object is
    dropped earlier.

    Raises:
        TypeError, ValueError: from every call, if this rank's arguments are wrong; nothing is sent.
            While tracing, a collective raises a CollectiveError on every rank instead.
        CollectiveError: from every call, if the transport fails or the group's timeout is over; it
            names the missing ranks.
        RuntimeError: from every call except ``destroy``, if the group was destroyed or this process
            is not a member; ``size`` returns -1 on non-members.

    Attributes:
        group: torch's group; None for the default group, on non-members, and once destroyed.
        current_rank: this process's rank within the group; None on non-members.
        destroyed: whether ``destroy`` was called.

    Args:
        group: torch's group; None for the default group, which ``destroy()`` does not end.
        current_relative_rank: this process's rank within the group; None on non-members.
    """

    def __init__(self, group: Group, current_relative_rank: int | None) -> None:
        is_member = current_relative_rank is not None
        # torch gives non-members an integer instead of a group.
        self.group = group if is_member else None
        self.current_rank = current_relative_rank
        self.destroyed = False
        if is_member and dist.get_rank(group) != current_relative_rank:
            raise ValueError(
                "current_relative_rank must be this process's rank in the group, "
                f"{dist.get_rank(group)}, got {current_relative_rank}"
            )

    @classmethod
    def create(
        cls,
        ranks: Iterable[int] | None = None,
        *,
        timeout_s: float = 60,
        backend: str | None = None,
    ) -> CollectiveGroup:
        """Create a group; every rank of the default group must call this, members or not.

        Args:
            ranks: global ranks of the members, None for all. The lowest becomes group rank 0, and
                so on.
            timeout_s: the timeout of its calls in seconds.
            backend: default: the backend of the default group.

        Raises:
            RuntimeError: no default group exists.
            TypeError, ValueError: on every rank, if one rank's arguments are wrong or differ.
        """
        return cls(*_new_group(ranks, timeout_s, backend))

    def size(self) -> int:
        """Return the number of members; -1 on non-members, until they destroy the group.

        Raises:
            RuntimeError: this rank has destroyed the group.
        """
        if self.current_rank is None and not self.destroyed:
            return -1
        return dist.get_world_size(self._live())

    def destroy(self) -> None:
        """End the group on this rank; does nothing if it has ended already.

        Call it after all members have finished their last call: a member that still waits for this
        rank fails.
        """
        group, self.group = self.group, None
        self.destroyed = True
        if group is not None and group is not dist.group.WORLD:
            # torch raises ValueError if the group was destroyed together with the default group.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send a message to rank ``dst``, which must receive into a tensor of the same size."""
        _run(operations.send(self._live(), "group.send", tensor, dst, tag), False)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> CollectiveHandle[None]:
        """Start to send a message; its handle must be waited for."""
        steps = operations.send(self._live(), "group.isend", tensor, dst, tag)
        return CollectiveHandle(steps, is_async=True)

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive a message from rank ``src``, None for any; return the sender's global rank."""
        steps = operations.recv(self._live(), "group.recv", tensor, src, tag)
        return CollectiveHandle(steps, is_async=False).wait()

    def irecv(
        self, tensor: torch.Tensor, src: int | None = None, tag: int = 0
    ) -> CollectiveHandle[int]:
        """Start to receive a message; ``wait()`` returns the sender's global rank."""
        steps = operations.recv(self._live(), "group.irecv", tensor, src, tag)
        return CollectiveHandle(steps, is_async=True)

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> _Handle:
        """Overwrite the tensor with the tensor of rank ``src``."""
        return _run(operations.broadcast(self._live(), tensor, src), async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = _SUM, async_op: bool = False
    ) -> _Handle:
        """Reduce the tensor in place on all ranks."""
        return _run(operations.all_reduce(self._live(), tensor, op), async_op)

    def reduce(
        self, tensor: torch.Tensor, dst: int, op: ReduceOp = _SUM, async_op: bool = False
    ) -> _Handle:
        """Reduce the tensor in place on rank ``dst``; other ranks' tensors keep their values."""
        return _run(operations.reduce(self._live(), tensor, dst, op), async_op)

    def all_gather(
        self, tensor_list: _Tensors, tensor: torch.Tensor, async_op: bool = False
    ) -> _Handle:
        """Fill the list with the ranks' tensors, in group order; their shapes may differ."""
        return _run(operations.all_gather(self._live(), tensor_list, tensor), async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: _Tensors | None = None,
        dst: int = 0,
        async_op: bool = False,
    ) -> _Handle:
        """Fill the list of rank ``dst`` with all ranks' tensors; other ranks pass None."""
        return _run(operations.gather(self._live(), tensor, gather_list, dst), async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: _Tensors | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> _Handle:
        """Overwrite the tensor with this rank's element of the list of ``src``.

        The other ranks pass None for the list.
        """
        return _run(operations.scatter(self._live(), tensor, scatter_list, src), async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: _Tensors,
        op: ReduceOp = _SUM,
        async_op: bool = False,
    ) -> _Handle:
        """Reduce element ``k`` of all ranks' lists into ``output`` of group rank ``k``."""
        return _run(operations.reduce_scatter(self._live(), output, input_list, op), async_op)

    def all_to_all(
        self, output_tensor_list: _Tensors, input_tensor_list: _Tensors, async_op: bool = False
    ) -> _Handle:
        """Send input ``k`` to group rank ``k``, and get output ``k`` from it; shapes may differ."""
        lists = output_tensor_list, input_tensor_list
        return _run(operations.all_to_all(self._live(), *lists), async_op)

    def barrier(self, async_op: bool = False) -> _Handle:
        """Wait until all members have called this."""
        return _run(operations.barrier(self._live()), async_op)

    def monitored_barrier(self, timeout_s: float | None = None) -> None:
        """Wait as ``barrier`` does, for at most ``timeout_s``; the error names late ranks."""
        group = self._live()
        with calling("group.monitored_barrier", group, has_headers=True):
            synchronize(timeout_s, group)

    def broadcast_multigpu(
        self, tensor_list: _Tensors, src: int, async_op: bool = False, src_tensor: int = 0
    ) -> _Handle:
        """Overwrite each tensor in every rank's list with element ``src_tensor`` of rank ``src``.

        As in all ``multigpu`` calls, the ranks' lists may have different lengths and devices.
        """
        steps = operations.broadcast(
            self._live(), tensor_list, src, several=True, src_tensor=src_tensor
        )
        return _run(steps, async_op)

    def all_reduce_multigpu(
        self, tensor_list: _Tensors, op: ReduceOp = _SUM, async_op: bool = False
    ) -> _Handle:
        """Overwrite each tensor in every rank's list with the same reduction of all these tensors.

        Each rank reduces its list in order before the ranks are reduced. A mean is over all
        tensors.
        """
        return _run(operations.all_reduce(self._live(), tensor_list, op, several=True), async_op)

    def reduce_multigpu(
        self,
        tensor_list: _Tensors,
        dst: int,
        op: ReduceOp = _SUM,
        async_op: bool = False,
        dst_tensor: int = 0,
    ) -> _Handle:
        """Reduce all ranks' lists into element ``dst_tensor`` of rank ``dst`` only."""
        steps = operations.reduce(
            self._live(), tensor_list, dst, op, several=True, dst_tensor=dst_tensor
        )
        return _run(steps, async_op)

    def all_gather_multigpu(
        self,
        output_tensor_lists: Sequence[_Tensors],
        input_tensor_list: _Tensors,
        async_op: bool = False,
    ) -> _Handle:
        """Fill each output list with the inputs of all ranks; there is one list for each input.

        The order is rank by rank: if all ranks have the same number of inputs, input ``j`` of group
        rank ``k`` is at ``k * len(input_tensor_list) + j``. The ranks exchange the lengths first,
        even with ``async_op``. Every rank raises ValueError if the lists of one rank do not have as
        many tensors as all ranks send.
        """
        lists = output_tensor_lists, input_tensor_list
        return _run(operations.all_gather_several(self._live(), *lists), async_op)

    def broadcast_object(self, obj: T, src: int) -> T:
        """Return the object of rank ``src``; see ``stepwrap.collectives.broadcast``."""
        return objects.broadcast(obj, src, self._live())

    def all_gather_object(self, obj: T) -> list[T]:
        """Return the objects of all ranks, in group order."""
        return objects.all_gather_object(obj, self._live())

    def gather_object(self, obj: T, dst: int = 0) -> list[T] | None:
        """Return the objects of all ranks on rank ``dst``, None on the others."""
        return objects.gather_object(obj, dst, self._live())

    def scatter_object(self, objs: Sequence[T] | None, src: int = 0) -> T:
        """Return this rank's element of the list of rank ``src``; other ranks pass None.

        Raises:
            CollectiveError: on every rank, if the list has another length than the group, or if an
                object cannot be pickled or unpickled.
        """
        return objects.scatter_object(objs, src, self._live())

    def _live(self) -> dist.ProcessGroup:
        """Return torch's group; raise RuntimeError if it has ended or on non-members."""
        if self.destroyed:
            raise RuntimeError("the group must not be used any more: it has been destroyed")
        if self.current_rank is None:
            raise RuntimeError("this process must be a member of the group to use it; it is not")
        group = self.group or dist.group.WORLD
        try:
            dist.get_rank(group)
        except ValueError as error:
            raise RuntimeError(
                "the group must not be used any more: the default process group, and with it this "
                "one, has been destroyed"
            ) from error
        assert group is not None
        return group


def _run(steps: Steps[None], async_op: bool) -> _Handle:
    handle = CollectiveHandle(steps, is_async=async_op)
    return handle if async_op else None


def _new_group(
    ranks: Iterable[int] | None, timeout_s: float, backend: str | None
) -> tuple[dist.ProcessGroup | None, int | None]:
    """Return the new group and this process's rank in it; None and None on non-members."""
    if not distributed_available():
        raise RuntimeError(
            "a group needs a default process group: call torch.distributed.init_process_group() "
            "or create a World first"
        )

    def choose() -> tuple[list[int], float, str | None]:
        every = members()
        chosen = every if ranks is None else sorted(ranks)
        if not chosen or not set(chosen) <= set(every) or len(set(chosen)) < len(chosen):
            raise ValueError(
                f"ranks must be one or more different ranks from 0 to {len(every) - 1}, "
                f"got {chosen}"
            )
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        return chosen, timeout_s, backend

    requests = results_of_all(choose, prefix="CollectiveGroup.create() ")
    for rank, other in enumerate(requests):
        if other != requests[0]:
            raise ValueError(
                "CollectiveGroup.create() must get the same ranks, timeout_s and backend on all "
                f"ranks, got {requests[0]} on rank 0 and {other} on rank {rank}"
            )
    chosen = requests[0][0]
    with calling("CollectiveGroup.create"):
        group = dist.new_group(chosen, timedelta(seconds=timeout_s), backend)
        if dist.get_rank() not in chosen:
            return None, None
        delay_nccl(group)
        # A barrier, because a member may destroy the group while another one still connects.
        start_barrier(group).wait()
    return group, chosen.index(dist.get_rank())
