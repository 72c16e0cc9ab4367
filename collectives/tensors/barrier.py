"""Waiting for all ranks, and saying which ones did not come."""

from datetime import timedelta

import torch
import torch.distributed as dist

from ..process.ranks import launched_local_rank, live_world_size
from ..trace.calling import calling


def synchronize(timeout_s: float | None = None, group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank has come here; every rank must call this.

    Args:
        timeout_s: how long to wait (default: the group's own timeout).

    Raises:
        CollectiveError: not all ranks came; it names the missing ones.
    """
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s}")
    if live_world_size(group) == 1:
        return
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    live = group or dist.group.WORLD
    assert live is not None
    # No meeting while tracing: it would wait for as long as the group allows.
    with calling("synchronize", group, meets=True):
        if backends.get("cpu") == "gloo":
            # The only barrier of torch that names who is missing. The group's own method: the
            # function in torch.distributed refuses groups made with any other name than "gloo".
            live.monitored_barrier(timeout, wait_all_ranks=True)  # type: ignore[attr-defined]
            return
        work = start_barrier(group)
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)


def start_barrier(group: dist.ProcessGroup | None = None) -> dist.Work:
    """Begin torch's own barrier; every rank must call this."""
    has_nccl = "cuda:nccl" in dist.get_backend_config(group).split(",")
    device_ids = [_barrier_device()] if has_nccl else None
    work: dist.Work = dist.barrier(group, async_op=True, device_ids=device_ids)
    return work


def _barrier_device() -> int:
    """Return this rank's device, also where more ranks than devices share a host."""
    # Only what is known at once: not all ranks may be members of the group.
    local_rank = launched_local_rank()
    if local_rank is not None and local_rank < torch.cuda.device_count():
        return local_rank
    return torch.cuda.current_device()
