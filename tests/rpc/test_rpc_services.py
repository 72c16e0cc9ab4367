"""Services under keys: lookups, calls, moves, delayed answers."""

import operator
import time

import pytest
from torch.distributed.rpc import functions
from torch.futures import Future
from worlds import raised_by, remote_traceback, run_group

from stepwrap.rpc import RpcGroup, World


class OwnError(Exception):
    """A user's error."""


def fail() -> None:
    raise OwnError("mine")


def add(a: int, b: int = 0) -> int:
    return a + b


@functions.async_execution
def answer_later(value: int) -> Future[int]:
    answer: Future[int] = Future()
    _waiting.append((answer, value))
    return answer


def answer_soon(value: int) -> Future[int]:
    """Needs no decorator."""
    answer: Future[int] = Future()
    answer.set_result(value)
    return answer


_waiting: list[tuple[Future[int], int]] = []


def _answer_all() -> int:
    count = 0
    while _waiting:
        answer, value = _waiting.pop()
        answer.set_result(value)
        count += 1
    return count


def _services(world: World, group: RpcGroup) -> None:
    if world.rank == 0:
        group.register("add", add)
        group.register("fail", fail)
        group.register("later", answer_later)
        group.register("soon", answer_soon)
        text = "Service [add] already registered in Group [all]"
        assert raised_by(group.register, "add", add) == ("KeyError", repr(text))
    group.barrier()
    assert group.is_registered("add")
    assert group.registered_sync("add", (1,), {"b": 2}) == 3
    assert group.registered_async("add", (1,)).wait() == 1
    assert group.registered_remote("add", (2, 2)).to_here() == 4
    assert group.registered_sync("soon", (5,)) == group.rpc_sync("w0", answer_soon, args=(5,)) == 5
    assert group.registered_remote("soon", (6,)).to_here() == 6
    missing = ("KeyError", repr("Service [none] not found on Group [all]"))
    for call in (group.registered_sync, group.registered_async, group.registered_remote):
        assert raised_by(call, "none") == missing
        near = "Service [latr] not found on Group [all]; did you mean 'later'?"
        assert raised_by(call, "latr") == ("KeyError", repr(near))
    value = repr("Value [add] not found on Group [all]; it is the key of a service")
    assert raised_by(group.get_paired, "add") == ("KeyError", value)
    assert "did you mean" not in raised_by(group.registered_sync, ("later", 1))[1]
    with pytest.raises(OwnError) as raised:
        group.registered_sync("fail")
    assert "raised by 'w0'" in remote_traceback(raised.value)
    if world.rank != 0:
        text = "Service [add] not registered in Group [all]"
        assert raised_by(group.deregister, "add") == ("KeyError", repr(text))
    group.barrier()
    # There are more waiting calls than threads; a waiting call must not hold a thread.
    calls = [group.registered_async("later", (number,)) for number in range(20)]
    references = [group.registered_remote("later", (number,)) for number in range(3)]
    if world.rank == 0:
        answered = 0
        while answered < world.world_size * 23:
            answered += _answer_all()
            time.sleep(0.01)
    assert [call.wait() for call in calls] == list(range(20))
    assert [reference.to_here() for reference in references] == [0, 1, 2]
    group.barrier()
    # The service moves to another process; callers that knew the old one find it.
    if world.rank == 0:
        group.deregister("add")
    group.barrier()
    assert raised_by(group.registered_sync, "add", (1,))[0] == "KeyError"
    group.barrier()
    if world.rank == 1:
        group.register("add", operator.sub)
    group.barrier()
    assert group.registered_sync("add", (5, 2)) == 3


@pytest.mark.parametrize("size", [3, 4])
def test_services_under_keys(size: int) -> None:
    run_group(_services, size)
