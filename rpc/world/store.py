"""Find the rank of this process, and the store through which the members of a world meet."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import TypeAlias
from urllib.parse import urlparse

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from ...collectives import all_on_one_host, is_loopback, open_store
from ..errors import RpcError

logger = logging.getLogger(__name__)

_DEFAULT_PLACE = "tcp://localhost:9100"
_RETRY_S = 0.05


def resolve_rank(rank: int, world_size: int) -> tuple[int, int]:
    """Return rank and world size; -1 is replaced by the process group's or the launcher's value."""
    rank, world_size = whole_number("rank", rank), whole_number("world_size", world_size)
    if dist.is_initialized():
        actual = [dist.get_rank(), dist.get_world_size()]
    else:
        actual = [
            whole_number(variable, os.environ.get(variable) or "-1")
            for variable in ("RANK", "WORLD_SIZE")
        ]
    rank = actual[0] if rank == -1 else rank
    world_size = actual[1] if world_size == -1 else world_size
    if rank == -1 or world_size == -1:
        raise ValueError(
            "rank and world_size must be given unless a launcher has set RANK and WORLD_SIZE, got "
            f"rank={rank}, world_size={world_size}"
        )
    if dist.is_initialized() and [rank, world_size] != actual:
        raise ValueError(
            f"this process is rank {actual[0]} of {actual[1]} in its process group, got "
            f"rank={rank}, world_size={world_size}"
        )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")
    return rank, world_size


def whole_number(setting: str, value: object) -> int:
    """Return a setting as an integer; if its name is in capitals, ``value`` may be text."""
    if isinstance(value, str) and setting.isupper():
        try:
            return int(value)
        except ValueError:
            pass
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{setting} must be a whole number, got {value!r}")


class OwnPlace:
    """An address at which rank 0 opens a store for one world."""

    outlives_world = False
    is_assumed_local = False

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        # Set by `enter`.
        self.store: Store
        # The address for error texts.
        self.where = f"{host}:{port}"
        # Whether all connections stay on this machine's loopback interface.
        self.is_local = is_loopback(host)
        self._address = host, port
        self._timeout_s = timeout_s
        # This store only listens. torch gets a client of it and keeps that until the process ends,
        # so the port is free as soon as this object is deleted.
        self._server: Store | None = None

    def enter(self, rank: int, deadline: float) -> bool:
        """Open a world as rank 0; otherwise connect to the open one."""
        if rank == 0:
            try:
                timeout = timedelta(seconds=self._timeout_s)
                self._server = open_store(*self._address, wait_for_workers=False, timeout=timeout)
            except OSError as error:
                raise RpcError(
                    f"rank 0 cannot listen at {self.where}: {error.strerror}; give another "
                    "dist_init_method"
                ) from error
        self._wait_for_listener(deadline)
        self.store = _connect(*self._address, self._timeout_s)
        return True

    def is_current(self) -> bool:
        """Return True: another world cannot be opened, because it would need the same port."""
        return True

    def _wait_for_listener(self, deadline: float) -> None:
        """Wait until rank 0 listens, because torch's client would log long stack traces."""
        while True:
            try:
                socket.create_connection(self._address, timeout=max(self._timeout_s, 1.0)).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RpcError(
                        f"rank 0 has not opened the world at {self.where} within "
                        f"{self._timeout_s:g} s: {error.strerror or error}"
                    ) from error
            time.sleep(_RETRY_S)


class SharedPlace:
    """A store that outlives its worlds; its key ``open`` identifies the newest one."""

    outlives_world = True

    def __init__(self, store: Store, where: str) -> None:
        self.store: Store
        self.where = where
        self.is_local = _is_store_local(store)
        # The hosts of the members are unknown: several hosts may share the file's folder.
        is_file = isinstance(_innermost(store), FileStore)
        self.is_assumed_local = is_file and self.is_local and not all_on_one_host()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._worlds = PrefixStore(f"stepwrap/world/{attempt}", store)
        self._open = b""

    def enter(self, rank: int, deadline: float) -> bool:
        """Open a world as rank 0, otherwise find the newest; return False if none opens in time."""
        if rank == 0:
            self._worlds.set("open", uuid.uuid4().hex)
        elif not wait_for_key(self._worlds, "open", deadline - time.monotonic()):
            return False
        self._open = self._worlds.get("open")
        self.store = PrefixStore(self._open.decode(), self._worlds)
        return True

    def is_current(self) -> bool:
        return bool(self._worlds.get("open") == self._open)


