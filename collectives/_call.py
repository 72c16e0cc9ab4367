"""What surrounds every communication: who calls it, where, and what to say when it fails."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeAlias

import torch.distributed as dist

from .errors import CollectiveError

Describe: TypeAlias = Callable[[], str | Sequence[object]]


class calling:
    """Turns an error of the transport into a CollectiveError that says what and where."""

    def __init__(
        self, name: str, group: dist.ProcessGroup | None = None, describe: Describe | None = None
    ) -> None:
        self.name = name
        self.group = group
        self.describe = describe

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
            raise CollectiveError(
                f"{self.name}() must be reached by all {dist.get_world_size(self.group)} ranks, "
                f"but did not finish on rank {dist.get_rank()} "
                f"({dist.get_backend_config(self.group)}): a rank has died, has left the group or "
                f"did not arrive within the group's timeout; the transport says: {error}"
            ) from error
