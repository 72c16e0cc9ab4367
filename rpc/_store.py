"""The store in which the members of a world meet: whose it is, and where it listens."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from datetime import timedelta
from urllib.parse import urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from .errors import RpcError

_DEFAULT_PLACE = "tcp://localhost:9100"
_CLOSED = "closed"
_RETRY_S = 0.05


class MeetingPlace:
    """A store of this world alone.

    Attributes:
        store: where the members write.
        is_local: whether all connections stay on this machine's loopback interface.
    """

    def __init__(self, store: Store, *, is_local: bool, server: Store | None = None) -> None:
        self.store = store
        self.is_local = is_local
        # torch keeps what it is given for as long as the process lives, so it never gets this one,
        # with which the port is freed.
        self._server = server

    def close(self) -> None:
        """Tell those who come for the next world that this one is over."""
        if self._server is not None:
            self.store.set(_CLOSED, "1")


def open_place(
    init_method: str | None, rank: int, world_size: int, timeout_s: float
) -> MeetingPlace:
    """Return the store of a new world.

    It is kept by the default process group, where there is one, by torchrun's, or by rank 0 at the
    address of `init_method`; there it listens on that address alone.

    Raises:
        ValueError: an address that is none of tcp://host:port, env:// and file:///path.
        RpcError: rank 0 is not there, or something else is.
    """
    if dist.is_initialized() and init_method is None:
        return _shared(dist.distributed_c10d._get_default_store(), rank)
    url = init_method or ("env://" if os.environ.get("MASTER_ADDR") else _DEFAULT_PLACE)
    parsed = urlparse(url)
    if parsed.scheme == "file" and parsed.path:
        return _shared(FileStore(parsed.path, world_size), rank)
    if parsed.scheme == "env":
        host, port = _environment_place()
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return _shared(_connect(host, port, timeout_s), rank, is_local=_is_loopback(host))
    elif parsed.scheme == "tcp" and parsed.hostname and parsed.port:
        host, port = parsed.hostname, parsed.port
    else:
        raise ValueError(
            f"dist_init_method must be tcp://host:port, env:// or file:///path, got {url!r}"
        )
    server = _listen(host, port, timeout_s) if rank == 0 else None
    store = _join(host, port, timeout_s)
    return MeetingPlace(store, is_local=_is_loopback(host), server=server)


def _shared(store: Store, rank: int, is_local: bool | None = None) -> MeetingPlace:
    """Return this world's part of a store that outlives it.

    Every rank counts the worlds for itself: the n-th of each of them are one.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"stepwrap/world/{attempt}", store)
    count = own.add(f"rank_{rank}", 1)
    if is_local is None:
        is_local = "MASTER_ADDR" not in os.environ or _is_loopback(os.environ["MASTER_ADDR"])
    return MeetingPlace(PrefixStore(str(count), own), is_local=is_local)


def _environment_place() -> tuple[str, int]:
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except KeyError as error:
        raise ValueError(
            f"env:// needs MASTER_ADDR and MASTER_PORT; {error.args[0]} is not set"
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(one.split("%")[0]).is_loopback for one in addresses)


def _listen(host: str, port: int, timeout_s: float) -> Store:
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise RpcError(
            f"rank 0 cannot listen at {host}:{port}: {error.strerror}; give another "
            "dist_init_method"
        ) from error
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        # Listening by itself, torch's store would do so on all interfaces.
        master_listen_fd=listener.detach(),
    )


def _family(host: str) -> socket.AddressFamily:
    # As torch's client looks it up, so that both take the same address of several.
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _connect(host: str, port: int, timeout_s: float) -> Store:
    try:
        return TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(timeout_s, 1.0)),
        )
    except RuntimeError as error:
        raise RpcError(f"what listens at {host}:{port} is not the store of rank 0") from error


def _wait_for_listener(host: str, port: int, deadline: float, timeout_s: float) -> None:
    """Wait until somebody listens; torch's client would do so with a page of stack frames."""
    while True:
        try:
            socket.create_connection((host, port), timeout=max(timeout_s, 1.0)).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RpcError(
                    f"rank 0 has not opened the world at {host}:{port} within {timeout_s:g} s"
                ) from error
        time.sleep(_RETRY_S)


def _join(host: str, port: int, timeout_s: float) -> Store:
    """Connect to the store of rank 0, not to the one of the world before, which is closing."""
    deadline = time.monotonic() + timeout_s
    while True:
        _wait_for_listener(host, port, deadline, timeout_s)
        store = _connect(host, port, timeout_s)
        if not _is_closing(store):
            return store
        del store
        if time.monotonic() > deadline:
            raise RpcError(
                f"the world at {host}:{port} is closing, and rank 0 has opened no other within "
                f"{timeout_s:g} s"
            )
        time.sleep(_RETRY_S)


def _is_closing(store: Store) -> bool:
    try:
        return store.check([_CLOSED])
    except RuntimeError:
        # The connection broke: the store went while it was asked.
        return True
