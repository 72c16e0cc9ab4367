"""What torch keeps of process groups after their end.

Their threads would live on with it, and a process that exits with those aborts now and then.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from operator import attrgetter

# What clears the memories of DTensor, which hold meshes and so groups. Of no public use: other
# versions of torch may have others.
_CLEARING = (
    ("debug", "_clear_sharding_prop_cache"),
    ("_redistribute", "clear_redistribute_planner_cache"),
    ("_redistribute", "_gen_transform_infos.cache_clear"),
    ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)


def forget_meshes() -> None:
    """Have DTensor forget its meshes; for before the default group ends."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, clear in _CLEARING:
        with suppress(ImportError, AttributeError):
            attrgetter(clear)(import_module(f"torch.distributed.tensor.{module}"))()
