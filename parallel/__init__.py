"""Many processes on one machine: pools, queues, events, pickling, placement of models.

Names are imported at their first use, so that worker processes without tensors do not import torch.
"""

from __future__ import annotations

import importlib
from multiprocessing import get_context, get_start_method

# Not imported from typing, to keep the start of workers fast.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..transport.errors import RemoteError, RemoteTraceback
    from ..transport.pickling import (
        Pickler,
        dumps,
        loads,
        mark_static_module,
        reduce_for_any_script,
    )
    from ..transport.remote_errors import ExceptionWithTraceback
    from .errors import (
        BrokenPoolError,
        EncodingError,
        PoolTerminatedError,
        TaskTimeoutError,
        TimeoutError,
        WorkerDiedError,
    )
    from .events import AndEvent, OrEvent
    from .placement.assigner import ModelAssigner
    from .placement.devices import free_memory
    from .placement.estimators import ModelComplexityEstimator, ModelSizeEstimator
    from .pools.base_pool import BasePool
    from .pools.dispatcher import PoolStates
    from .pools.pool import CtxPool, CtxThreadPool, P2PPool, Pool, ThreadPool
    from .pools.results import AsyncResult, IMapIterator, IMapUnorderedIterator, MapResult
    from .pools.worker import CtxPoolStorage, proxy_ctx_caller
    from .processes import Process, ProcessException, Thread, ThreadException
    from .queues import MultiP2PQueue, SimpleP2PQueue, SimpleQueue

__all__ = [
    "AndEvent",
    "AsyncResult",
    "BasePool",
    "BrokenPoolError",
    "CtxPool",
    "CtxPoolStorage",
    "CtxThreadPool",
    "EncodingError",
    "ExceptionWithTraceback",
    "IMapIterator",
    "IMapUnorderedIterator",
    "MapResult",
    "ModelAssigner",
    "ModelComplexityEstimator",
    "ModelSizeEstimator",
    "MultiP2PQueue",
    "OrEvent",
    "P2PPool",
    "Pickler",
    "Pool",
    "PoolStates",
    "PoolTerminatedError",
    "Process",
    "ProcessException",
    "RemoteError",
    "RemoteTraceback",
    "SimpleP2PQueue",
    "SimpleQueue",
    "TaskTimeoutError",
    "Thread",
    "ThreadException",
    "ThreadPool",
    "TimeoutError",
    "WorkerDiedError",
    "dumps",
    "free_memory",
    "get_context",
    "get_start_method",
    "loads",
    "mark_static_module",
    "proxy_ctx_caller",
    "reduce_for_any_script",
]

_HOMES = {
    "errors": "BrokenPoolError EncodingError PoolTerminatedError "
    "TaskTimeoutError TimeoutError WorkerDiedError",
    "events": "AndEvent OrEvent",
    "placement.assigner": "ModelAssigner",
    "placement.devices": "free_memory",
    "placement.estimators": "ModelComplexityEstimator ModelSizeEstimator",
    "pools.base_pool": "BasePool",
    "pools.dispatcher": "PoolStates",
    "pools.pool": "CtxPool CtxThreadPool P2PPool Pool ThreadPool",
    "pools.results": "AsyncResult IMapIterator IMapUnorderedIterator MapResult",
    "pools.worker": "CtxPoolStorage proxy_ctx_caller",
    "processes": "Process ProcessException Thread ThreadException",
    "queues": "MultiP2PQueue SimpleP2PQueue SimpleQueue",
    ".transport.errors": "RemoteError RemoteTraceback",
    ".transport.pickling": "Pickler dumps loads mark_static_module reduce_for_any_script",
    ".transport.remote_errors": "ExceptionWithTraceback",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
