"""A ``DistributedDataParallel`` with reproducible sums; the only user of torch's private reducer.

torch sums gradients over the ranks in buckets. After the first backward of a process it rebuilds
the buckets, in the order in which the gradients became ready. With three or more ranks, the
position of a gradient in its bucket decides in which order the ranks are added. So the first step
after a resume would differ in the last digits from the same step of an uninterrupted run.

The tests check every private name in ``_USED`` with torch 2.13 and 2.15.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from .comm_hooks import CommHook

CHECKED = "2.13 or 2.15"
_REDUCER = getattr(distributed, "Reducer", None)
_USED = (
    (DistributedDataParallel, "_build_params_for_reducer"),
    (DistributedDataParallel, "_set_static_graph"),
    (_REDUCER, "_push_all_rebuilt_params"),
    (_REDUCER, "_rebuild_buckets"),
)


class FixedBuckets(DistributedDataParallel):
    """A ``DistributedDataParallel`` that sums gradients in the same order when a run is resumed.

    From the first step on, its buckets have the reverse order of the parameters, which is the order
    in which most models compute gradients. With ``find_unused_parameters`` this is not needed,
    because torch never rebuilds the buckets. With ``static_graph`` and a hook without
    ``averages``, torch rebuilds the buckets as usual, so the order may change after a resume.
    """

    _hook: CommHook | None = None

    def __init__(self, module: nn.Module, **options: Any) -> None:
        is_known = _has_names()
        self._is_static = is_known and bool(options.pop("static_graph", False))
        if self._is_static:
            # A static graph needs no search: the recorded graph shows the unused parameters.
            options["find_unused_parameters"] = False
        # If the constructor rebuilds the buckets, torch passes the parameters of the first bucket
        # to every call of a hook while torch records a static graph. Hooks without `averages` may
        # read the parameters of a bucket, so with such a hook the buckets keep torch's order.
        may_inspect = self._is_static and self._hook is not None and not self._hook.averages
        rebuilds = not options.get("find_unused_parameters", False)
        self._is_reversed = is_known and rebuilds and not may_inspect
        super().__init__(module, **options)
        self._prepare_reducer()
        if self._is_reversed and options.get("init_sync", True) and hasattr(self, "reducer"):
            # Done here, because torch would do it in the first forward, which may run on one rank.
            self._has_rebuilt_buckets = self.reducer._rebuild_buckets()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        # Hidden, because torch's __setstate__ would set the static graph at once: too early.
        return {**state, "static_graph": self.static_graph and not self._is_static}

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare_reducer()

    def _build_params_for_reducer(self) -> Any:
        parameters, are_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self._is_reversed:
            return parameters[::-1], are_sparse[::-1]
        return parameters, are_sparse

    def _prepare_reducer(self) -> None:
        # torch creates no reducer if `delay_all_reduce_named_params` has all parameters.
        if self._is_reversed and hasattr(self, "reducer"):
            # torch rebuilds the buckets in the order that this call records.
            self.reducer._push_all_rebuilt_params()
        self._waits_for_sync = self._is_static
        if self._is_static:
            self.static_graph = True
            self._static_graph_delay_allreduce_enqueued = True

    def _record_graph(self) -> None:
        """Start to record a static graph if the next backward averages gradients.

        Batches under ``no_sync`` are not recorded: torch cannot record them, and averaging their
        gradients before the end of the window would change the sums.
        """
        if self._waits_for_sync and self.require_backward_grad_sync and torch.is_grad_enabled():
            self._waits_for_sync = False
            # torch ignores the call if the attribute is set.
            self.static_graph = False
            self._set_static_graph()  # type: ignore[no-untyped-call]


def _has_names() -> bool:
    """Return whether torch has the private names used here; warn if it does not."""
    missing = [name for owner, name in _USED if not hasattr(owner, name)]
    if missing:
        warnings.warn(
            f"torch {torch.__version__} has no {', '.join(missing)}, so on three or more ranks a "
            f"resumed run may differ from an uninterrupted one by rounding: use torch {CHECKED}, "
            "or set find_unused_parameters",
            stacklevel=4,
        )
    return not missing