MeetingPlace: TypeAlias = OwnPlace | SharedPlace


def warn_of_open_store(meeting: MeetingPlace) -> None:
    """Log that others can use the store, once for each address, unless it is a file."""
    if isinstance(_innermost(meeting.store), TCPStore):
        _warn_of_open_store(meeting.where, meeting.is_local)


@functools.cache
def _warn_of_open_store(where: str, is_local: bool) -> None:
    network = "" if is_local else ", and everyone who can reach it over the network,"
    logger.warning(
        "the store of the world at %s has no password: every user of this machine%s can read and "
        "write it, and redirect the members. If you share the machine, meet in a folder that only "
        "you can access: dist_init_method='file:///PATH' (docs/rpc.md, Shared hosts)",
        *(where, network),
    )


def _is_store_local(store: Store) -> bool:
    """Return whether members that meet in this store connect over the loopback interface only."""
    store = _innermost(store)
    if isinstance(store, TCPStore):
        return is_loopback(store.host) or all_on_one_host()
    return all_on_one_host() or "MASTER_ADDR" not in os.environ


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _connect(host: str, port: int, timeout_s: float) -> Store:
    limit_s = max(timeout_s, 1.0)
    timeout = timedelta(seconds=limit_s)
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        try:
            # torch's error does not say why it could not connect.
            socket.create_connection((host, port), timeout=1.0).close()
        except OSError as reason:
            text = f"cannot connect to the store at {host}:{port} within {limit_s:g} s"
            raise RpcError(f"{text}: {reason.strerror or reason}") from error
        said = str(error).strip().partition("\n")[0]
        raise RpcError(f"the server at {host}:{port} is not a TCPStore: {said}") from error


def find_place(init_method: str | None, world_size: int, timeout_s: float) -> MeetingPlace:
    """Return the meeting place of a new world.

    Without ``init_method``, the default process group's store is used if there is one. Otherwise
    the default is env:// if MASTER_ADDR is set, and ``_DEFAULT_PLACE`` if not. With env://, the
    store may be torchrun's.
    """
    if dist.is_initialized() and init_method is None:
        store = dist.distributed_c10d._get_default_store()
        return SharedPlace(store, "the default process group")
    url = init_method or ("env://" if os.environ.get("MASTER_ADDR") else _DEFAULT_PLACE)
    parsed = urlparse(url)
    if parsed.scheme == "file" and parsed.path:
        folder = os.path.dirname(parsed.path)
        # torch would wait five minutes for it, without a check for signals.
        if not os.path.isdir(folder):
            raise ValueError(f"dist_init_method: the folder {folder} does not exist")
        return SharedPlace(FileStore(parsed.path, world_size), parsed.path)
    if parsed.scheme == "env":
        return _place_of_environment(timeout_s)
    with contextlib.suppress(ValueError):
        # An invalid port raises ValueError.
        if parsed.scheme == "tcp" and parsed.hostname and parsed.port:
            return OwnPlace(parsed.hostname, parsed.port, timeout_s)
    raise ValueError(
        f"dist_init_method must be tcp://host:port, env:// or file:///path, got {url!r}"
    )


def _place_of_environment(timeout_s: float) -> MeetingPlace:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ValueError(f"env:// needs MASTER_ADDR and MASTER_PORT; {name} is not set")
    host = os.environ["MASTER_ADDR"]
    port = whole_number("MASTER_PORT", os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return SharedPlace(_connect(host, port, timeout_s), f"{host}:{port}")
    if all_on_one_host() and not is_loopback(host):
        host = "127.0.0.1"
    return OwnPlace(host, port, timeout_s)


def wait_for_key(store: Store, key: str, timeout_s: float) -> bool:
    """Wait until ``key`` is set; return whether it was set in time."""
    # Poll, because torch's own wait logs every time-out and delays signal handlers.
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return True


@contextlib.contextmanager
def naming_store(meeting: MeetingPlace, failure: str) -> Iterator[None]:
    """Turn errors of the store into an RpcError that names it, and rank 0 if that keeps it."""
    try:
        yield
    except RpcError:
        raise
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        store = f"the store of the world at {meeting.where}"
        # A shared store is a file, or is kept by the launcher or the default process group.
        name = store if meeting.outlives_world else f"rank 0, which keeps {store},"
        raise RpcError(f"{failure}: {name} is gone or cannot be reached: {reason}") from error
