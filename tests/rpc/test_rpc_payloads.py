"""Calls with tensors of all layouts, all kinds of errors, references, and unsendable objects."""

import gc
import pickle
import re
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_rpc_calls import own_group, raised_by
from worlds import remote_traceback, run_world

from stepwrap.parallel import RemoteError, ThreadPool
from stepwrap.rpc import RpcException, RpcGroup, World
from stepwrap.rpc.calls.calls import transport_error
from stepwrap.rpc.calls.payload import pack_error, release_unsent


def _num_kept() -> int:
    from stepwrap.rpc.calls import node as _node

    return len(_node.current().kept)


def kept_in_the_end(group: RpcGroup, owner: str) -> int:
    """Return how many values `owner` still keeps after at most a minute."""
    deadline = time.monotonic() + 60
    gc.collect()
    while group.rpc_sync(owner, _num_kept) and time.monotonic() < deadline:
        time.sleep(0.01)
    return int(group.rpc_sync(owner, _num_kept))


def ragged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.filterwarnings("ignore")
@run_world(2)
def test_tensors_of_layouts_that_torch_cannot_send(world: World, group: RpcGroup) -> None:
    if world.rank != 0:
        return
    assert [len(row) for row in group.rpc_sync("w1", ragged).unbind()] == [2, 3]
    meta = group.rpc_sync("w1", lambda x: x, args=(torch.empty(3, device="meta"),))
    assert (meta.device.type, meta.shape) == ("meta", (3,))
    csr = torch.eye(3).to_sparse_csr()
    back = group.rpc_sync("w1", lambda x: x, args=({"a": csr},))["a"]
    assert back.layout == torch.sparse_csr
    assert torch.equal(back.to_dense(), torch.eye(3))
    kind, text = raised_by(group.rpc_sync, "w1", len, args=((csr, threading.Lock()),))
    assert kind == "TypeError"
    assert "cannot be sent" in text


class Unloadable:
    def __reduce__(self) -> Any:
        return not_here, ()


def not_here() -> None:
    raise ValueError("cannot be loaded here")


def leave() -> None:
    raise SystemExit(3)


@run_world(2)
def test_a_call_that_does_not_begin_ends_the_wait_for_its_value(
    world: World, group: RpcGroup
) -> None:
    if world.rank == 0:
        with pytest.raises(ValueError, match="cannot be loaded here"):
            group.remote("w1", abs, args=(Unloadable(),)).to_here()
        with pytest.raises(RpcException, match="SystemExit raised by 'w1'") as raised:
            group.remote("w1", leave).to_here()
        assert str(raised.value).count("raised by") == 1
        del raised
        late = group.remote("w1", time.sleep, 0.1, (0.5,))
        text = raised_by(late.to_here, 10)[1]
        assert re.match(r"'w1' .*answered sleep\(\) .* 0\.1 s", text)
        del late
        assert kept_in_the_end(group, "w1") == 0


@run_world(3)
def test_no_value_outlives_its_references(world: World, group: RpcGroup) -> None:
    if world.rank == 0:
        for _ in range(200):
            group.remote("w1", abs, args=(1,))
        assert kept_in_the_end(group, "w1") == 0
        remote_value = group.remote("w1", abs, args=(1,))
        raised_by(group.rpc_sync, "w2", len, args=((remote_value, threading.Lock()),))
        raised_by(group.rpc_sync, "w9", len, args=(remote_value,))
        assert (
            raised_by(group.remote, "w2", len, args=((remote_value, threading.Lock()),))[0]
            == "TypeError"
        )
        with pytest.raises(TypeError):
            group.rpc_sync("w2", len, args=(remote_value,))
        data = pickle.dumps(remote_value)
        del remote_value
        assert pickle.loads(data).to_here() == 1
        assert kept_in_the_end(group, "w1") == 0
        assert "has deleted the value" in raised_by(pickle.loads(data).to_here)[1]
        with pytest.raises(ZeroDivisionError):
            group.remote("w1", lambda: 1 / 0).to_here()
        assert kept_in_the_end(group, "w1") == 0


class ByFunction(Exception):
    def __reduce__(self) -> Any:
        return make_by_function, (self.args[0],)


def make_by_function(text: str) -> ByFunction:
    return ByFunction(text)


