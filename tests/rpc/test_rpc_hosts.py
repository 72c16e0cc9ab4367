"""One world on two hosts, which are network namespaces joined by a virtual cable."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ADDRESSES = ["10.213.87.1", "10.213.87.2"]
PORT = 29400

# Both programs create a world, run the code put in for WORK and write down their results.
PROGRAM = """
import json, os, subprocess, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from stepwrap.rpc import PushPullModelServerImpl, RpcError, World, get_cur_name

def result_or_error(fn, *args, **kwargs):
    try:
        return fn(*args, **kwargs)
    except RpcError as error:
        return str(error)

def listening():
    lines = [line.split() for line in open("/proc/self/net/tcp")][1:]
    places = [line[1].split(":")[0] for line in lines if line[3] == "0A"]
    return sorted({".".join(str(byte) for byte in bytes.fromhex(one)[::-1]) for one in places})

rank = int(os.environ["RANK"])
seen = {}
world = World(f"w{rank}", rpc_timeout=30)
group = world.create_rpc_group("all", world.get_members())
WORK
Path(f"seen_{rank}").write_text(json.dumps(seen))
"""

USE = """
with world:
    seen["call"] = group.rpc_sync(1 - rank, get_cur_name)
    torch.manual_seed(rank)
    net = nn.Linear(300, 300)
    if rank == 0:
        host = PushPullModelServerImpl("models", group)
        group.get_paired("models").to_here().push(net)
    group.barrier()
    group.get_paired("models").to_here().pull(net)
    weights = [torch.zeros_like(net.weight) for _ in range(2)]
    dist.all_gather(weights, net.weight.detach())
    seen["same"] = torch.equal(*weights)
    total = torch.tensor([float(rank + 1)])
    both = world.create_collective_group([0, 1])
    both.all_reduce(total)
    seen["total"] = total.item()
    group.barrier()
"""

CUT = """
seen["listening"] = listening()
sleeping = group.rpc_async(1 - rank, time.sleep, args=(60,), timeout=2)
group.barrier()
time.sleep(0.3)
if rank == 0:
    subprocess.run(["ip", "link", "set", os.environ["TP_SOCKET_IFNAME"], "down"], check=True)
seen["in flight"] = result_or_error(sleeping.wait)
seen["new"] = result_or_error(group.rpc_sync, 1 - rank, abs, 1, (1,))
seen["barrier"] = result_or_error(group.barrier, timeout=1)
Path(f"seen_{rank}").write_text(json.dumps(seen))
os._exit(0)
"""


class Hosts:
    """Two network namespaces, each with its own interface and address."""

    def __init__(self) -> None:
        self.names = [f"stepwrap{os.getpid()}{end}" for end in "ab"]
        self.interfaces = [f"sw{os.getpid() % 10**7}{end}" for end in "ab"]

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        (host_a, second), (interface_a, other) = self.names, self.interfaces
        link = f"link add {interface_a} netns {host_a} type veth peer name {other} netns {second}"
        ip(*link.split())
        for name, interface, address in zip(self.names, self.interfaces, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            for link in (interface, "lo"):
                ip("-n", name, "link", "set", link, "up")
        # The kernel may need a second until the interface has an address.
        deadline = time.monotonic() + 10
        while not all(map(self._is_up, range(2))) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _is_up(self, host: int) -> bool:
        return "state UP" in ip("-n", self.names[host], "link", "show", self.interfaces[host])

    def remove(self) -> None:
        for name in self.names:
            command = ["ip", "netns", "pids", name]
            processes_left = subprocess.run(
                command, capture_output=True, text=True, check=False
            ).stdout
            for pid in processes_left.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def run(self, commands: list[list[str]], folder: Path) -> list[dict[str, object]]:
        """Run a command on each host, in a folder; return the results of the programs."""
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folder,
                start_new_session=True,
                env=dict(os.environ)
                | {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface},
            )
            for name, interface, command in zip(self.names, self.interfaces, commands, strict=True)
        ]
        try:
            outputs = [process.communicate(timeout=90)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
        return [json.loads((folder / f"seen_{rank}").read_text()) for rank in range(2)]


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip")
    hosts = Hosts()
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


@pytest.mark.slow
def test_two_hosts_by_torchrun(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("WORK", USE))
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}"]
    commands = [
        [*torchrun, "--rdzv-conf", f"is_host={is_host}", "--local-addr", address, "program.py"]
        for is_host, address in zip("10", ADDRESSES, strict=True)
    ]
    result_0, second = hosts.run(commands, tmp_path)
    assert result_0 == {"call": "w1", "same": True, "total": 3.0}
    assert second == {"call": "w0", "same": True, "total": 3.0}


@pytest.mark.slow
def test_two_hosts_of_which_one_vanishes(hosts: Hosts, tmp_path: Path) -> None:
    address = f'dist_init_method="tcp://{ADDRESSES[0]}:{PORT}"'
    for rank in range(2):
        program = PROGRAM.replace("WORK", CUT).replace('os.environ["RANK"]', str(rank))
        call_text = f'World(f"w{{rank}}", rank, 2, {address}, '
        (tmp_path / f"program{rank}.py").write_text(
            program.replace('World(f"w{rank}", ', call_text)
        )
    result_0, second = hosts.run([["program0.py"], ["program1.py"]], tmp_path)
    for result, own_address, peer in ((result_0, ADDRESSES[0], "w1"), (second, ADDRESSES[1], "w0")):
        assert result["listening"] == [own_address]
        assert re.match(rf"{peer!r} .*answered sleep\(\) .* 2 s$", result["in flight"])
        assert re.match(rf"{peer!r} .*answered abs\(\) .* 1 s$", result["new"])
    assert re.match("barrier .*'all': 'w1' [^']*arrived .* 1 s$", result_0["barrier"])
    assert "'w0' has not answered" in str(second["barrier"])
