"""torch's RPC agent of this process: started at our store, watched, and ended without a trace."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import _set_rpc_timeout
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rpc import constants
from torch.futures import Future

from ..calls import node as _node
from ..calls.calls import SPARE_THREADS, call_async, serve_at_once
from ..calls.node import Node
from ..errors import RpcError

logger = logging.getLogger(__name__)

_SCHEME = "stepwrap-world"
_SHUTDOWN_S = 5.0
# What is always left for the end itself, which takes milliseconds where nothing runs any more.
_LEAST_S = 0.5
_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")

_rank: int | None = None

# The last world that this process has left by torch's own meeting, which numbers its keys by a
# counter of the process: it works among processes that have had the same such meetings.
_past = ""

# The end of the last world's transport, which goes on while a call is served here.
_ending: threading.Thread | None = None

# The store for torch's next agent: it asks by an address, we have it already.
_store: Store | None = None


class Agent:
    """The transport of one world."""

    def __init__(self, node: Node, rank: int, join_timeout_s: float) -> None:
        self._node = node
        self._rank = rank
        self._join_timeout_s = join_timeout_s
        self._world = ""
        self._have_one_past = False
        self._is_complete = False
        self._is_stopping = False
        self._watches: list[Future[None]] = []
        if _ending is not None:
            _ending.join(join_timeout_s)
            if _ending.is_alive():
                raise RpcError(
                    "a call of the world before is still being served here after "
                    f"{join_timeout_s:g} s: there can be no other world before it returns"
                )

    def start(
        self, store: Store, threads: int, device_maps: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Join the others; every member must call this."""
        serve_at_once(threads)
        if self._rank == 0:
            store.set("world", uuid.uuid4().hex)
        store.set(f"past_{self._rank}", _past)
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=threads + SPARE_THREADS,
            # Of the meeting; that of calls, which may be 0, comes after it.
            rpc_timeout=self._join_timeout_s,
            init_method=f"{_SCHEME}://",
        )
        for peer, device_map in device_maps.items():
            options.set_device_map(peer, dict(device_map.items()))
        self._join(store, options)
        _set_rpc_timeout(self._node.rpc_timeout)
        self._world = store.get("world").decode()
        pasts = {store.get(f"past_{rank}") for rank in self._node.names}
        self._have_one_past = len(pasts) == 1
        if self._node.directory is not None:
            self._watch()

    def _join(self, store: Store, options: rpc.TensorPipeRpcBackendOptions) -> None:
        global _store, _rank
        # As soon as it is told a rank, torch keeps it, whatever becomes of the rest.
        _rank = self._rank
        _node.set_current(self._node)
        _store = PrefixStore("rpc", store)
        store_timeout: timedelta = store.timeout  # type: ignore[attr-defined]
        group_timeout = constants.DEFAULT_PROCESS_GROUP_TIMEOUT
        # torch would wait for weeks for a member that has died since the meeting.
        constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=self._join_timeout_s)
        # torch numbers the worlds of a process in its keys; others may have had fewer.
        rpc._init_counter = 0
        try:
            with warnings.catch_warnings():
                # torch's own use of a gloo backend as a group.
                warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
                rpc.init_rpc(  # type: ignore[no-untyped-call]
                    self._node.name,
                    rank=self._rank,
                    world_size=len(self._node.names),
                    rpc_backend_options=options,
                )
        finally:
            _store = None
            # It would keep the store, and with it the port, until the next world.
            rpc.rendezvous_iterator = None  # type: ignore[assignment]
            constants.DEFAULT_PROCESS_GROUP_TIMEOUT = group_timeout
            # It may be the one of the default process group.
            store.set_timeout(store_timeout)

    def part(self, timeout_s: float) -> None:
        """Meet the others for the end; every living member must call this."""
        deadline = time.monotonic() + timeout_s
        end, members = "end of the world", self._node.members
        gone = self._node.meet(("end",), members, end, timeout_s, is_whole=False).gone
        self._is_stopping = True
        if gone:
            logger.warning("%s ended before the world did", ", ".join(map(repr, gone)))
        self._node.left.set_result(None)
        while any(not one.done() for one in self._watches) and time.monotonic() < deadline:
            time.sleep(0.001)
        self._is_complete = not gone and all(one.done() for one in self._watches)

    def stop(self, timeout_s: float) -> None:
        """End the transport; after `part` nothing is lost by that.

        Calls that are still served here after `timeout_s` go on by themselves.
        """
        global _ending
        self._is_stopping = True
        # torch waits for the functions that it runs, and nothing can end those.
        _ending = threading.Thread(
            target=self._end, args=(timeout_s,), name="stepwrap-rpc-end", daemon=True
        )
        _ending.start()
        try:
            _ending.join(max(timeout_s, _LEAST_S))
            if _ending.is_alive():
                logger.warning("%r has stopped while calls were still under way", self._node.name)
        finally:
            # A future that refers to us by its callback is no garbage that Python could find.
            self._watches.clear()
            _node.set_current(None)

    def _end(self, timeout_s: float) -> None:
        global _past
        is_together = self._is_complete and self._have_one_past and timeout_s > _LEAST_S
        try:
            try:
                if is_together:
                    _part_quietly(min(_SHUTDOWN_S, timeout_s / 2))
            finally:
                rpc.shutdown(graceful=False)
            _past = self._world if is_together else _past
        except RuntimeError as error:
            # A member that died just now, or an agent that has never come up.
            logger.debug("the transport ended with %s", error)
            _past = uuid.uuid4().hex if is_together else _past

    def _watch(self) -> None:
        """Have one call at every member that is answered when it leaves and breaks if it dies."""
        for name in self._node.members:
            if name != self._node.name:
                watch = call_async(name, _node.wait_for_leave, timeout=0)
                watch.add_done_callback(partial(self._note_end, name))
                self._watches.append(watch)

    def _note_end(self, name: str, done: Future[None]) -> None:
        try:
            done.wait()
        except RuntimeError:
            if not self._is_stopping:
                logger.warning("%r has ended without leaving the world", name)
                assert self._node.directory is not None
                self._node.directory.note_gone(name)


