"""Raising together: a problem of one rank is an error on all of them."""

import torch.distributed as dist

from .objects import all_gather_object


def raise_together(
    problem: Exception | None, group: dist.ProcessGroup | None = None, what: str = ""
) -> None:
    """Raise on every rank what is wrong on any of them; every rank must call this."""
    for rank, answer in enumerate(all_gather_object(problem, group)):
        if answer is not None:
            if problem is not None:
                raise problem
            raise type(answer)(f"{what}on rank {rank}: {answer}")
