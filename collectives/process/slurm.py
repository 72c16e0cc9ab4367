"""Recognise the tasks of a Slurm step, and read the variables that srun sets.

Slurm also sets SLURM_PROCID and SLURM_NTASKS in a batch script and in the shell of ``salloc``,
which are not tasks. Only srun sets the variables of a step (https://slurm.schedmd.com/srun.html).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Final

# The variable that overrides what is recognised, and its values.
LAUNCHER: Final = "STEPWRAP_LAUNCHER"
_CHOICES: Final = ("slurm", "none")
# Slurm gives the steps of batch scripts, interactive shells and prologs the numbers from here on.
_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0
_FIRST_PORT, _PORTS = 12_000, 20_000
_HOST = re.compile(r"((?:\[[^\]]+\]|[^,\[\]])+)(?:,|$)")
_RANGES = re.compile(r"\[([^\]]*)\]")
_TIMES = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def slurm_tasks(env: Mapping[str, str], *, is_in_shell: bool | None = None) -> int:
    """Return the number of tasks of the step if this process is one of them, otherwise 0.

    Args:
        env: the environment of this process.
        is_in_shell: whether a shell that srun has started on a terminal, as by
            ``srun --pty bash``, started this process. Default: found out.

    Raises:
        ValueError: STEPWRAP_LAUNCHER or a number of Slurm is invalid.
    """
    choice = env.get(LAUNCHER) or ""
    if choice not in ("", *_CHOICES):
        raise ValueError(f"{LAUNCHER} must be {' or '.join(_CHOICES)}, got {choice!r}")
    if choice == "none" or not env.get("SLURM_PROCID"):
        return 0
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    tasks = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
    # Without a job, another program has set the variables.
    if choice == "slurm" or not env.get("SLURM_JOB_ID"):
        return tasks
    if not step or int(step) >= _FIRST_SPECIAL_STEP:
        return 0
    in_shell = _is_in_shell(env) if is_in_shell is None else is_in_shell
    return 0 if in_shell else tasks


def describe_slurm(env: Mapping[str, str]) -> str:
    """Return what is recognised in a Slurm job, and how to override it; "" elsewhere.

    Only one of the tasks of a step describes it.
    """
    if not env.get("SLURM_JOB_ID") or env.get("RANK"):
        return ""
    tasks, job = slurm_tasks(env), f"job {env['SLURM_JOB_ID']}"
    if tasks > 1:
        if env["SLURM_PROCID"] != "0":
            return ""
        step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or "?"
        return (
            f"Slurm: the {tasks} tasks of step {step} of {job} are the ranks; {LAUNCHER}=none "
            "starts processes in each task instead"
        )
    reason = "has a single task" if tasks else "was not started by srun"
    return (
        f"Slurm: this process of {job} {reason}, so the processes are started here (--nproc); "
        f"start it with srun, or set {LAUNCHER}=slurm, to use Slurm's tasks as ranks"
    )


def _is_in_shell(env: Mapping[str, str]) -> bool:
    """Return whether srun started a shell on this terminal, and the shell this process."""
    if not env.get("SLURM_PTY_PORT") or env.get("SLURM_TASK_PID") == str(os.getpid()):
        return False
    # An srun in such a shell passes SLURM_PTY_PORT on, but its tasks have no terminal.
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def adopt_slurm(env: MutableMapping[str, str]) -> None:
    """Add torch's variables to ``env`` from srun's variables, unless RANK is set."""
    if env.get("RANK") or not env.get("SLURM_PROCID"):
        return
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    # Jobs on the same node, and steps of the same job, get different ports.
    job, step = (int(env.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    variables = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"],
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_host(nodes) if nodes else "localhost",
        "MASTER_PORT": str(_FIRST_PORT + (job * 61 + step) % _PORTS),
    }
    local_tasks = tasks_here(env)
    if local_tasks is not None:
        variables["LOCAL_WORLD_SIZE"] = str(local_tasks)
    for name, value in variables.items():
        env.setdefault(name, value)


def first_host(nodes: str) -> str:
    """Return the first host of a list such as "gpu[01-04,07],other": gpu01."""
    # A comma inside brackets does not end the host.
    match = _HOST.match(nodes.strip())
    if match is None:
        raise ValueError(f"the node list must be in Slurm's format, got {nodes!r}")
    return _RANGES.sub(lambda match: re.split("[,-]", match.group(1))[0], match.group(1))


def tasks_per_node(text: str) -> Iterator[int]:
    """Yield the number of tasks of each node from a list such as "8(x2),4": 8, 8, 4."""
    for group in text.split(","):
        match = _TIMES.fullmatch(group.strip())
        if match is None:
            raise ValueError(f"the tasks per node must be in Slurm's format, got {text!r}")
        yield from [int(match.group(1))] * int(match.group(2) or 1)


def tasks_here(env: Mapping[str, str]) -> int | None:
    """Return the number of Slurm tasks on this node, None if unknown."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE")
    if not text:
        return None
    tasks = list(tasks_per_node(text))
    node = int(env.get("SLURM_NODEID") or 0)
    # A single number applies to every node.
    return tasks[node] if node < len(tasks) else tasks[-1]
