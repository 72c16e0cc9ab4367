"""Read and write remote objects through fsspec; lost connections are retried."""

from __future__ import annotations

import errno
import os
import re
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ...loops import CheckpointError
from ...loops.checkpoints.files import fingerprint
from ...primitives.files import replacing

T = TypeVar("T")
_CHUNK = 1 << 24

# Seconds between the attempts of a request. The clients of the stores repeat requests, too.
PAUSES_S = (2.0, 8.0)
# The package that opens the URLs of a protocol.
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    "hf": "huggingface_hub",
}
# Errors that another attempt would not change, by their names, because their packages are optional.
_FINAL = {
    *("FileExistsError", "FileNotFoundError", "IsADirectoryError", "NotADirectoryError"),
    *("PermissionError", "NotImplementedError", "ImportError", "TypeError", "ValueError"),
    *("NoCredentialsError", "PartialCredentialsError", "ParamValidationError"),
    *("DefaultCredentialsError", "GatedRepoError", "RepositoryNotFoundError"),
}


class RemoteError(RuntimeError):
    """A remote file cannot be read or written; the message names its URL and the cause."""


def store_problem(url: str) -> str:
    """Return why files at a URL cannot be opened on this machine, otherwise ""; sends nothing."""
    protocol, _, location = url.partition("://")
    if not location or {".", ".."} & set(location.split("/")):
        return f"must name a folder or file of a store, got {url}"
    package = _PACKAGES.get(protocol, "")
    install = f'pip install "stepwrap[remote]"{f" {package}" * (package not in ("", "s3fs"))}'
    try:
        import fsspec

        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        return f"{url} needs {package or 'fsspec'}, which is not installed: {install} ({error})"
    except ValueError:
        protocols = ", ".join(f"{name}://" for name in ("s3", "gs", "az", "hf", "file"))
        return f"{url} has the protocol {protocol}, which is unknown; stores are {protocols}"
    return ""


