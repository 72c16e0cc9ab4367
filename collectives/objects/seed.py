"""A seed that all ranks agree on."""

import secrets

import torch.distributed as dist

from ..process.ranks import members
from .objects import broadcast


def sync_random_seed(group: dist.ProcessGroup | None = None) -> int:
    """Return one new seed in [0, 2**31) on all ranks; every rank must call this.

    It is the group's first rank's, from the operating system: seeding does not repeat it, and no
    random generator of Python, NumPy or torch is advanced.
    """
    return broadcast(secrets.randbelow(2**31), members(group)[0], group)