class OwnArguments(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> Any:
        return OwnArguments, (self.code,)


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail(error: Exception) -> None:
    raise error


@run_world(2)
def test_errors_of_all_kinds_bring_their_traceback(world: World, group: RpcGroup) -> None:
    if world.rank != 0:
        return
    for error in (ByFunction("a"), OwnArguments(3), NoText(), UnicodeError("u"), OSError(2, "x")):
        with pytest.raises(type(error)) as raised:
            group.rpc_sync("w1", fail, args=(error,))
        assert remote_traceback(raised.value).count("raised by 'w1':\nTraceback") == 1
        assert "raise error" in remote_traceback(raised.value)
        for error_copy in (raised.value, pickle.loads(pickle.dumps(raised.value))):
            assert type(error_copy) is type(error)
            assert error_copy.args == error.args
    assert raised.value.errno == 2


def fail_with_a_reference() -> None:
    raise LookupError(own_group().remote("w1", abs, args=(-41,)))


def fail_with_a_large_value() -> None:
    raise LookupError(bytes(17 << 20))


@run_world(2)
def test_errors_bring_references_and_large_values(world: World, group: RpcGroup) -> None:
    if world.rank == 0:
        for _ in range(10):
            with pytest.raises(LookupError) as raised:
                group.rpc_sync("w1", fail_with_a_reference)
            # Make sure that the callee has freed its own copy.
            group.rpc_sync("w1", gc.collect)
            assert raised.value.args[0].to_here() == 41
        with pytest.raises(LookupError) as raised:
            group.rpc_sync("w1", fail_with_a_large_value)
        assert len(raised.value.args[0]) == 17 << 20
        remote_value = group.remote("w1", abs, args=(-41,))
        release_unsent(pack_error(LookupError(remote_value), "w0"))
        del raised, remote_value
        assert kept_in_the_end(group, "w1") == 0


def test_tensors_in_errors_are_not_copied() -> None:
    tensor = torch.ones(3)
    _, buffers = pack_error(LookupError(tensor), "w0")
    assert [buffer.data_ptr() for buffer in buffers] == [tensor.data_ptr()]


def fail_in_a_pool() -> None:
    with ThreadPool(1) as pool:
        pool.apply(fail, (KeyError("lost"),))


def fail_as_a_pool_does() -> None:
    raise RemoteError("Hidden", "secret", "of the worker")


@run_world(2)
def test_errors_of_pools_in_the_callee(world: World, group: RpcGroup) -> None:
    if world.rank != 0:
        return
    for call in (group.rpc_sync, lambda *args: group.remote(*args).to_here()):
        with pytest.raises(RemoteError, match="^Hidden: secret$") as raised:
            call("w1", fail_as_a_pool_does)
        assert raised.value.traceback == "of the worker"
        with pytest.raises(KeyError, match="lost") as lost:
            call("w1", fail_in_a_pool)
        told_here = remote_traceback(lost.value)
        assert told_here.count("raised by 'w1'") == 1
        for phrase in ("raise error", "in fail_in_a_pool"):
            assert phrase in told_here


@run_world(2)
def test_odd_timeouts(world: World, group: RpcGroup) -> None:
    if world.rank == 0:
        for timeout in (1e-9, 0.0004):
            text = raised_by(group.rpc_sync, "w1", time.sleep, timeout, (0.3,))[1]
            assert re.match(r"'w1' .*answered sleep\(\) .* 0\.001 s$", text)
        for wrong in (-2, float("nan"), float("inf"), None, "3", True):
            kind, text = raised_by(group.rpc_sync, "w1", abs, wrong, (1,))
            assert kind == ("ValueError" if type(wrong) in (int, float) else "TypeError")
            assert text.startswith("timeout must be")
        assert group.rpc_sync("w1", abs, 1e300, (1,)) == 1


@on_ranks(2)
def test_calls_after_the_end() -> None:
    with World(f"w{dist.get_rank()}") as world:
        group = world.create_rpc_group("all", world.get_members())
    for call in (group.rpc_sync, group.rpc_async):
        text = "abs() cannot be called on 'w1': the world has been stopped"
        assert raised_by(call, "w1", abs, args=(1,)) == ("RpcError", text)


@pytest.mark.parametrize("direction", ["Request", "Response"])
def test_a_missing_device_map_is_named(direction: str) -> None:
    error = RuntimeError(
        "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to "
        "CPU before sending them over RPC, or call `set_device_map` on "
        f"`TensorPipeRpcBackendOptions`. {direction} device mapping is not available for "
        "destination w1"
    )
    text = str(transport_error(error, "w1", abs))
    assert "World(device_maps=...)" in text
    assert "gone" not in text
