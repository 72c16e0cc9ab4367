"""Download what a reader needs of remote runs and files, into copies in the cache."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from ...collectives import all_gather_object
from ...loops import CheckpointError, list_checkpoints
from ...loops.checkpoints.checkpoint import META
from ...loops.checkpoints.files import find_damage, fingerprint, own_rank, run_on_all_ranks
from ...primitives.files import locked, replacing
from ...registry.local_paths import cache_folder, local_path, remote_url
from ..rank_processes import host_identity
from .manifests import CHECKPOINTS, RemoteCheckpoints, data_files, local_manifests, read_checkpoints
from .stores import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Files of a run that are needed to build its model.
_SETTINGS = ("config.yaml", "origins.json")
# Folders of a run that reports do not read.
_NOT_REPORTED = {CHECKPOINTS, "ledger", "media", "profile", "tensorboard", "wandb"}


def local_copy(path: str | os.PathLike[str], of_run: str = "") -> Path:
    """Return a path on this machine; of a URL, a copy is made. Every rank must call this.

    Args:
        path: a path, or the URL of a run folder, a checkpoint, one of its files, a file of weights,
            or a folder of Hugging Face.
        of_run: the checkpoint that the copy of a run folder must have; as for ``run_copy``.

    Raises:
        CheckpointError: the URL cannot be read, or a file is damaged. Raised on every rank.
    """
    url = remote_url(path)
    if not url:
        return local_path(path)
    return _call_per_host(f"reading {url}", lambda: _copy(url, of_run))


def run_copy(
    run_dir: str | os.PathLike[str],
    which: str | os.PathLike[str] = "",
    *,
    before: int | None = None,
) -> Path:
    """Return a run folder on this machine; of a URL, a copy. Every rank must call this.

    The copy has the settings, the description of every checkpoint, and the files of one checkpoint.

    Args:
        run_dir: the run folder.
        which: the checkpoint: "best", "latest", a name, or "" for the best if there is one, else
            the latest. A damaged one is skipped unless it is given by name.
        before: take only checkpoints of earlier steps than this.

    Raises:
        CheckpointError: as for ``local_copy``.
    """
    url = remote_url(run_dir)
    if not url:
        return local_path(run_dir)
    return _call_per_host(f"reading {url}", lambda: _copy_run(Store(url), str(which), before))


def settings_copy(url: str) -> Path | None:
    """Return a copy of the config.yaml of a run; None if it does not exist."""
    store, folder = Store(url), _copy_folder(url)
    with _writing(folder):
        _copy_settings(store, folder)
    path = folder / _SETTINGS[0]
    return path if path.is_file() else None


def report_copy(path: str) -> Path:
    """Return a folder with the records and settings of the runs below a folder or URL."""
    url = remote_url(path)
    if not url:
        return local_path(path)
    store, folder = Store(url), _copy_folder(url)
    for name in store.sizes():
        folders = PurePosixPath(name).parts
        if _NOT_REPORTED.isdisjoint(folders) and name.endswith((".json", ".jsonl", ".yaml")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            store.download(name, folder / name)
    return folder


def manifest_copy(url: str) -> tuple[Path, RemoteCheckpoints]:
    """Return a copy of a run folder that has only the descriptions of its checkpoints."""
    store, folder = Store(url), _copy_folder(url)
    remote = read_checkpoints(store)
    with _writing(folder):
        _replace_manifests(folder, remote)
        for name in remote.texts:
            saved_at = store.modified_at(f"{CHECKPOINTS}/{name}/{META}")
            if saved_at is not None:
                os.utime(folder / CHECKPOINTS / name / META, (saved_at, saved_at))
    return folder, remote


def fetch(
    store: Store, folder: Path, which: str, *, before: int | None = None, spare: Path | None = None
) -> None:
    """Download the files of a checkpoint whose description is in ``folder``.

    Args:
        store: the run folder.
        folder: its folder on this machine.
        which: as for ``run_copy``.
        before: as for ``run_copy``.
        spare: another folder of the run, from which equal files are taken.
    """
    if which not in ("", "best", "latest"):
        if Path(which).name == which and (folder / CHECKPOINTS / which / META).is_file():
            complete(store, folder, which, spare)
        return
    checkpoints = [
        (path, meta)
        for path, meta in list_checkpoints(folder / CHECKPOINTS)
        if before is None or meta["step"] < before
    ]
    best = [(path, meta) for path, meta in checkpoints if meta["best"]]
    for path, _ in {"best": best, "latest": checkpoints, "": [*best, *checkpoints]}[which]:
        try:
            complete(store, folder, path.name, spare)
        except CheckpointError as error:
            logger.warning("%s; trying the one before it", error)
        else:
            return


def complete(store: Store, folder: Path, name: str, spare: Path | None = None) -> None:
    """Download the missing files of a checkpoint, and check the hashes of all.

    Raises:
        CheckpointError: a file is missing or damaged in the store.
    """
    _complete(store, f"{CHECKPOINTS}/{name}/", folder / CHECKPOINTS / name, spare)


def _complete(store: Store, prefix: str, path: Path, spare: Path | None = None) -> None:
    for file, expected in data_files(path).items():
        if not find_damage(path, {file: expected}):
            continue
        twin = None if spare is None else spare / prefix
        if twin is not None and not find_damage(twin, {file: expected}):
            with replacing(path / file) as draft:
                _link(twin / file, draft)
        else:
            store.download(f"{prefix}{file}", path / file, expected)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _copy_folder(url: str) -> Path:
    protocol, _, location = url.partition("://")
    return cache_folder().joinpath("copies", protocol, *filter(None, location.split("/")))


def _writing(folder: Path) -> Any:
    """Keep other readers on this machine from changing a copy meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    return locked(folder / ".copy.lock")


