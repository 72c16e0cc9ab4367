"""Groups of named processes: calls, values, services, barriers, errors."""

import os
import pickle
import re
import threading
import time
from typing import Any

import pytest
import torch
from marks import slow
from torch.distributed.rpc import get_worker_info
from worlds import let_go, raised_by, remote_traceback, run_group, run_world, wait_for_members

from stepwrap.rpc import RpcException, RpcGroup, RpcReference, World, get_cur_name


class OwnError(Exception):
    """A user's error with more than a text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class PrefixedError(Exception):
    """Changes its text, so that its own args do not recreate it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")


class KeywordError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class FrozenError(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("immutable")


class OnlyHere:
    """Can only be unpickled in the process that pickled it."""

    def __reduce__(self) -> Any:
        return _only_in, (os.getpid(),)


def _only_in(pid: int) -> OnlyHere:
    if os.getpid() != pid:
        raise RuntimeError("not in this process")
    return OnlyHere()


def fail(kind: str) -> None:
    if kind == "prefixed":
        raise PrefixedError("x")
    if kind == "keyword":
        raise KeywordError(code=4)
    if kind == "frozen":
        raise FrozenError("cold")
    if kind == "own":
        raise OwnError(7, "mine")
    if kind == "key":
        raise KeyError("lost")
    if kind == "file":
        raise FileNotFoundError(2, "no such thing", "a.txt")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "own reduce":
        raise type("Odd", (Exception,), {"__reduce__": lambda self: (fail, ("own",))})("odd")
    if kind == "cannot be rebuilt":
        raise type("Hidden", (Exception,), {})("secret", OnlyHere())
    raise type("Hidden", (Exception,), {})(threading.Lock())


def _calls(world: World, group: RpcGroup) -> None:
    number = (world.rank + 1) % world.world_size
    following = f"w{number}"
    factor = 3
    for target in (following, number, get_worker_info(following)):
        assert group.rpc_sync(target, get_cur_name) == following
    assert group.rpc_async(following, lambda x: x * factor, args=(2,)).wait() == 6
    remote_value = group.remote(
        following, lambda *, x: {"twice": x + x}, kwargs={"x": torch.ones(2, 3)}
    )
    assert torch.equal(remote_value.to_here()["twice"], torch.full((2, 3), 2.0))
    assert (remote_value.owner_name(), remote_value.is_owner()) == (following, False)
    assert remote_value.owner().name == following
    function = group.rpc_sync(following, lambda: lambda x: x - 1)
    assert function(4) == 3

    class Local:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    sent = Local(torch.arange(6).reshape(2, 3)[:, 1:])
    assert torch.equal(
        group.rpc_sync(following, lambda value: value.value + 1, args=(sent,)), sent.value + 1
    )


@pytest.mark.parametrize("size", [3, *slow(4)])
def test_calls_by_name_rank_and_description_with_lambdas_and_tensors(size: int) -> None:
    run_group(_calls, size)


@run_world(2)
def test_tensors_of_all_kinds_travel(world: World, group: RpcGroup) -> None:
    base = torch.arange(12.0)
    values = [
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.eye(3).to_sparse(),
        torch.tensor(3),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        base[::2],
    ]
    answers = group.rpc_sync("w0", lambda x: x, args=(values,))
    for value, answer in zip(values, answers, strict=True):
        assert answer.dtype == value.dtype
        assert type(answer) is type(value)
        assert torch.equal(answer.to_dense(), value.to_dense())
    twice = group.rpc_sync("w0", lambda x: x, args=((base, base),))
    assert twice[0] is twice[1]


@run_world(2)
def test_remote_errors_keep_their_type_and_bring_their_traceback(
    world: World, group: RpcGroup
) -> None:
    if world.rank != 0:
        return
    for call in (
        lambda kind: group.rpc_sync("w1", fail, args=(kind,)),
        lambda kind: group.rpc_async("w1", fail, args=(kind,)).wait(),
        lambda kind: group.remote("w1", fail, args=(kind,)).to_here(),
    ):
        with pytest.raises(OwnError) as raised:
            call("own")
        assert (raised.value.code, raised.value.args) == (7, (7, "mine"))
        assert "raised by 'w1'" in remote_traceback(raised.value)
        assert 'raise OwnError(7, "mine")' in remote_traceback(raised.value)
        with pytest.raises(KeyError, match="lost"):
            call("key")
        with pytest.raises(FileNotFoundError) as file:
            call("file")
        assert (file.value.errno, file.value.filename) == (2, "a.txt")
        with pytest.raises(PrefixedError, match="^no x$"):
            call("prefixed")
        with pytest.raises(KeywordError, match="^code 4$") as keyword:
            call("keyword")
        assert keyword.value.code == 4
        with pytest.raises(RpcException, match="FrozenError raised by 'w1'"):
            call("frozen")
        with pytest.raises(Exception, match="^odd$") as odd:
            call("own reduce")
        assert type(odd.value).__name__ == "Odd"
        for kind in ("cannot be rebuilt", "cannot be pickled"):
            with pytest.raises(RpcException, match="Hidden raised by 'w1'"):
                call(kind)
    with pytest.raises(RpcException, match="SystemExit raised by 'w1'"):
        group.rpc_sync("w1", fail, args=("exit",))
    # An error that passes through two processes keeps its type and its first traceback.
    with pytest.raises(OwnError) as raised:
        group.rpc_sync("w1", group.rpc_sync, args=("w0", fail), kwargs={"args": ("own",)})
    assert "raised by 'w0'" in remote_traceback(raised.value)
    assert pickle.loads(pickle.dumps(raised.value)).code == 7


@run_world(2)
def test_bad_and_late_calls(world: World, group: RpcGroup) -> None:
    if world.rank != 0:
        return
    assert raised_by(group.rpc_sync, "w9", abs)[1].startswith(
        "RPC target is not a member of group."
    )
    assert raised_by(group.rpc_sync, "ww1", abs)[1].endswith("; did you mean 'w1'?")
    assert raised_by(group.rpc_sync, 9, abs)[0] == "RuntimeError"
    kind, text = raised_by(group.rpc_sync, "w0", abs, args=(threading.Lock(),))
    assert kind == "TypeError"
    assert "cannot be sent" in text
    with pytest.raises(TypeError) as refused:
        group.rpc_sync("w0", threading.Lock)
    assert "raised by 'w0'" in remote_traceback(refused.value)
    late = r"'w1' .*answered sleep\(\) .* 0\.1 s$"
    for wait in (
        lambda: group.rpc_sync("w1", time.sleep, 0.1, (0.4,)),
        lambda: group.rpc_async("w1", time.sleep, 0.1, (0.4,)).wait(),
    ):
        kind, text = raised_by(wait)
        assert kind == "RpcError"
        assert re.match(late, text)
    slow = group.remote("w1", time.sleep, args=(0.4,))
    kind, text = raised_by(slow.to_here, 0.1)
    assert kind == "RpcError"
    assert re.match(r"'w1' .*answered to_here\(\) .* 0\.1 s$", text)
    assert slow.to_here(0) is None


def _values(world: World, group: RpcGroup) -> Any:
    if world.rank == 1:
        value = [1, torch.ones(2)]
        group.pair("v", value)
        group.pair(("any", 2), lambda: "called")
        assert group.get_paired("v").local_value() is value
        assert group.get_paired("v").to_here() is value
        text = "Value [v] already paired to Group [all]"
        assert raised_by(group.pair, "v", 2) == ("KeyError", repr(text))
    group.barrier()
    assert group.is_paired("v")
    assert not group.is_paired("w")
    reference = group.get_paired("v")
    assert isinstance(reference, RpcReference)
    assert reference.to_here()[0] == 1
    assert group.get_paired(("any", 2)).to_here()() == "called"
    if world.rank != 1:
        assert raised_by(group.pair, "v", 1)[0] == "KeyError"
        assert raised_by(group.unpair, "v") == (
            "KeyError",
            repr("Value [v] not paired to Group [all]"),
        )
        assert raised_by(reference.local_value)[0] == "RuntimeError"
    missing = ("KeyError", repr("Value [w] not found on Group [all]"))
    assert raised_by(group.get_paired, "w") == missing
    # A reference can be passed to a third process.
    assert group.rpc_sync("w2", lambda value: value.to_here()[0], args=(reference,)) == 1
    group.barrier()
    if world.rank == 1:
        group.unpair("v")
        group.pair("v", "again")
    group.barrier()
    return group.get_paired("v").to_here()


@pytest.mark.parametrize("size", [3, 4])
def test_values_under_keys(size: int) -> None:
    assert run_group(_values, size) == ["again"] * size


def _meet(world: World, group: RpcGroup) -> Any:
    if world.rank == 2:
        wait_for_members(2)
        group.barrier()
        return None
    answer = raised_by(group.barrier, timeout=0.2)
    group.rpc_sync("w2", let_go)
    group.barrier()
    return answer


def test_a_barrier_names_late_members_and_works_again() -> None:
    answers = run_group(_meet)
    late = ("RpcError", "barrier of group 'all': 'w2' has not arrived within 0.2 s")
    assert late in answers[:2]
    assert {kind for kind, _ in answers[:2]} == {"RpcError"}


def _many_barriers(world: World, group: RpcGroup) -> list[int]:
    numbers = []
    for number in range(100):
        if world.rank == 0:
            group.pair(number, number)
        group.barrier()
        numbers.append(group.get_paired(number).to_here())
    return numbers


@pytest.mark.parametrize("size", [3, 4])
def test_no_barrier_is_lost(size: int) -> None:
    assert run_group(_many_barriers, size) == [list(range(100))] * size


def _use_handle(pair: RpcGroup) -> tuple[list[int], str, str, str]:
    values = [pair.get_paired(name).to_here() for name in pair.get_group_members()]
    assert not pair.is_member()
    name = pair.rpc_sync("w1", get_cur_name)
    return values, name, raised_by(pair.pair, "k", 1)[0], raised_by(pair.barrier)[0]


@run_world(3)
def test_groups_are_made_sent_destroyed_and_made_again(world: World, group: RpcGroup) -> None:
    assert group.get_group_name() == "all"
    assert group.get_group_members() == ["w0", "w1", "w2"]
    assert group.size() == 3
    assert RpcGroup.get_cur_name() == f"w{world.rank}"
    assert group.is_member()
    assert group.is_member("w2")
    assert group.is_member(2)
    assert not group.is_member("w3")
    assert world.groups == {"all": group}
    # It arrives as the group of the receiving process.
    assert (
        group.rpc_sync(
            "w1", lambda group_there: group_there.barrier.__self__.destroyed, args=(group,)
        )
        is False
    )
    if world.rank < 2:
        pair = world.create_rpc_group("two", ["w1", "w0"])
        pair.pair(world.name, world.rank)
        pair.barrier()
        assert raised_by(world.create_rpc_group, "two", ["w0", "w1"]) == (
            "RuntimeError",
            "Group two already exists!",
        )
        # A process outside the group gets a handle for lookups and calls.
        used = group.rpc_sync("w2", _use_handle, args=(pair,))
        assert used == ([0, 1], "w1", "RuntimeError", "RuntimeError")
        pair.barrier()
        pair.destroy()
        pair.destroy()
        text = raised_by(pair.barrier)[1]
        assert re.search(f"'two' .*destroyed in 'w{world.rank}'$", text)
        pair = world.create_rpc_group("two", ["w0", "w1"])
        assert not pair.is_paired("w0")
        assert not pair.is_paired("w1")
        pair.barrier()
    else:
        answer = raised_by(world.create_rpc_group, "two", ["w0", "w1"])
        assert answer == ("RuntimeError", "Creator Process [w2] not in Group [two]")
        kind, text = raised_by(world.create_rpc_group, "x", ["w2", "w11"])
        assert kind == "ValueError"
        assert re.search("'w11' .*member .*'w0', 'w1', 'w2'", text)
        assert "did you mean 'w1'?" in text


def _disagree(world: World, group: RpcGroup) -> tuple[str, str] | None:
    if world.rank == 0:
        return raised_by(world.create_rpc_group, "g", ["w0", "w1"])
    if world.rank == 1:
        return raised_by(world.create_rpc_group, "g", ["w0", "w1", "w2"])
    return raised_by(world.create_rpc_group, "alone", ["w0", "w2"], 0.2)


def test_members_that_disagree_or_are_missing() -> None:
    w0, second, third = run_group(_disagree)
    assert w0[0] == second[0] == "ValueError"
    for text in (w0[1], second[1]):
        assert "gave the members 'w0', 'w1'" in text
        assert "members 'w0', 'w1', 'w2'" in text
    assert third[0] == "RpcError"
    assert re.search(r"'alone': 'w0' [^']*arrived .* 0\.2 s$", third[1])


def _kept_count() -> int:
    from stepwrap.rpc.calls import node as _node

    return len(_node.current().kept)


@run_world(3)
def test_a_value_lives_as_long_as_its_references(world: World, group: RpcGroup) -> None:
    if world.rank == 1:
        remote_value = group.remote("w0", lambda: torch.ones(3))
        assert remote_value.to_here().sum() == 3
        assert group.rpc_sync("w0", _kept_count) == 1
        passed = group.rpc_sync(
            "w2", lambda value: value.to_here().sum().item(), args=(remote_value,)
        )
        assert passed == 3
        del remote_value
        deadline = time.monotonic() + 10
        while group.rpc_sync("w0", _kept_count) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert group.rpc_sync("w0", _kept_count) == 0
