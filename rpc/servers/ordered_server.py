"""A key-value store whose values have versions: each push names the one that it replaces."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

from ..calls.group import RpcGroup


class OrderedServerBase(ABC):
    """What clients of an ordered server call; override both methods.

    Versions may be anything that can be compared for equality and hashed. `version` equal to
    `prev_version` is allowed, and says nothing about order.
    """

    @abstractmethod
    def push(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        """Offer `value` as the successor of `prev_version`; False if another one was faster."""

    @abstractmethod
    def pull(self, key: Hashable, version: Any = None) -> tuple[Any, Any] | None:
        """Return value and version, the newest by default; None where there is no such."""


class OrderedServerSimple(OrderedServerBase):
    """Calls the server of that name, from any member; can be sent to other members.

    Args:
        server_name: as given to `OrderedServerSimpleImpl`.
        group: where that is.
    """

    def __init__(self, server_name: str, group: RpcGroup) -> None:
        self.server_name = server_name
        self.group = group

    def push(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        """Offer `value` as the successor of `prev_version`.

        Returns:
            Whether it is the newest now. It is, if `prev_version` was the newest, or if the key
            is new, whatever `prev_version` says. An older version that is still kept is refused.

        Raises:
            KeyError: there is no such server.
            RpcError: it is gone, or has not answered in time; the value may have arrived.
        """
        service = f"{self.server_name}/_push_service"
        accepted: bool = self.group.registered_sync(service, (key, value, version, prev_version))
        return accepted

    def pull(self, key: Hashable, version: Any = None) -> tuple[Any, Any] | None:
        """Return a copy of a value and its version; None if there is no such key or version.

        Args:
            key: any key.
            version: which one, None for the newest.

        Raises:
            KeyError: there is no such server.
            RpcError: it is gone, or has not answered in time.
        """
        service = f"{self.server_name}/_pull_service"
        found: tuple[Any, Any] | None = self.group.registered_sync(service, (key, version))
        return found


class OrderedServerSimpleImpl:
    """Keeps the last versions of each key, and takes only successors of the newest one.

    Lives in the process that makes it until `close`. An `OrderedServerSimple` that calls it is
    paired under its name: `group.get_paired(server_name).to_here()`.

    Args:
        server_name: unique in the group.
        group: this process must be a member.
        version_depth: how many versions are kept behind the newest one, so one more in all.

    Raises:
        AssertionError: this process is no member, or the depth is no positive integer.
        KeyError: the group has a server of that name.
    """

    def __init__(self, server_name: str, group: RpcGroup, version_depth: int = 1, **_: Any) -> None:
        assert version_depth > 0, "version_depth must be positive"
        assert isinstance(version_depth, int), "version_depth must be an integer"
        assert group.is_member(), "an ordered server needs a group that its process belongs to"
        self.server_name = server_name
        self.group = group
        self.version_depth = version_depth
        # Of each key its versions, the newest last. Values are never changed, so nothing is copied.
        self._versions: dict[Hashable, dict[Any, Any]] = {}
        # Held for a few dictionary operations.
        self._lock = threading.RLock()
        with contextlib.ExitStack() as undo:
            # The accessor last: who finds it may call at once.
            for name, service in self._services().items():
                offer(undo, group, "service", f"{server_name}/{name}", service)
            offer(undo, group, "value", server_name, self._accessor())
            self._offers = undo.pop_all()

    def close(self) -> None:
        """Withdraw the server and forget its values; may be called again."""
        self._offers.close()
        self._versions.clear()

    def _services(self) -> dict[str, Callable[..., Any]]:
        return {"_push_service": self._push_service, "_pull_service": self._pull_service}

    def _accessor(self) -> OrderedServerSimple:
        return OrderedServerSimple(self.server_name, self.group)

    def _push_service(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        # What is replaced or dropped may be large: it is freed after the lock.
        freed = []
        with self._lock:
            versions = self._versions.setdefault(key, {})
            if versions:
                newest = next(reversed(versions))
                if prev_version != newest or (version in versions and version != newest):
                    return False
                freed.append(versions.get(version))
            versions[version] = value
            if len(versions) > self.version_depth + 1:
                freed.append(versions.pop(next(iter(versions))))
        return True

    def _pull_service(self, key: Hashable, version: Any = None) -> tuple[Any, Any] | None:
        with self._lock:
            versions = self._versions.get(key)
            if not versions:
                return None
            wanted = next(reversed(versions)) if version is None else version
            return (versions[wanted], wanted) if wanted in versions else None


def offer(
    undo: contextlib.ExitStack, group: RpcGroup, kind: str, key: Hashable, offered: Any
) -> None:
    """Offer a value or service under `key`, until `undo` is closed.

    Raises:
        KeyError: the key is taken.
    """
    (group.pair if kind == "value" else group.register)(key, offered)

    def withdraw() -> None:
        # A destroyed group and an ended world have withdrawn it already.
        with contextlib.suppress(KeyError, RuntimeError):
            (group.unpair if kind == "value" else group.deregister)(key)

    undo.callback(withdraw)
