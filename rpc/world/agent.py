"""Start, watch and end torch's RPC agent of this process."""

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
from ..calls.calls import SPARE_THREADS, call_async, limit_concurrent_calls
from ..calls.node import Node
from ..errors import RpcError

logger = logging.getLogger(__name__)

_SCHEME = "stepwrap-world"
_SHUTDOWN_S = 5.0
# The minimum time for the shutdown, which takes milliseconds if no call is running.
_LEAST_S = 0.5
_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")

_rank: int | None = None

# The last world that this process left through torch's graceful shutdown. torch counts these
# shutdowns in each process and uses the count in the store's keys, so another one only works if all
# members have the same count.
_last_joint_end = ""

# The thread that ends the last world's transport; it runs until all calls served here have ended.
_ending: threading.Thread | None = None

# The store for torch's next agent, which finds it through a rendezvous address.
_store: Store | None = None


class Agent:
    """The transport of one world."""

    def __init__(self, node: Node, rank: int, join_timeout_s: float) -> None:
        self._node = node
        self._rank = rank
        self._join_timeout_s = join_timeout_s
        self._world = ""
        self._share_last_end = False
        self._is_complete = False
        self._is_stopping = False
        self._watches: list[Future[None]] = []
        if _ending is not None:
            _ending.join(join_timeout_s)
            if _ending.is_alive():
                raise RpcError(
                    "a new world can only begin after this process has served all calls of the "
                    f"previous one, but one is still running after {join_timeout_s:g} s"
                )

    def start(
        self, store: Store, threads: int, device_maps: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Join the others; every member must call this."""
        limit_concurrent_calls(threads)
        if self._rank == 0:
            store.set("world", uuid.uuid4().hex)
        store.set(f"past_{self._rank}", _last_joint_end)
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=threads + SPARE_THREADS,
            # For the start only, which needs a limit even if the world's `rpc_timeout` is 0.
            rpc_timeout=self._join_timeout_s,
            init_method=f"{_SCHEME}://",
        )
        for peer, device_map in device_maps.items():
            options.set_device_map(peer, dict(device_map.items()))
        self._join(store, options)
        _set_rpc_timeout(self._node.rpc_timeout)
        self._world = store.get("world").decode()
        pasts = {store.get(f"past_{rank}") for rank in self._node.names}
        self._share_last_end = len(pasts) == 1
        if self._node.directory is not None:
            self._watch()

    def _join(self, store: Store, options: rpc.TensorPipeRpcBackendOptions) -> None:
        global _store, _rank
        # torch keeps the rank for the life of the process, even if the start fails.
        _rank = self._rank
        _node.set_current(self._node)
        _store = PrefixStore("rpc", store)
        store_timeout: timedelta = store.timeout  # type: ignore[attr-defined]
        group_timeout = constants.DEFAULT_PROCESS_GROUP_TIMEOUT
        # By default torch would wait for weeks for a member that has died meanwhile.
        constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=self._join_timeout_s)
        # torch puts a count of the process's worlds into its keys. Reset it, because the other
        # members may have had more or fewer worlds.
        rpc._init_counter = 0
        try:
            with warnings.catch_warnings():
                # torch itself causes this warning by using a gloo backend as a group.
                warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
                rpc.init_rpc(  # type: ignore[no-untyped-call]
                    self._node.name,
                    rank=self._rank,
                    world_size=len(self._node.names),
                    rpc_backend_options=options,
                )
        finally:
            _store = None
            # Otherwise torch would keep the store, and so the port, until the next world.
            rpc.rendezvous_iterator = None  # type: ignore[assignment]
            constants.DEFAULT_PROCESS_GROUP_TIMEOUT = group_timeout
            # Restore the timeout, because the store may belong to the default process group.
            store.set_timeout(store_timeout)

    def leave(self, timeout_s: float) -> None:
        """Wait for the others to leave too; every living member must call this."""
        deadline = time.monotonic() + timeout_s
        members = self._node.members
        gone = self._node.meet(("end",), members, "World.stop()", timeout_s, needs_all=False).gone
        self._is_stopping = True
        if gone:
            logger.warning("%s died before the world was stopped", ", ".join(map(repr, gone)))
        self._node.has_left.set_result(None)
        while any(not watch.done() for watch in self._watches) and time.monotonic() < deadline:
            time.sleep(0.001)
        self._is_complete = not gone and all(watch.done() for watch in self._watches)

    def stop(self, timeout_s: float) -> None:
        """End the transport; call ``leave`` first so that no call is lost.

        Calls that are still running here after ``timeout_s`` continue in the background.
        """
        global _ending
        self._is_stopping = True
        # In a thread, because torch waits for running functions, which cannot be interrupted.
        _ending = threading.Thread(
            target=self._end, args=(timeout_s,), name="stepwrap-rpc-end", daemon=True
        )
        _ending.start()
        try:
            _ending.join(max(timeout_s, _LEAST_S))
            if _ending.is_alive():
                logger.warning("%r has left the world, but still serves calls", self._node.name)
        finally:
            # Break the reference cycle between this object and the futures' callbacks, because
            # garbage collection cannot see it.
            self._watches.clear()
            _node.set_current(None)

    def _end(self, timeout_s: float) -> None:
        global _last_joint_end
        is_together = self._is_complete and self._share_last_end and timeout_s > _LEAST_S
        try:
            try:
                if is_together:
                    _shut_down_together(min(_SHUTDOWN_S, timeout_s / 2))
            finally:
                rpc.shutdown(graceful=False)
            _last_joint_end = self._world if is_together else _last_joint_end
        except RuntimeError as error:
            # A member has just died, or the agent never started.
            logger.debug("the transport ended with %s", error)
            _last_joint_end = uuid.uuid4().hex if is_together else _last_joint_end

    def _watch(self) -> None:
        """Send each member a call that is answered when it leaves and fails if it dies."""
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
                self._node.directory.mark_dead(name)


def _shut_down_together(grace_s: float) -> None:
    """Shut down torch's agents together, so that none warns that another one is gone."""
    agent: Any = rpc.api._get_current_rpc_agent()  # type: ignore[attr-defined]
    # torch waits forever for calls that are never answered; the timer aborts them.
    breaker = threading.Timer(grace_s, agent.shutdown)
    breaker.daemon = True
    breaker.start()
    try:
        agent.join(shutdown=True, timeout=grace_s)
    finally:
        breaker.cancel()
        # Wait for the timer, because one of two concurrent shutdowns would never return.
        breaker.join()


def check_rank(rank: int) -> None:
    if _rank is not None and _rank != rank:
        raise ValueError(
            f"rank must be {_rank}, as in the first world of this process, got {rank}: torch's RPC "
            "keeps the rank for the life of a process"
        )


@contextlib.contextmanager
def listen_on_loopback(is_local: bool) -> Iterator[None]:
    """Use the interface that the user has set, or the loopback interface if ``is_local``.

    Gloo and TensorPipe each have a variable for it. If the user has set only one, both use it.
    """
    missing = [name for name in _INTERFACES if name not in os.environ]
    configured = next((os.environ[name] for name in _INTERFACES if name in os.environ), None)
    interface = configured or ("lo" if is_local and sys.platform == "linux" else None)
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
        raise RuntimeError(f"{url} must only be used by World")
    yield _store, int(options.get("rank", -1)), int(options.get("world_size", -1))


register_rendezvous_handler(_SCHEME, _own_store)  # type: ignore[no-untyped-call]