def _part_quietly(grace_s: float) -> None:
    """Have torch's agents meet for the end, so that none warns that another one has gone."""
    agent: Any = rpc.api._get_current_rpc_agent()  # type: ignore[attr-defined]
    # torch waits without end for calls that are never answered; this breaks them.
    breaker = threading.Timer(grace_s, agent.shutdown)
    breaker.daemon = True
    breaker.start()
    try:
        agent.join(shutdown=True, timeout=grace_s)
    finally:
        breaker.cancel()
        # Two shutdowns at once would wait for one event, which wakes one of them.
        breaker.join()


def check_rank(rank: int) -> None:
    if _rank is not None and _rank != rank:
        raise ValueError(
            f"this process was rank {_rank} in its first world and cannot be rank {rank} now: "
            "torch's RPC keeps the rank for the life of a process"
        )


@contextlib.contextmanager
def on_loopback(is_local: bool) -> Iterator[None]:
    """Have connections listen on the loopback interface alone, unless the user says otherwise."""
    missing = [name for name in _INTERFACES if name not in os.environ]
    given = next((os.environ[name] for name in _INTERFACES if name in os.environ), None)
    interface = given or ("lo" if is_local and sys.platform == "linux" else None)
    if interface is not None:
        os.environ.update(dict.fromkeys(missing, interface))
    try:
        yield
    finally:
        if interface is not None:
            for name in missing:
                os.environ.pop(name, None)


def _own_store(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
    if _store is None:
        raise RuntimeError(f"{url} is an address for worlds alone")
    yield _store, int(options.get("rank", -1)), int(options.get("world_size", -1))


register_rendezvous_handler(_SCHEME, _own_store)  # type: ignore[no-untyped-call]
