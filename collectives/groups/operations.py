"""The operations of a group, and the handle that runs them.

Each public function below implements a method of the group as a generator, which runs in four
parts:

1. It yields a ``Named``, which identifies the call.
2. It checks the arguments and yields None.
3. It starts to communicate and yields torch's ``Work`` objects.
4. When these are done, it writes the results.

``several`` is True for the ``multigpu`` calls, to which each rank passes a list. A reduction first
reduces this list in order, then the results over the ranks, and copies the total into all targets,
so that these have the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from ..errors import CollectiveError
from ..process.ranks import comm_device, members, place_in_group
from ..tensors.checks import (
    check_like,
    checked_tensor,
    checked_tensors,
    checking,
    describe_dtype,
    describe_tensor,
    one_per_rank,
)
from ..tensors.operations import Memory, Reduction, checked_op, start_all_gather, travel_device
from ..tensors.tensors import start_barrier
from ..trace.calling import calling
from ..trace.headers import gather_numbers

T = TypeVar("T")
ReduceOp: TypeAlias = "dist.ReduceOp.RedOpType | dist.ReduceOp | str"
_Group: TypeAlias = dist.ProcessGroup
_Tensors: TypeAlias = Sequence[torch.Tensor]
Steps: TypeAlias = "Generator[Any, None, T]"


class Named(NamedTuple):
    """The name, group and arguments of a call.

    ``failed`` is set for messages between two ranks: it is the error text if the message fails.
    That error does not report the positions of other ranks, because they do not make this call.
    """

    name: str
    group: _Group
    describe: Callable[[], str]
    failed: str = ""


class CollectiveHandle(Generic[T]):
    """A call that has started; do not use its tensors until ``wait()`` has returned."""

    def __init__(self, steps: Steps[T], *, is_async: bool) -> None:
        self._steps, self._outcome = steps, list[T]()
        self._named: Named = next(steps)
        name, group, describe, failed = self._named
        with contextlib.nullcontext() if failed else checking(name, group, describe):
            next(steps)
        with self._calling():
            self._works: Sequence[dist.Work] = next(steps)
            if not is_async:
                self._wait_for_works()
        if not is_async:
            self._finish()

    def wait(self) -> T:
        """Wait until the call has finished and its results are written.

        Returns:
            The sender's global rank for a received message, otherwise None. A second call returns
            the same.

        Raises:
            CollectiveError: the call has failed, or the group's timeout is over.
        """
        if not self._outcome:
            with self._calling(is_late=True):
                self._wait_for_works()
            self._finish()
        return self._outcome[0]

    def is_completed(self) -> bool:
        """Return whether ``wait()`` would return immediately."""
        return bool(self._outcome) or all(work.is_completed() for work in self._works)

    def _wait_for_works(self) -> None:
        for work in self._works:
            work.wait()

    def _finish(self) -> None:
        try:
            next(self._steps)
        except StopIteration as end:
            self._outcome.append(end.value)

    @contextlib.contextmanager
    def _calling(self, *, is_late: bool = False) -> Iterator[None]:
        """Explain errors of the transport; ``is_late`` is True in ``wait`` of an async call."""
        name, group, describe, failed = self._named
        name = f"{name}.wait" if is_late else name
        with calling(name, group, describe, has_headers=is_late or bool(failed)) as call:
            try:
                yield
            except RuntimeError as error:
                if not failed or isinstance(error, (CollectiveError, torch.OutOfMemoryError)):
                    raise
                position, transport = call.here(), dist.get_backend_config(group)
                raise CollectiveError(
                    f"{name}() on rank {position.rank} ({position.site}) {failed}. The transport "
                    f"({transport}) says: {error}"
                ) from error


def send(group: _Group, name: str, tensor: torch.Tensor, dst: int, tag: int) -> Steps[None]:
    yield Named(
        name,
        group,
        lambda: f"{describe_tensor(tensor)} to rank {dst}, tag {tag}",
        failed=f"could not send to rank {dst} (tag {tag})",
    )
    checked_tensor("tensor", tensor)
    _check_peer("dst", dst, tag, group)
    memory = Memory(tensor, travel_device(group, tensor), is_read=True)
    yield
    yield [dist.isend(memory.bytes, dst, group, tag)]


def recv(group: _Group, name: str, tensor: torch.Tensor, src: int | None, tag: int) -> Steps[int]:
    sender = f"any rank of {members(group)}" if src is None else f"rank {src}"
    yield Named(
        name,
        group,
        lambda: f"{describe_tensor(tensor)} from {sender}, tag {tag}",
        failed=f"received nothing from {sender} (tag {tag})",
    )
    checked_tensor("tensor", tensor, is_target=True)
    _check_peer("src", src, tag, group)
    memory = Memory(tensor, travel_device(group, tensor), is_read=False)
    yield
    work = dist.irecv(memory.bytes, src, group, tag)
    yield [work]
    memory.store()
    assert work is not None
    return members(group)[work._source_rank()] if src is None else src


def broadcast(
    group: _Group, data: Any, src: int, *, several: bool = False, src_tensor: int = 0
) -> Steps[None]:
    name = _name("broadcast", several)
    yield Named(name, group, lambda: f"{_describe(data, several)} from rank {src}")
    place_in_group(src, group)
    is_source = dist.get_rank() == src
    targets = _check_own(data, several, is_target=several or not is_source)
    first_target = targets[_index("src_tensor", src_tensor, targets) if is_source else 0]
    memory = Memory(first_target, travel_device(group, first_target), is_read=is_source)
    yield
    yield [dist.broadcast(memory.bytes, src, group, async_op=True)]
    if not is_source:
        memory.store()
    _write(first_target, [target for target in targets if target is not first_target])


def all_reduce(group: _Group, data: Any, op: ReduceOp, *, several: bool = False) -> Steps[None]:
    name = _name("all_reduce", several)
    yield Named(name, group, lambda: f"{_get_name(op)} of {_describe(data, several)}")
    tensors = _check_own(data, several, is_target=True)
    yield from _reduce(group, tensors, op, tensors, several=several)


def reduce(
    group: _Group, data: Any, dst: int, op: ReduceOp, *, several: bool = False, dst_tensor: int = 0
) -> Steps[None]:
    name = _name("reduce", several)
    yield Named(name, group, lambda: f"{_get_name(op)} of {_describe(data, several)} to rank {dst}")
    tensors = _check_own(data, several, is_target=True)
    place_in_group(dst, group, "dst")
    is_destination = dist.get_rank() == dst
    targets = [tensors[_index("dst_tensor", dst_tensor, tensors)]] if is_destination else []
    yield from _reduce(group, tensors, op, targets, several=several, dst=dst)


def _reduce(
    group: _Group,
    tensors: _Tensors,
    op: ReduceOp,
    targets: _Tensors,
    *,
    several: bool,
    dst: int | None = None,
) -> Steps[None]:
    first_tensor, *further = [tensor.detach() for tensor in tensors]
    own_op = checked_op(_get_name(op), first_tensor.dtype)
    reduction = Reduction(first_tensor, own_op, group, further=further, dst=dst)
    # The ranks may have different numbers of tensors.
    is_counted = several and own_op == "mean"
    yield
    works = [reduction.start()]
    if is_counted:
        count = torch.tensor(len(tensors), device=comm_device(group, prefer=first_tensor.device))
        works.append(dist.all_reduce(count, group=group, async_op=True))
    yield works
    if targets:
        _write(reduction.result(int(count) if is_counted else None), targets)


def all_gather(group: _Group, tensor_list: _Tensors, tensor: torch.Tensor) -> Steps[None]:
    yield Named("group.all_gather", group, lambda: describe_dtype(tensor))
    checked_tensor("tensor", tensor)
    targets = one_per_rank("tensor_list", tensor_list, group, is_target=True)
    group_rank = dist.get_rank(group)
    check_like(f"tensor_list[{group_rank}]", targets[group_rank], "tensor", tensor)
    device = travel_device(group, tensor)
    sent = Memory(tensor, device, is_read=True).bytes
    received = [Memory(target, device, is_read=False) for target in targets]
    yield
    yield start_all_gather([memory.bytes for memory in received], sent, group)
    for memory in received:
        memory.store()


def all_gather_several(
    group: _Group, output_tensor_lists: Sequence[_Tensors], input_tensor_list: _Tensors
) -> Steps[None]:
    name = "group.all_gather_multigpu"
    yield Named(name, group, lambda: _describe(input_tensor_list, True))
    inputs = checked_tensors("input_tensor_list", input_tensor_list, are_alike=True)
    lists = _output_lists(output_tensor_lists, inputs)
    device = travel_device(group, inputs[0])
    sent = torch.cat([Memory(tensor, device, is_read=True).bytes for tensor in inputs])
    yield
    counts = _agreed_counts(group, inputs, len(lists[0]))
    received = [sent.new_empty(count * inputs[0].nbytes) for count in counts]
    received[dist.get_rank(group)] = sent
    yield start_all_gather(received, sent, group)
    for outputs in lists:
        targets = iter(outputs)
        for count, rank_bytes in zip(counts, received, strict=True):
            # Copy the whole part to the device at once.
            values = rank_bytes.to(outputs[0].device).view(inputs[0].dtype)
            for value in values.view(count, *inputs[0].shape):
                _write(value, [next(targets)])


def gather(
    group: _Group, tensor: torch.Tensor, gather_list: _Tensors | None, dst: int
) -> Steps[None]:
    yield Named("group.gather", group, lambda: f"{describe_tensor(tensor)} to rank {dst}")
    checked_tensor("tensor", tensor)
    place_in_group(dst, group, "dst")
    targets = _list_on("gather_list", gather_list, dst, group, tensor, is_target=True)
    device = travel_device(group, tensor)
    sent = Memory(tensor, device, is_read=True).bytes
    received = [Memory(target, device, is_read=False) for target in targets]
    memory = [buffer.bytes for buffer in received] or None
    yield
    yield [dist.gather(sent, memory, dst, group, async_op=True)]
    for buffer in received:
        buffer.store()


def scatter(
    group: _Group, tensor: torch.Tensor, scatter_list: _Tensors | None, src: int
) -> Steps[None]:
    yield Named("group.scatter", group, lambda: f"{describe_tensor(tensor)} from rank {src}")
    checked_tensor("tensor", tensor, is_target=True)
    place_in_group(src, group)
    sources = _list_on("scatter_list", scatter_list, src, group, tensor)
    device = travel_device(group, tensor)
    received = Memory(tensor, device, is_read=False)
    memory = [Memory(source, device, is_read=True).bytes for source in sources] or None
    yield
    yield [dist.scatter(received.bytes, memory, src, group, async_op=True)]
    received.store()


def reduce_scatter(
    group: _Group, output: torch.Tensor, input_list: _Tensors, op: ReduceOp
) -> Steps[None]:
    """Exchange the parts and reduce them locally in rank order.

    This sends as many bytes as a ring, is three times as fast as gloo's own reduce-scatter, and
    supports every dtype and operation.
    """
    name = "group.reduce_scatter"
    yield Named(name, group, lambda: f"{_get_name(op)} of {describe_dtype(output)}")
    target = checked_tensor("output", output, is_target=True).detach()
    inputs = one_per_rank("input_list", input_list, group)
    group_rank = dist.get_rank(group)
    check_like(f"input_list[{group_rank}]", inputs[group_rank], "output", output)
    own_op = checked_op(_get_name(op), target.dtype)
    base, *further = yield from _exchange(inputs, [target] * len(inputs), group)
    _write(Reduction(base, own_op, group, further=further).result(), [target])


def all_to_all(group: _Group, output_list: _Tensors, input_list: _Tensors) -> Steps[None]:
    yield Named("group.all_to_all", group, lambda: describe_dtype(input_list))
    inputs = one_per_rank("input_tensor_list", input_list, group)
    outputs = one_per_rank("output_tensor_list", output_list, group, is_target=True)
    group_rank = dist.get_rank(group)
    names = [f"{kind}_tensor_list[{group_rank}]" for kind in ("output", "input")]
    check_like(names[0], outputs[group_rank], names[1], inputs[group_rank])
    received = yield from _exchange(inputs, outputs, group)
    for output, result in zip(outputs, received, strict=True):
        _write(result, [output])


def barrier(group: _Group) -> Steps[None]:
    yield Named("group.barrier", group, str)
    yield
    yield [start_barrier(group)]


def _exchange(inputs: _Tensors, outputs: _Tensors, group: _Group) -> Steps[list[torch.Tensor]]:
    """Send ``inputs[i]`` to group rank ``i``; return the received tensors, shaped like outputs."""
    device = travel_device(group, inputs[0])
    memory = [Memory(tensor, device, is_read=True).bytes for tensor in inputs]
    sizes = [output.nbytes for output in outputs], [buffer.numel() for buffer in memory]
    sent = torch.cat(memory)
    received = torch.empty(sum(sizes[0]), dtype=torch.uint8, device=device)
    yield
    yield [dist.all_to_all_single(received, sent, *sizes, group, async_op=True)]
    pairs = zip(torch.split(received, sizes[0]), outputs, strict=True)
    return [chunk.view(output.dtype).view(output.shape) for chunk, output in pairs]


def _name(name: str, several: bool) -> str:
    return f"group.{name}_multigpu" if several else f"group.{name}"


def _get_name(op: ReduceOp) -> str:
    """Return the lower-case name of an operation of torch; return a string unchanged."""
    if isinstance(op, str):
        return op
    name = str(getattr(op, "op", op)).rpartition(".")[2].lower()
    return "mean" if name == "avg" else name


def _describe(data: object, several: bool) -> str:
    return describe_dtype(data, with_shape=True) if several else describe_tensor(data)


def _write(result: torch.Tensor, targets: _Tensors) -> None:
    for target in targets:
        target.detach().copy_(result)


def _check_peer(name: str, rank: int | None, tag: int, group: _Group) -> None:
    if len(members(group)) == 1:
        raise ValueError(
            f"a message needs another member, but the group has only rank {dist.get_rank()}"
        )
    if rank is not None:
        place_in_group(rank, group, name)
        if rank == dist.get_rank():
            raise ValueError(f"{name} must not be this process's own rank, got {rank}")
    if tag < 0:
        raise ValueError(f"tag must not be negative, got {tag}")


def _list_on(
    name: str,
    tensors: object,
    rank: int,
    group: _Group,
    like: torch.Tensor,
    *,
    is_target: bool = False,
) -> list[torch.Tensor]:
    """Return the checked list on the one rank that must pass it, and [] on the others."""
    if dist.get_rank() != rank:
        if tensors:
            raise ValueError(f"{name} must be None on all ranks except {rank}, got a list")
        return []
    listed = one_per_rank(name, tensors, group, is_target=is_target)
    for index, tensor in enumerate(listed):
        check_like(f"{name}[{index}]", tensor, "tensor", like)
    return listed


def _check_own(data: object, several: bool, *, is_target: bool) -> list[torch.Tensor]:
    if several:
        return checked_tensors("tensor_list", data, is_target=is_target, are_alike=True)
    return [checked_tensor("tensor", data, is_target=is_target)]


def _index(name: str, index: int, tensors: _Tensors) -> int:
    if not 0 <= index < len(tensors):
        raise ValueError(
            f"{name} must be an index of the list of {len(tensors)} tensors, got {index}"
        )
    return index


def _output_lists(data: object, inputs: _Tensors) -> list[list[torch.Tensor]]:
    """Return the output lists, one for each input, after checking that their lengths agree."""
    name = "output_tensor_lists"
    if not isinstance(data, list | tuple) or len(data) != len(inputs):
        got = len(data) if isinstance(data, list | tuple) else type(data).__name__
        raise ValueError(
            f"{name} must have one list for each of the {len(inputs)} tensors in "
            f"input_tensor_list, got {got}"
        )
    lists = []
    for index, listed in enumerate(data):
        where = f"{name}[{index}]"
        outputs = checked_tensors(where, listed, is_target=True, are_alike=True)
        check_like(f"{where}[0]", outputs[0], "input_tensor_list[0]", inputs[0])
        lists.append(outputs)
        if len(outputs) != len(lists[0]):
            raise ValueError(
                f"{where} must have as many tensors as {name}[0], which has {len(lists[0])}, "
                f"got {len(outputs)}"
            )
    return lists


def _agreed_counts(group: _Group, inputs: _Tensors, room: int) -> list[int]:
    """Return how many tensors each group rank sends, after checking that all sizes fit."""
    rows = gather_numbers([len(inputs), inputs[0].nbytes, room], group)
    by_rank = dict(zip(members(group), rows, strict=True))
    sent = ", ".join(f"{row[0]} of rank {rank}" for rank, row in by_rank.items())
    total = sum(row[0] for row in rows)
    for rank, (_, size, length) in by_rank.items():
        if size != rows[0][1]:
            raise ValueError(
                f"all_gather_multigpu() must get tensors of the same size on all ranks, got "
                f"{rows[0][1]} bytes on rank {members(group)[0]} and {size} on rank {rank}"
            )
        if length != total:
            raise ValueError(
                f"all_gather_multigpu() must get output lists of {total} tensors ({sent}), "
                f"got {length} on rank {rank}"
            )
    return [row[0] for row in rows]
