"""Tell URLs from paths of this machine; does not import torch."""

from __future__ import annotations

import os
import re
from hashlib import sha256
from pathlib import Path

# Path replaces the two slashes of a URL by one. Drives of Windows have one letter.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")


def remote_url(path: str | os.PathLike[str]) -> str:
    """Return the URL of a remote file or folder, without a final slash; "" for a local path.

    A ``file://`` URL is a local path.
    """
    text = os.fspath(path)
    match = _URL.match(text)
    if match is None or match[1].lower() == "file":
        return ""
    return f"{match[1].lower()}://{text[match.end() :].rstrip('/')}"


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path on this machine: of a remote run folder, its working folder in the cache."""
    if url := remote_url(path):
        digest = sha256(url.encode()).hexdigest()[:12]
        return cache_folder() / "runs" / digest / (url.rpartition("/")[2].strip(".") or "run")
    text = os.fspath(path)
    match = _URL.match(text)
    return Path(path if match is None else f"/{text[match.end() :]}")


def cache_folder() -> Path:
    """Return the folder for working folders and copies of remote files: ``STEPWRAP_CACHE``."""
    return Path(os.environ.get("STEPWRAP_CACHE") or "~/.cache/stepwrap").expanduser().absolute()


def url_problem(path: str | os.PathLike[str]) -> str:
    """Return why ``path`` cannot be used if it is a URL, otherwise ""."""
    if url := remote_url(path):
        remedy = "copy the files to or from there with another program, or mount the remote folder"
        return f"must be a path on this machine, got the URL {url}: {remedy}"
    if (local := local_path(path)) != Path(path):
        return f"must be a path on this machine, got the URL {os.fspath(path)}: write {local}"
    return ""


def require_local(path: str | os.PathLike[str], name: str) -> None:
    """Raise ValueError if ``path`` is a URL, since a local folder of that name would be created.

    Args:
        path: the path of a file or folder.
        name: the argument or setting, for the message.
    """
    if problem := url_problem(path):
        raise ValueError(f"{name} {problem}")
