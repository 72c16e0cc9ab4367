"""Worlds that fail: members that die or differ, invalid settings, worlds that cannot end."""

import contextlib
import os
import re
import signal
import socketserver
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from marks import slow
from ports import free_port
from ranks import run_ranks
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future
from worlds import catch_error, raised_by, rank_without_group, run_and_expect

from stepwrap.rpc import RpcError, World, get_world
from stepwrap.rpc.world.agent import listen_on_loopback
from stepwrap.rpc.world.members import joint_step
from stepwrap.rpc.world.store import find_place, naming_store


def local_place() -> str:
    """Return an unused address."""
    return f"tcp://127.0.0.1:{free_port()}"


def _differ(url: str, setting: str, values: list[Any]) -> tuple[str, str]:
    rank = rank_without_group()
    options = {"dist_init_method": url, "dist_timeout": 20, setting: values[rank]}
    return raised_by(World, f"w{rank}", rank, 2, **options)


@pytest.mark.parametrize("setting", ["init_rpc", "init_dist"])
def test_settings_that_differ(setting: str) -> None:
    answers = run_ranks(_differ, 2, local_place(), setting, [True, False])
    text = f"{setting} must be the same everywhere: it is True in rank 0 ('w0'), False in rank 1"
    assert answers == [("ValueError", f"{text} ('w1')")] * 2


def _name(url: str, names: list[Any]) -> tuple[str, str]:
    rank = rank_without_group()
    return raised_by(World, names[rank], rank, 2, dist_init_method=url, dist_timeout=20)


@pytest.mark.parametrize("name", ["a b", "", "x" * 128, 5, None, "a.b"])
@pytest.mark.parametrize("rank", [0, 1])
def test_invalid_names(name: Any, rank: int) -> None:
    names = ["other", "other"]
    names[rank] = name
    for kind, text in run_ranks(_name, 2, local_place(), names):
        assert kind == "ValueError"
        assert re.search(f"rank {rank}: .*name must .* 1 to 127 ", text)


