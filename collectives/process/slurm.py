"""What `srun` tells a process, in the words that torch reads."""

import re
from collections.abc import Iterator, Mapping, MutableMapping

_FIRST_PORT, _PORTS = 12_000, 20_000
_HOST = re.compile(r"((?:\[[^\]]+\]|[^,\[\]])+)(?:,|$)")
_RANGES = re.compile(r"\[([^\]]*)\]")
_TIMES = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def adopt_slurm(env: MutableMapping[str, str]) -> None:
    """Add torch's variables to `env`, from those that srun sets, where there is no RANK yet."""
    if env.get("RANK") or not env.get("SLURM_PROCID"):
        return
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    found = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_host(nodes) if nodes else "localhost",
        "MASTER_PORT": str(_port(env)),
    }
    here = tasks_here(env)
    if here is not None:
        found["LOCAL_WORLD_SIZE"] = str(here)
    for name, value in found.items():
        env.setdefault(name, value)


def first_host(nodes: str) -> str:
    """Return the first host of a list such as "gpu[01-04,07],other": gpu01."""
    # A comma inside brackets does not end the host.
    match = _HOST.match(nodes.strip())
    if match is None:
        raise ValueError(f"not a list of hosts as Slurm writes it: {nodes!r}")
    return _RANGES.sub(lambda match: re.split("[,-]", match.group(1))[0], match.group(1))


def tasks_per_node(text: str) -> Iterator[int]:
    """Yield the tasks of each node from a list such as "8(x2),4": 8, 8, 4."""
    for part in text.split(","):
        match = _TIMES.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"not a list of tasks per node as Slurm writes it: {text!r}")
        yield from [int(match.group(1))] * int(match.group(2) or 1)


def tasks_here(env: Mapping[str, str]) -> int | None:
    """Return how many tasks this node has, None when nothing tells."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE")
    if not text:
        return None
    tasks = list(tasks_per_node(text))
    node = int(env.get("SLURM_NODEID") or 0)
    # A single number holds for every node.
    return tasks[node] if node < len(tasks) else tasks[-1]


def _port(env: MutableMapping[str, str]) -> int:
    """Return a port that two jobs on one node, or two steps of one job, do not share."""
    job, step = (int(env.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 61 + step) % _PORTS
