"""Refuse URLs where a file or folder of this machine is required; does not import torch."""

from __future__ import annotations

import os
import re

# Path replaces the two slashes of a URL by one. Drives of Windows have one letter.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def url_problem(path: str | os.PathLike[str]) -> str:
    """Return why ``path`` cannot be used if it is a URL, otherwise ""."""
    text = os.fspath(path)
    match = _URL.match(text)
    if match is None:
        return ""
    start, location = match[0], text[match.end() :].lstrip("/")
    url = text if text.startswith(f"{start}/") else f"{start}/{location}"
    remedy = "copy the files to or from there with another program, or mount the remote folder"
    if match[1].lower() == "file":
        remedy = f"write /{location}"
    return f"must be a path on this machine, got the URL {url}: {remedy}"


def require_local(path: str | os.PathLike[str], name: str) -> None:
    """Raise ValueError if ``path`` is a URL, since a local folder of that name would be created.

    Args:
        path: the path of a file or folder.
        name: the argument or setting, for the message.
    """
    if problem := url_problem(path):
        raise ValueError(f"{name} {problem}")
