"""Write the output of a command to a local file, and upload it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from ...collectives import get_rank
from ...registry.local_paths import cache_folder, local_path, remote_url
from .stores import RemoteError, Store


@contextmanager
def uploaded(out: str, *, replace: bool = False) -> Iterator[Path]:
    """Yield the path to write; at the end of the block it is uploaded to ``out``.

    Every rank of a launcher must enter; rank 0 uploads. If ``out`` is a path on this machine, that
    path is yielded, and nothing else happens.

    Args:
        out: the URL or path of a new file or folder.
        replace: whether a file at the URL may be replaced.

    Raises:
        FileExistsError: a file at the URL exists.
        RemoteError: the URL cannot be written, or the upload failed.
    """
    url = remote_url(out)
    if not url:
        yield local_path(out)
        return
    parent, _, name = url.rpartition("/")
    store = Store(parent)
    folder = cache_folder() / "outputs" / sha256(url.encode()).hexdigest()[:12]
    if get_rank() == 0:
        store.require_writable()
        if not replace and (store.identity(name) or store.sizes(name)):
            raise FileExistsError(f"{url} exists: remove it, or choose another name")
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    yield folder / name
    if get_rank() == 0:
        _upload(store, folder, folder / name)


def _upload(store: Store, folder: Path, out: Path) -> None:
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    try:
        for file in sorted(files):
            store.upload(file, file.relative_to(folder).as_posix())
    except RemoteError as error:
        raise RemoteError(f"{error}; the complete output is in {out}") from error
    shutil.rmtree(folder)