def _die_after_meeting(rank: int, url: str, folder: Path) -> None:
    if rank == 2:
        original_meet = World._meet

        def meet(*args: Any) -> Any:
            original_meet(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        World._meet = meet  # type: ignore[method-assign]
    # The timeout starts once all processes are running.
    (folder / f"here_{rank}").touch()
    while len(list(folder.glob("here_*"))) < 3:
        time.sleep(0.01)
    options = {"dist_init_method": url, "dist_timeout": 4, "init_dist": folder.name == "dist"}
    (folder / str(rank)).write_text(catch_error(World, f"w{rank}", rank, 3, **options))


@pytest.mark.parametrize("step", ["calls", *slow("collectives")])
@pytest.mark.slow
def test_a_member_that_dies_after_the_meeting_is_named(step: str, tmp_path: Path) -> None:
    folder = tmp_path / ("dist" if step == "collectives" else "rpc")
    folder.mkdir()
    run_and_expect([0, 0, -signal.SIGKILL], _die_after_meeting, local_place(), folder)
    for rank in range(2):
        text = (folder / str(rank)).read_text()
        subject = {"calls": "RPC", "collectives": "process group"}[step]
        message = (
            f"RpcError: the {subject} of the world could not be started: 'w2' has not arrived; "
        )
        assert text.startswith(message)


def _no_limit() -> timedelta:
    store = dist.distributed_c10d._get_default_store()
    before: timedelta = store.timeout
    with World(f"w{dist.get_rank()}", rpc_timeout=0) as world:
        group = world.create_rpc_group("g", world.get_members())
        assert group.rpc_sync("w0", abs, args=(-1,)) == 1
        group.barrier()
    assert store.timeout == before
    return before


def test_calls_without_a_limit_and_the_store_keeps_its_own() -> None:
    assert run_ranks(_no_limit, 2)[0] > timedelta(0)


def _late_once(url: str | None, over: Path) -> list[str]:
    rank = dist.get_rank() if url is None else rank_without_group()
    ends = []
    for attempt in range(3):
        if (attempt, rank) == (0, 1):
            while not over.exists():
                time.sleep(0.01)
            continue
        try:
            options = {"dist_init_method": url, "dist_timeout": 0.5 if attempt == 0 else 20}
            World(f"w{rank}", rank, 2, init_dist=False, **options).stop()
            ends.append("made")
        except RpcError as error:
            ends.append(str(error))
        over.touch()
    return ends


@pytest.mark.parametrize("store", ["default group", "file"])
def test_a_world_after_one_that_could_not_begin(store: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store" if store == "file" else None
    result_0, second = run_ranks(_late_once, 2, url, tmp_path / "over")
    text = (
        "the world is incomplete: these of its 2 ranks did not join within 0.5 s: 1; "
        "joined: 0 ('w0')"
    )
    assert result_0 == [text, "made", "made"]
    assert second == ["made", "made"]


def _die_alone(rank: int, url: str, _: Path) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    World("w0", 0, 2, dist_init_method=url)


def _come_early(rank: int, url: str, folder: Path) -> None:
    if rank == 0:
        time.sleep(1.0)
    World(f"w{rank}", rank, 2, dist_init_method=url, dist_timeout=20).stop()
    (folder / str(rank)).write_text("made")


@pytest.mark.slow
def test_the_file_of_a_killed_world_is_not_joined(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    run_and_expect([-signal.SIGKILL], _die_alone, url, tmp_path)
    run_and_expect([0, 0], _come_early, url, tmp_path)


def _serve_until(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.01)


def _still_serves(url: str, folder: Path) -> None:
    rank = rank_without_group()
    stopped = [folder / f"stopped_{rank}" for rank in range(2)]
    world = World(f"w{rank}", rank, 2, dist_init_method=url)
    group = world.create_rpc_group("g", world.get_members())
    if rank == 0:
        group.rpc_async("w1", _serve_until, args=stopped)
        time.sleep(0.2)
    group.barrier()
    world.stop(1)
    stopped[rank].touch()
    # The next world starts after that function has returned.
    World(f"w{rank}", rank, 2, dist_init_method=url).stop()


def test_stop_does_not_wait_for_a_function_that_is_served(tmp_path: Path) -> None:
    """The function runs until both have stopped."""
    run_ranks(_still_serves, 2, local_place(), tmp_path)


@async_execution  # type: ignore[untyped-decorator]
def _answer_never() -> Future[None]:
    return Future()


def _ends_unanswered(rank: int, url: str, folder: Path) -> None:
    world = World(f"w{rank}", rank, 2, dist_init_method=url)
    group = world.create_rpc_group("g", world.get_members())
    if rank == 0:
        group.rpc_async("w1", _answer_never, timeout=0)
        time.sleep(0.2)
    group.barrier()
    world.stop(4)
    with World(f"w{rank}", rank, 2, dist_init_method=url):
        (folder / str(rank)).write_text("made")


@pytest.mark.slow
def test_a_call_that_is_never_answered_does_not_outlive_its_world(tmp_path: Path) -> None:
    run_and_expect([0, 0], _ends_unanswered, local_place(), tmp_path)


def _stop_twice(url: str) -> list[tuple[str, bool]]:
    rank = rank_without_group()
    world = World(f"w{rank}", rank, 2, dist_init_method=url)
    calls: list[tuple[str, bool]] = []
    if rank == 1:
        time.sleep(0.7)
        world.stop()
        return calls
    thread = threading.Thread(target=world.stop)
    thread.start()
    time.sleep(0.2)
    world.stop()
    calls.append(("second", get_world() is None))
    thread.join()
    return calls


def test_the_second_stop_waits_for_the_first() -> None:
    assert run_ranks(_stop_twice, 2, local_place())[0] == [("second", True)]


def _stop_in_handler(url: str) -> tuple[str, str]:
    def stop(*_: Any) -> None:
        world = get_world()
        assert world is not None
        world.stop(graceful=False)

    rank = rank_without_group()
    if rank == 1:
        time.sleep(1.0)
        with contextlib.suppress(RpcError):
            World("w1", 1, 2, dist_init_method=url, dist_timeout=2).stop(graceful=False)
        return "", ""
    original_meet = World._meet

    def meet(*args: Any) -> Any:
        meeting = original_meet(*args)
        os.kill(os.getpid(), signal.SIGUSR2)
        return meeting

    World._meet = meet  # type: ignore[method-assign]
    before = signal.signal(signal.SIGUSR2, stop)
    try:
        return raised_by(World, "w0", 0, 2, dist_init_method=url, dist_timeout=20)
    finally:
        signal.signal(signal.SIGUSR2, before)
        World._meet = original_meet  # type: ignore[method-assign]


def test_stop_in_a_handler_while_the_world_is_made() -> None:
    answer = run_ranks(_stop_in_handler, 2, local_place())[0]
    assert answer[0] == "RuntimeError"
    assert re.search("world .*'w0' .*stopped while .*created$", answer[1])


def _ends_the_group(url: str) -> bool:
    rank = rank_without_group()
    world = World(f"w{rank}", rank, 2, dist_init_method=url)
    dist.barrier()
    dist.destroy_process_group()
    world.stop()
    return get_world() is None


def test_stop_after_the_user_has_ended_the_default_group() -> None:
    assert run_ranks(_ends_the_group, 2, local_place()) == [True, True]


def _die_without_calls(rank: int, url: str, folder: Path) -> None:
    world = World(f"w{rank}", rank, 2, init_rpc=False, init_dist=False, dist_init_method=url)
    if rank == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "error").write_text(catch_error(world.stop, 20))


@pytest.mark.slow
def test_stop_names_rank_zero_if_it_has_died(tmp_path: Path) -> None:
    url = local_place()
    run_and_expect([-signal.SIGKILL, 0], _die_without_calls, url, tmp_path)
    where = url.removeprefix("tcp://")
    start = f"RpcError: World.stop(): rank 0, which keeps the store of the world at {where}, is"
    assert (tmp_path / "error").read_text().startswith(start)


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        (("0", 1), {}, "rank must be a whole number, got '0'"),
        ((0, 0), {}, "world_size must be at least 1, got 0"),
        ((0, 1), {"dist_timeout": 0}, "dist_timeout must be more than 0 seconds, got 0"),
        ((0, 1), {"rpc_timeout": -1}, "rpc_timeout must be at least 0 seconds, got -1"),
        ((0, 1), {"rpc_threads": 0}, "rpc_threads must be at least 1, got 0"),
        ((0, 1), {"rpc_threads": -4}, "rpc_threads must be at least 1, got -4"),
        ((0, 1), {"rpc_threads": 2.5}, "rpc_threads must be a whole number, got 2.5"),
        ((0, 1), {"dist_init_method": "tcp://127.0.0.1:99999"}, "dist_init_method must be"),
    ],
)
def test_invalid_settings(args: Any, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        World("a", *args, **options)
    assert get_world() is None


@pytest.mark.parametrize("setting", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_invalid_environments(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (environment | {setting: "abc"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{setting} must .*whole number, got 'abc'"):
        World("a")


def _cannot_connect(address: str) -> None:
    meeting = find_place(address, 1, 5)
    meeting.enter(0, time.monotonic() + 5)
    with listen_on_loopback(meeting.is_local), joint_step(meeting, "calls", 0, {0: "w0"}):
        raise RuntimeError("Connection refused")


def test_a_file_that_several_hosts_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("MASTER_ADDR", "LOCAL_WORLD_SIZE", "TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    address = f"file://{tmp_path}/store"
    text = "the RPC of the world could not be started: Connection refused"
    hint = (
        "; all sockets listen on the loopback interface: if the members are on several hosts, set "
        "TP_SOCKET_IFNAME on each host to the interface that reaches the others"
    )
    assert raised_by(_cannot_connect, address) == ("RpcError", text + hint)
    assert raised_by(_cannot_connect, local_place()) == ("RpcError", text)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert raised_by(_cannot_connect, address) == ("RpcError", text)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert raised_by(_cannot_connect, address) == ("RpcError", text)


def _lose_the_store(address: str) -> None:
    with naming_store(find_place(address, 1, 5), "World.stop()"):
        raise OSError("broken")


def test_rank_zero_is_named_only_if_it_keeps_the_store(tmp_path: Path) -> None:
    text = f"World.stop(): the store of the world at {tmp_path}/store is gone or cannot be reached"
    assert raised_by(_lose_the_store, f"file://{tmp_path}/store") == ("RpcError", f"{text}: broken")
    url = local_place()
    text = (
        f"World.stop(): rank 0, which keeps the store of the world at {url.removeprefix('tcp://')}"
    )
    assert raised_by(_lose_the_store, url)[1].startswith(text)


def test_an_unknown_host() -> None:
    address = "tcp://no-such-host.invalid:9000"
    with pytest.raises(RpcError, match="rank 0 cannot listen at no-such-host.invalid:9000: "):
        World("a", 0, 1, dist_init_method=address)
    with pytest.raises(RpcError, match=r"rank 0 .*not opened .*no-such-host\.invalid"):
        World("a", 1, 2, dist_init_method=address, dist_timeout=0.1)


class _Garbage(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(10)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.slow
def test_the_store_of_torchrun_is_gone_or_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "1",
        "WORLD_SIZE": "2",
    }
    for name, value in (environment | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    kind, text = raised_by(World, "a", dist_timeout=0.5)
    assert kind == "RpcError"
    assert re.search(rf"store .*127\.0\.0\.1:{port} .* 1 s: Connection refused$", text)
    with socketserver.TCPServer(("127.0.0.1", port), _Garbage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        kind, text = raised_by(World, "a", dist_timeout=0.5)
        server.shutdown()
    assert kind == "RpcError"
    assert re.search(rf"127\.0\.0\.1:{port} .*not a TCPStore: Ping failed", text)
