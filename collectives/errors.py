"""The error of this folder: a collective that failed or could not finish."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class CollectiveError(RuntimeError):
    """A collective failed on some rank, or a rank died, left or did not arrive in time."""


@contextmanager
def finishing(what: str) -> Iterator[None]:
    """Turn an error of the transport into a CollectiveError that says what and where."""
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"{what} must be reached by all {dist.get_world_size()} ranks, but did not finish on "
            f"rank {dist.get_rank()} ({dist.get_backend_config()}): a rank has died, has left the "
            f"group or did not arrive within the group's timeout; the transport says: {error}"
        ) from error
