"""The address at which a world listens if the machine's name belongs to a public address."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from marks import slow
from ports import free_port
from ranks import run_ranks
from worlds import rank_without_group

from stepwrap.rpc import World

PROGRAM = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from stepwrap.rpc import World

def listening():
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
           if os.path.lexists(f"/proc/self/fd/{fd}")}
    places = set()
    for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = row.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            packed = bytes.fromhex(fields[1].split(":")[0])[::-1]
            places.add(".".join(map(str, packed)))
    return sorted(places)

rank, seen = int(sys.argv[1]), {}
with World(f"w{rank}", rank, 2, dist_init_method=sys.argv[2]) as world:
    seen["world"] = listening()
    world.create_collective_group([0, 1]).barrier()
    seen["collective group"] = listening()
Path(f"seen_{rank}").write_text(json.dumps(seen))
"""

START = """
set -e
ip link set lo up
ip addr add 192.0.2.2/24 dev lo
hostname otherhost
printf '127.0.0.1 localhost\\n192.0.2.2 otherhost\\n' > hosts
mount --bind hosts /etc/hosts
"$0" program.py 0 "$1" & first=$!
"$0" program.py 1 "$1"
wait $first
"""


def why_not() -> str:
    """Return why a test cannot rename this machine, or an empty string if it can."""
    tools = [tool for tool in ("unshare", "ip", "hostname", "mount") if shutil.which(tool) is None]
    if tools:
        return f"needs {', '.join(tools)}"
    tried = subprocess.run(
        ["unshare", "-u", "-m", "-n", "sh", "-c", "ip link set lo up && hostname otherhost"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return "" if tried.returncode == 0 else f"needs namespaces: {tried.stderr.strip()}"


# The environment of a launcher that names the host and starts all ranks on it.
HERE = {"MASTER_ADDR": "otherhost", "MASTER_PORT": "29417", "WORLD_SIZE": "2"}


@pytest.mark.parametrize("address", slow("env://", "tcp://127.0.0.1:29417", "file://store"))
def test_nothing_listens_to_the_outside(address: str, tmp_path: Path) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    (tmp_path / "program.py").write_text(PROGRAM)
    url = address.replace("file://", f"file://{tmp_path}/")
    done = subprocess.run(
        ["unshare", "-u", "-m", "-n", "sh", "-c", START, sys.executable, url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env=os.environ | HERE | {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        listening = json.loads((tmp_path / f"seen_{rank}").read_text())
        assert listening == {"world": ["127.0.0.1"], "collective group": ["127.0.0.1"]}


def warnings_at_start(store: str) -> list[list[str]]:
    """Start two worlds in turn that meet at `store`; return the warnings of each start."""
    rank = rank_without_group()
    started = []
    for _ in range(2):
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        logger = logging.getLogger("stepwrap.rpc")
        logger.addHandler(handler)
        try:
            with World(f"w{rank}", rank, 2, init_dist=False, dist_init_method=store):
                pass
        finally:
            logger.removeHandler(handler)
        started.append([record.getMessage() for record in records])
    return started


def test_a_store_without_a_password_is_said_at_the_start(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    (first, second), other_rank = run_ranks(warnings_at_start, 2, f"tcp://{address}")
    (warning,) = first
    for fact in (address, "no password", "every user of this machine", "file:///", "docs/rpc.md"):
        assert fact in warning
    assert (second, other_rank) == ([], [[], []])
    # A file in a folder of the user is not readable for others.
    quiet = run_ranks(warnings_at_start, 2, f"file://{tmp_path}/store")
    assert quiet == [[[], []], [[], []]]