class Store:
    """The objects below a URL; their names are relative to it.

    Raises:
        RemoteError: the URL cannot be opened on this machine. Methods raise it if a request fails.
    """

    def __init__(self, url: str) -> None:
        if problem := store_problem(url):
            raise RemoteError(problem)
        self.url = url
        self._opened: tuple[int, Any, str] = (0, None, "")

    def read(self, name: str) -> bytes | None:
        """Return the content of an object; None if it does not exist."""

        def read(fs: Any, path: str) -> bytes | None:
            try:
                return bytes(fs.cat_file(path))
            except (FileNotFoundError, IsADirectoryError):
                return None

        return self._call(name, read)

    def write(self, name: str, content: bytes) -> None:
        """Write an object as a whole."""
        self._call(name, lambda fs, path: fs.pipe_file(path, content))

    def create(self, name: str, content: bytes) -> bool:
        """Write an object that must not exist yet; return False if it exists.

        Two callers may both get True: not all stores have such a request, and some ignore its
        condition.
        """

        def create(fs: Any, path: str) -> bool:
            try:
                fs.pipe_file(path, content, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, TypeError, ValueError):
                if fs.exists(path):
                    return False
                fs.pipe_file(path, content)
            return True

        return self._call(name, create)

    def upload(self, file: Path, name: str) -> None:
        """Upload a file, which must not change meanwhile."""
        self._call(name, lambda fs, path: fs.put_file(str(file), path))

    def download(self, name: str, file: Path, expected: dict[str, Any] | None = None) -> None:
        """Write an object to a file, which appears when it is complete.

        Args:
            name: the object.
            file: the new file.
            expected: its size and SHA-256.

        Raises:
            CheckpointError: the object is missing, or differs from ``expected``.
        """
        with replacing(file) as draft:
            try:
                self._call(name, lambda fs, path: _get(fs, path, draft, expected))
            except _DamageError as error:
                raise CheckpointError(f"{self.url}/{name}: {error}") from error

    def copy(self, source: str, name: str) -> None:
        """Copy an object on the side of the store."""
        source_path = f"{self._fs()[1]}/{source}"
        self._call(name, lambda fs, path: fs.cp_file(source_path, path))

    def delete(self, name: str) -> None:
        """Delete an object, unless it does not exist."""

        def delete(fs: Any, path: str) -> None:
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                return

        self._call(name, delete)

    def sizes(self, folder: str = "", depth: int | None = None) -> dict[str, int]:
        """Return the sizes of the objects below a folder, by name; a listing may be out of date.

        Hidden objects and names that could lead out of a local folder are left out.

        Args:
            folder: a part of the names.
            depth: 1 for the objects in the folder itself; None for all.
        """

        def find(fs: Any, path: str) -> dict[str, int]:
            start = len(self._opened[2].lstrip("/")) + 1
            every = fs.find(path, maxdepth=depth, detail=True)
            return {
                name.lstrip("/")[start:]: int(about["size"] or 0) for name, about in every.items()
            }

        return {name: size for name, size in self._call(folder, find).items() if _is_safe(name)}

    def identity(self, name: str) -> str:
        """Return a text that changes with the content of an object; "" if it does not exist."""

        def identity(fs: Any, path: str) -> str:
            try:
                about = fs.info(path)
            except FileNotFoundError:
                return ""
            is_file = about["type"] == "file"
            return sha256(str(about).encode()).hexdigest() if is_file else ""

        return self._call(name, identity)

    def age_s(self, name: str) -> float | None:
        """Return the seconds since an object was written, by the clock of the store.

        None if the object does not exist, or if the store keeps no times.
        """
        probe = f".stepwrap-{uuid.uuid4().hex[:8]}"
        self.write(probe, b"")
        try:
            now, then = self.modified_at(probe), self.modified_at(name)
        finally:
            self.delete(probe)
        return None if now is None or then is None else now - then

    def modified_at(self, name: str) -> float | None:
        """Return when an object was written, in seconds since 1970; None as for ``age_s``."""

        def modified(fs: Any, path: str) -> float | None:
            try:
                time = fs.modified(path)
            except (FileNotFoundError, NotImplementedError):
                return None
            return time.timestamp() if isinstance(time, datetime) else None

        return self._call(name, modified)

    def fingerprint(self, name: str) -> dict[str, Any]:
        """Return size and SHA-256 of an object, which is not stored; {} if it does not exist."""

        def read(fs: Any, path: str) -> dict[str, Any]:
            digest, size = sha256(), 0
            try:
                with fs.open(path, "rb") as file:
                    while chunk := file.read(_CHUNK):
                        digest.update(chunk)
                        size += len(chunk)
            except FileNotFoundError:
                return {}
            return {"size": size, "sha256": digest.hexdigest()}

        return self._call(name, read)

    def require_writable(self) -> None:
        """Write and delete a small object; raise RemoteError if that is impossible."""
        probe = f".stepwrap-{uuid.uuid4().hex[:8]}"
        self.write(probe, b"")
        self.delete(probe)

    def _fs(self) -> tuple[Any, str]:
        """Return the file system and the path of the URL in it.

        A forked process opens its own: threads and connections do not survive a fork. fsspec keeps
        file systems for the URLs of a store.
        """
        if self._opened[0] != os.getpid():
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(self.url, use_listings_cache=False, **_options(self.url))
            self._opened = (os.getpid(), fs, root.rstrip("/"))
        return self._opened[1:]

    def _call(self, name: str, action: Callable[[Any, str], T]) -> T:
        for pause_s in (*PAUSES_S, None):
            try:
                fs, root = self._fs()
                return action(fs, f"{root}/{name}" if name else root)
            except Exception as error:
                kinds = {kind.__name__ for kind in type(error).__mro__}
                if pause_s is None and isinstance(error, _DamageError):
                    raise
                if pause_s is None or not _FINAL.isdisjoint(kinds) or _is_local(error):
                    self._fail(name, error, kinds)
            time.sleep(pause_s)
        raise AssertionError

    def _fail(self, name: str, error: Exception, kinds: set[str]) -> NoReturn:
        url = f"{self.url}/{name}" if name else self.url
        remedy = "; check the network and the address of the store"
        if _is_local(error):
            remedy = ""
        elif "FileNotFoundError" in kinds:
            remedy = "; the bucket or container must exist"
        elif "NotImplementedError" in kinds:
            remedy = "; files in a store of this kind cannot be written or removed"
        elif any("Credentials" in kind or kind == "PermissionError" for kind in kinds):
            remedy = "; check the credentials and what they allow (docs/remote.md#credentials)"
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        raise RemoteError(f"{url}: {text}{remedy}") from error


def _options(url: str) -> dict[str, Any]:
    """Return options of the file system, in addition to those in fsspec's configuration."""
    protocol = url.partition(":")[0]
    if _PACKAGES.get(protocol) != "s3fs" or "AWS_MAX_ATTEMPTS" in os.environ:
        return {}
    from fsspec.config import conf

    # s3fs repeats requests, and so do we. With the attempts of botocore, which are inside of those
    # of s3fs, a failure would take minutes.
    configured = conf.get(protocol, {}).get("config_kwargs", {})
    return {"config_kwargs": {"retries": {"max_attempts": 0}, **configured}}


class _DamageError(Exception):
    """The content of an object is not the expected one."""


def _get(fs: Any, path: str, draft: Path, expected: dict[str, Any] | None) -> None:
    try:
        fs.get_file(path, str(draft))
    except FileNotFoundError as error:
        raise _DamageError("does not exist") from error
    # Another attempt may help: the transfer may have been cut.
    if expected is not None and fingerprint(draft) != expected:
        raise _DamageError("checksum mismatch")


def _is_local(error: Exception) -> bool:
    """Return whether an error is about a file of this machine, such as a full disk."""
    if not isinstance(error, OSError):
        return False
    return isinstance(error.filename, str) or error.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_safe(name: str) -> bool:
    return all(re.fullmatch(r"[^./\\\0][^/\\\0]*", word) for word in name.split("/"))
