"""Compile `pretend_guard.cpp` once for each release of torch; imported before torch.

As a program, print whether pretend devices can be used here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER / "pretend_guard.cpp"
CACHE = FOLDER.parents[1] / "build" / "pretend"
# Releases of torch with which the pretend devices have been tried.
TESTED = ("2.13",)


class UnavailableError(RuntimeError):
    """Pretend devices cannot be used here; the text is the reason."""


@functools.cache
def torch_folder() -> Path:
    specification = importlib.util.find_spec("torch")
    assert specification is not None
    assert specification.origin is not None
    return Path(specification.origin).parent


def find_reason() -> str | None:
    """Return why pretend devices cannot be used here, or None."""
    release = importlib.metadata.version("torch")
    if not release.startswith(tuple(f"{tested}." for tested in TESTED)):
        return f"pretend devices were tested with torch {', '.join(TESTED)}, this is {release}"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "pretend devices need a build of torch without CUDA"
    if not sys.platform.startswith("linux"):
        return "pretend devices need Linux"
    if shutil.which("g++") is None:
        return "pretend devices need a C++ compiler (g++)"
    return None


def build_guard() -> Path:
    """Return the compiled library, which is built at the first call.

    Raises:
        UnavailableError: it cannot work here, or the compiler failed.
    """
    reason = find_reason()
    if reason is not None:
        raise UnavailableError(reason)
    release = importlib.metadata.version("torch")
    digest = hashlib.sha256(SOURCE.read_bytes() + release.encode()).hexdigest()[:16]
    library = CACHE / f"guard_{release}_{digest}.so"
    if not library.exists():
        _compile(library)
    return library


def _compile(library: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    # Several processes may build at once; each renames its own file.
    draft = library.with_suffix(f".{os.getpid()}.so")
    command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", "-w"]
    command += [f"-I{torch_folder() / 'include'}", str(SOURCE), "-o", str(draft)]
    command += [f"-L{torch_folder() / 'lib'}", "-lc10", "-ltorch_cpu"]
    compiler = subprocess.run(command, capture_output=True, text=True)
    if compiler.returncode != 0:
        raise UnavailableError(f"the compiler failed: {compiler.stderr[-2000:]}")
    draft.replace(library)


if __name__ == "__main__":
    try:
        print(f"pretend devices: {build_guard()}")
    except UnavailableError as error:
        print(error)