def _copy_run(store: Store, which: str, before: int | None = None) -> Path:
    folder = _copy_folder(store.url)
    with _writing(folder):
        _replace_manifests(folder, read_checkpoints(store))
        _copy_settings(store, folder)
        fetch(store, folder, which, before=before, spare=local_path(store.url))
    return folder


def _replace_manifests(folder: Path, remote: RemoteCheckpoints) -> None:
    for name, text in local_manifests(folder).items():
        if remote.texts.get(name) != text:
            shutil.rmtree(folder / CHECKPOINTS / name)
    write_manifests(folder, remote)


def write_manifests(folder: Path, remote: RemoteCheckpoints) -> None:
    """Write the descriptions of remote checkpoints that a run folder lacks."""
    (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    for name in remote.texts.keys() - local_manifests(folder).keys():
        write_manifest(folder / CHECKPOINTS / name, remote.texts[name])


def write_manifest(checkpoint: Path, text: bytes) -> None:
    """Write the checkpoint.json of a checkpoint, whose other files may follow."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    with replacing(checkpoint / META) as draft:
        draft.write_bytes(text)


def _copy_settings(store: Store, folder: Path) -> None:
    for name in _SETTINGS:
        if (content := store.read(name)) is None:
            (folder / name).unlink(missing_ok=True)
            continue
        with replacing(folder / name) as draft:
            draft.write_bytes(content)


def _copy(url: str, of_run: str) -> Path:
    parent, _, name = url.rpartition("/")
    store, path = Store(url), _copy_folder(url)
    if (text := store.read(META)) is not None:
        return _copy_checkpoint(store, path, text)
    if identity := store.identity(""):
        text = Store(parent).read(META)
        if text is not None:
            # Readers of this file need the description, and may need the other files.
            return _copy_checkpoint(Store(parent), path.parent, text) / name
        return _copy_file(Store(parent), name, path, identity)
    remote = read_checkpoints(store)
    if remote.texts:
        return _copy_run(store, of_run)
    files = list(store.sizes(depth=1))
    weights = [file for file in files if file.endswith(".safetensors")]
    weights = weights or [file for file in files if file.endswith(".bin")]
    if weights:
        for file in [*weights, *(file for file in files if file.endswith(".json"))]:
            _copy_file(store, file, path / file, store.identity(file))
        return path
    raise CheckpointError(
        f"{url} does not exist, or is neither a run folder with checkpoints, a checkpoint, nor "
        "weights"
    )


def _copy_checkpoint(store: Store, path: Path, text: bytes) -> Path:
    with _writing(path.parent):
        write_manifest(path, text)
        _complete(store, "", path)
        if path.parent.name == CHECKPOINTS:
            run = store.url.removesuffix(f"/{CHECKPOINTS}/{path.name}")
            _copy_settings(Store(run), path.parent.parent)
    return path


def _copy_file(store: Store, name: str, path: Path, identity: str) -> Path:
    """Download a file, unless the copy has been made of the same object and is intact."""
    record = path.with_name(f".{path.name}.origin")
    with _writing(path.parent):
        with suppress(OSError, ValueError):
            if json.loads(record.read_text()) == {"identity": identity, **fingerprint(path)}:
                return path
        store.download(name, path)
        record.write_text(json.dumps({"identity": identity, **fingerprint(path)}))
    return path


def _call_per_host(action: str, copy: Callable[[], T]) -> T:
    """Call a function on one rank of each host; return its result, or raise on every rank."""
    hosts = all_gather_object(host_identity())
    # The first rank of this one's host.
    leader = hosts.index(host_identity())
    results = run_on_all_ranks(action, lambda: copy() if own_rank() == leader else None)
    result = results[leader]
    assert result is not None
    return result
