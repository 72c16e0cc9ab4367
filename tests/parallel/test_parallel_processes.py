"""Processes and threads that report their exceptions."""

import functools
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import process_work as work
import pytest

from stepwrap.parallel import Process, ProcessException, RemoteError, Thread, ThreadException

FORK = multiprocessing.get_context("fork")
METHODS = ["fork", "forkserver", "spawn"]
# Everything awaited comes at once; long enough for a busy machine, and a longer wait is a hang.
LONG_S = 60.0


def ended(target: Any, *args: Any, ctx: Any = FORK, **options: Any) -> Process:
    process = Process(target=target, args=args, ctx=ctx, **options)
    process.start()
    process.join(LONG_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail("the process did not end")
    return process


@pytest.fixture
def _new_fork_server() -> None:
    """End a fork server into which other tests have loaded torch.

    `_stop` waits for the end of the server, which does not end while a process that was forked from
    this one has a copy of the server's pipe.
    """
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()
    multiprocessing.set_forkserver_preload(["__main__"])


@pytest.mark.usefixtures("_new_fork_server")
@pytest.mark.parametrize("method", METHODS)
def test_each_start_method_runs_reports_and_cleans(method: str, tmp_path: Path) -> None:
    ctx = multiprocessing.get_context(method)
    reader, writer = ctx.Pipe(duplex=False)
    cleaner = functools.partial(work.create, tmp_path / "clean")
    process = ended(work.send_modules, writer, ctx=ctx, cleaner=cleaner)
    assert process.exitcode == 0
    assert process.exception is None
    process.watch()
    assert (tmp_path / "clean").read_text() == str(process.pid)
    assert reader.poll(0)
    assert isinstance(process, ctx.Process)
    assert isinstance(process, Process)
    if method != "fork":
        assert reader.recv() is False, "a started process has imported torch"

    failed = ended(work.fail, ctx=ctx)
    assert failed.exitcode == 1
    with pytest.raises(ProcessException, match="wrong must not be 3") as caught:
        failed.watch()
    assert "KeyError: 'first'" in caught.value.args[0]
    assert isinstance(caught.value.__cause__, work.TwoArguments)
    assert caught.value.__cause__.value == 3

    killed = ended(work.kill, signal.SIGKILL, ctx=ctx)
    with pytest.raises(ProcessException, match=rf"\(pid {killed.pid}\) was killed by SIGKILL"):
        killed.watch()


def test_spawned_processes_accept_closures_over_locks_and_pipes() -> None:
    ctx = multiprocessing.get_context("spawn")
    reader, writer = ctx.Pipe(duplex=False)
    lock, number = ctx.Lock(), 7

    class Local(Exception):
        pass

    def target() -> None:
        with lock:
            writer.send(number)
        raise Local(number)

    process = ended(target, ctx=ctx, cleaner=lambda: writer.send("clean"))
    assert [reader.recv(), reader.recv()] == [7, "clean"]
    assert isinstance(process.exception, ProcessException)
    assert isinstance(process.exception.__cause__, Local)


class _Greeter(Process):
    def __init__(self, connection: Any, ctx: Any) -> None:
        super().__init__(ctx=ctx, name="greeter")
        self.connection = connection

    def run(self) -> None:
        self.connection.send(self.name)
        super().run()


def test_a_subclass_with_other_arguments_can_be_spawned() -> None:
    ctx = multiprocessing.get_context("spawn")
    reader, writer = ctx.Pipe(duplex=False)
    process = _Greeter(writer, ctx)
    assert type(process).__name__ == "_Greeter"
    process.start()
    process.join(LONG_S)
    assert reader.recv() == "greeter"
    assert process.exitcode == 0


def test_the_default_context_and_documented_order_of_arguments() -> None:
    reader, writer = FORK.Pipe(duplex=False)
    process = Process(None, work.send, "mine", (writer,), {"value": 5}, None, FORK, daemon=True)
    assert (process.name, process.daemon, process.exception) == ("mine", True, None)
    process.start()
    process.join(LONG_S)
    assert reader.recv() == 5
    assert isinstance(Process(), multiprocessing.get_context("spawn").Process), "no fork by default"


@pytest.mark.parametrize(("code", "exitcode"), [(None, 0), (0, 0), (3, 3), ("text", 1)])
def test_sys_exit_keeps_its_code_and_0_is_a_success(code: object, exitcode: int) -> None:
    process = ended(work.leave, code)
    assert process.exitcode == exitcode
    if exitcode == 0:
        assert process.exception is None
        process.watch()
    else:
        with pytest.raises(ProcessException, match=f"SystemExit: {code}"):
            process.watch()


def test_deaths_without_a_report_are_failures() -> None:
    process = ended(work.leave_at_once, 3)
    with pytest.raises(ProcessException, match=f"pid {process.pid}.* exited with code 3 without"):
        process.watch()
    assert "SIGSEGV" in str(ended(work.kill, signal.SIGSEGV).exception)
    assert "signal 40" in str(ended(work.kill, 40).exception)


def test_a_process_that_runs_has_no_exception_until_it_is_killed() -> None:
    process = Process(target=work.sleep, ctx=FORK)
    process.watch()
    process.start()
    try:
        process.watch()
        assert process.exception is None
    finally:
        process.terminate()
        process.join(LONG_S)
    with pytest.raises(ProcessException, match="SIGTERM"):
        process.watch()


def test_a_failing_cleaner_is_reported_after_the_target() -> None:
    both = ended(work.fail, cleaner=work.fail_to_clean).exception
    assert both is not None
    assert both.args[0].index("Exception 1:") < both.args[0].index("TwoArguments")
    assert both.args[0].index("Exception 2:") < both.args[0].index("ValueError: not clean")
    alone = ended(work.leave, 0, cleaner=work.fail_to_clean)
    assert alone.exitcode == 1
    assert isinstance(alone.exception, ProcessException)
    assert isinstance(alone.exception.__cause__, ValueError)


def test_long_tracebacks_do_not_block() -> None:
    process = ended(work.fail, "x" * 10_000_000)
    text = str(process.exception)
    assert len(text) <= 65536
    assert "cut here" in text
    assert text.endswith("must not be 3")


@pytest.mark.parametrize("fails", [True, False])
def test_a_forked_child_does_not_clean_up_or_report(fails: bool, tmp_path: Path) -> None:
    path = tmp_path / "clean"
    process = ended(work.fork, fails, cleaner=functools.partial(work.create, path))
    assert process.exitcode == 0
    assert process.exception is None
    assert path.read_text() == str(process.pid)


def test_the_exception_is_available_before_the_process_has_ended(tmp_path: Path) -> None:
    process = Process(target=work.fail_and_stay, args=(tmp_path / "go",), ctx=FORK)
    process.start()
    try:
        waits = threading.Event()
        while process.exception is None and process.is_alive():
            waits.wait(0.005)
        assert process.is_alive()
        assert "failed, yet here" in str(process.exception)
    finally:
        (tmp_path / "go").touch()
        process.join(LONG_S)
    assert process.exitcode == 1


def test_watch_raises_once_the_failed_process_has_ended() -> None:
    process = Process(target=work.fail, cleaner=work.fail_to_clean, ctx=FORK)
    process.start()

    def watch_on() -> None:
        while process.exitcode != 0:
            process.watch()

    with pytest.raises(ProcessException, match="must not be 3"):
        watch_on()
    assert connection.wait([process.sentinel], 0)


def test_close_keeps_the_exception_and_gives_the_file_back() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = open_files()
    process = ended(work.fail)
    process.close()
    process.close()
    well = ended(work.leave, 0)
    well.close()
    assert well.exception is None
    assert "wrong must not be 3" in str(process.exception)
    assert open_files() == before
    process = Process(ctx=FORK)
    del process
    gc.collect()
    assert open_files() == before


def test_a_process_is_pickled_only_to_be_started() -> None:
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(Process(target=work.fail, ctx=FORK))


def test_exceptions_that_cannot_be_pickled_are_reported_by_name() -> None:
    def target() -> None:
        error = ValueError("holds a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    exception = ended(target).exception
    assert exception is not None
    assert isinstance(exception.__cause__, RemoteError)
    assert str(exception.__cause__) == "ValueError: holds a lock"


def test_threads_keep_the_exception_itself(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("wrong")
    done = []

    def target(value: int, *, key: int) -> None:
        done.append((value, key))
        raise error

    thread = Thread(None, target, "mine", (1,), {"key": 2}, lambda: done.append("clean"))
    assert thread.exception is None
    thread.watch()
    with caplog.at_level(logging.ERROR):
        thread.start()
        thread.join()
    assert done == [(1, 2), "clean"]
    for _ in range(2):
        with pytest.raises(ThreadException, match="Exception 1:(.|\n)*ValueError: wrong") as caught:
            thread.watch()
        assert caught.value.__cause__ is error
    with pytest.raises(ThreadException):
        thread.join(reraise=True)
    assert thread.exception is not thread.exception
    assert "thread 'mine' failed" in caplog.text


def test_threads_record_the_cleaner_and_every_kind_of_exception() -> None:
    thread = Thread(target=work.leave, args=(2,), cleaner=work.fail_to_clean)
    thread.start()
    thread.join()
    assert "SystemExit: 2" in str(thread.exception)
    assert "Exception 2:" in str(thread.exception)
    for code in (0, None):
        thread = Thread(target=work.leave, args=(code,), daemon=True)
        thread.start()
        thread.join(LONG_S, reraise=True)
        assert thread.exception is None


def test_a_thread_that_ended_holds_nothing_of_its_target() -> None:
    class Held:
        def __call__(self) -> None:
            pass

    target, cleaner = Held(), Held()
    references = weakref.ref(target), weakref.ref(cleaner)
    thread = Thread(target=target, cleaner=cleaner)
    thread.start()
    thread.join()
    del target, cleaner
    assert [reference() for reference in references] == [None, None]
    assert not thread.is_alive()
