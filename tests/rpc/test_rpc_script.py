"""Functions and classes that are defined in the running script or in another one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import dataclasses, sys
import multiprocessing as mp
from stepwrap.rpc import World

class OwnError(Exception):
    pass

@dataclasses.dataclass(frozen=True)
class Key:
    number: int

count, lock = 0, __import__("threading").Lock()

def bump(by=1):
    global count
    with lock:
        count += by
    return count

def fail():
    raise OwnError("x")

def greet(name):
    return f"{greeting} {name}"

greeting = "hello"

def use(rank, place):
    with World(f"w{rank}", rank, 2, init_dist=False, dist_init_method=f"file://{place}") as world:
        group = world.create_rpc_group("g", world.get_members())
        if rank == 1:
            group.pair(Key(1), Key(2))
        group.barrier()
        if rank == 0 and sys.argv[2] == "same":
            assert [group.rpc_sync("w1", bump) for _ in range(2)] == [1, 2]
            assert group.rpc_sync("w1", lambda: bump(3)) == 5
            try:
                group.rpc_sync("w1", fail)
            except OwnError:
                pass
            assert group.get_paired(Key(1)).to_here() == Key(2)
        if rank == 0:
            assert group.rpc_sync("w1", greet, args=("you",)) == "hello you"
        if rank == 0 and sys.argv[2] == "other":
            try:
                group.rpc_sync("w1", bump)
            except TypeError as error:
                assert "bump of" in str(error) and "to another script" in str(error), error
        group.barrier()
    assert count == (5 if rank == 1 and sys.argv[2] == "same" else 0), count

if __name__ == "__main__":
    if len(sys.argv) == 4:
        use(int(sys.argv[3]), sys.argv[1])
    else:
        other = mp.get_context("spawn").Process(target=use, args=(1, sys.argv[1]))
        other.start()
        use(0, sys.argv[1])
        other.join()
        sys.exit(other.exitcode)
"""

OTHER = """
import sys
from stepwrap.rpc import World

with World("w1", 1, 2, init_dist=False, dist_init_method=f"file://{sys.argv[1]}") as world:
    group = world.create_rpc_group("g", world.get_members())
    group.barrier()
    group.barrier()
"""


def run(*commands: list[str]) -> None:
    """Run processes at once and check that all succeed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, *command], stderr=subprocess.PIPE, text=True, env=environment
        )
        for command in commands
    ]
    try:
        texts = [process.communicate(timeout=60)[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * len(commands), texts


@pytest.mark.slow
def test_processes_of_one_script_use_their_own_globals(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run(*([str(script), str(tmp_path / "a"), "same", rank] for rank in "01"))
    run([str(script), str(tmp_path / "b"), "same"])


@pytest.mark.slow
def test_another_script_gets_them_by_value(tmp_path: Path) -> None:
    script, other = tmp_path / "script.py", tmp_path / "other.py"
    script.write_text(SCRIPT)
    other.write_text(OTHER)
    folder = str(tmp_path / "a")
    run([str(script), folder, "other", "0"], [str(other), folder])
