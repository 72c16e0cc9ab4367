"""Read weights from checkpoints of stepwrap, state dicts, and safetensors files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ...collectives import broadcast, run_together
from ...loops import CheckpointError, load_checkpoint
from ...loops.checkpoints.format_1 import read_tensors
from ...loops.checkpoints.tensor_files import read_file
from ...registry import did_you_mean
from ..run_folder import resolve_checkpoint

# Files in a folder of Hugging Face; the first one that exists is read.
_IN_FOLDERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# The keys under which training programs store the state dict in files with several entries.
_STATE_KEYS = ("state_dict", "model_state_dict", "model")


def read_weights(path: Path) -> dict[str, Any]:
    """Return the weights at ``path`` by name, on the CPU; every rank must call this.

    Raises:
        CheckpointError: ``path`` does not exist or has no weights that can be read.
    """
    # Rank 0 decides for all ranks, because reading a checkpoint of stepwrap is collective.
    if broadcast(_is_own(path)):
        return load_checkpoint(resolve_checkpoint(None, path)).read_model(evaluated=True)
    weights: dict[str, Any] = together(path, lambda: _read(path))
    return weights


def _is_own(path: Path) -> bool:
    return (path / "checkpoint.json").is_file() or (path / "checkpoints").is_dir()


def together(path: Path, action: Callable[[], Any]) -> Any:
    """Return this rank's result of ``action``; raise on all ranks if it fails on one.

    Every rank must call this.
    """
    results: list[Any] = []
    _, failures, own = run_together(lambda: results.append(action()))
    if isinstance(own, CheckpointError):
        raise own
    for failure in filter(None, failures):
        text = f"{path} cannot be loaded: {failure.full_text}"
        raise CheckpointError(
            text if own is not None else f"on rank {failure.rank}: {text}"
        ) from own
    return results[0]


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = _file_in(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist{_near(path)}")
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_state(path)


def _near(path: Path) -> str:
    folder = path.parent
    if re.fullmatch(r"best|latest|step_\d+(-\d+)?", str(path)):
        return (
            "; load_from takes a path, such as runs/my_run or runs/my_run/checkpoints/step_00000012"
        )
    if not folder.is_dir():
        hub = ""
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)):
            hub = (
                f". For a model of the Hugging Face Hub, run `hf download {path} --local-dir "
                f"{path.name}` and set the path to {path.name}"
            )
        return f", nor does the folder {folder} in {Path.cwd()}{hub}"
    # Suggest only paths with weights. The folder of the new run, for example, has none.
    likely = [
        str(entry)
        for entry in folder.iterdir()
        if entry.is_file()
        or _is_own(entry)
        or any((entry / name).is_file() for name in _IN_FOLDERS)
    ]
    return did_you_mean(str(path), likely)


def _file_in(folder: Path) -> Path:
    for name in _IN_FOLDERS:
        if (folder / name).is_file():
            return folder / name
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "no files"
    raise CheckpointError(
        f"the folder {folder} must be a run folder, a checkpoint, or have one of "
        f"{', '.join(_IN_FOLDERS)}; it has {listed}. If one of its files has the weights, give "
        "the path of that file"
    )


def _read_shards(index: Path) -> dict[str, Any]:
    try:
        names = dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{index} must be JSON with a `weight_map` from names to files "
            f"({type(error).__name__}: {error}); download the folder again"
        ) from error
    files = sorted(set(map(str, names.values())))
    # The index is data from elsewhere: it must not name files outside its folder.
    if outside := [file for file in files if Path(file).name != file]:
        raise CheckpointError(
            f"{index} names the file {outside[0]}, which is not next to it; such a file is never "
            "read"
        )
    if absent := [file for file in files if not (index.parent / file).is_file()]:
        raise CheckpointError(
            f"{index} lists {len(files)} files next to it, of which {len(absent)} are missing, "
            f"such as {absent[0]}; download the folder again"
        )
    weights: dict[str, Any] = {}
    for file in files:
        weights.update(_read(index.parent / file))
    if missing := [name for name in names if name not in weights]:
        raise CheckpointError(
            f"{index} lists {len(missing)} weights that its files do not have, such as "
            f"{missing[0]}; download the folder again"
        )
    return weights


def _read_safetensors(path: Path) -> dict[str, Any]:
    # Imported here, because most runs read no such file.
    from safetensors.torch import load_file

    try:
        # Checkpoints have values that are no tensors, and types that safetensors lacks.
        content = read_file(path)
        return dict(load_file(path) if content is None else content)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as a safetensors file ({error}); is it complete?"
        ) from error


class _Skipped:
    """Takes the place of an object in a file that is neither a tensor nor a plain container.

    Checkpoints of mmengine and Lightning, for example, have such objects next to the weights. No
    class of the file is imported, and nothing of it is called.
    """

    def __new__(cls, *_: Any) -> _Skipped:
        return object.__new__(cls)

    def __init__(self, *_: Any) -> None:
        """Ignore the arguments of the class."""

    def __setstate__(self, state: Any) -> None:
        """Ignore the state."""


def _read_without_objects(path: Path) -> Any:
    try:
        foreign = get_unsafe_globals_in_checkpoint(str(path))
        with safe_globals([(_Skipped, name) for name in foreign]):
            content = read_tensors(path, mmap=True)
    except Exception:
        # Files of early versions of torch cannot be mapped into memory.
        content = read_tensors(path)
    if isinstance(content, _Skipped):
        raise ValueError("the file must contain a dict of tensors")
    return content


def _has_skipped(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_skipped, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_skipped, value))
    return isinstance(value, _Skipped)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        content = _read_without_objects(path)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: {error}; if it holds a whole model, load it in the program that wrote it and "
            "save model.state_dict() instead"
        ) from error
    for key in _STATE_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if isinstance(content, Mapping) and any(map(_has_skipped, content.values())):
        names = [str(name) for name, value in content.items() if _has_skipped(value)]
        raise CheckpointError(
            f"{path}: the values of a state dict must be tensors, or plain values that "
            f"torch.load reads with weights_only=True, unlike {', '.join(names[:5])}"
        )
    if not isinstance(content, Mapping) or not any(isinstance(o, Tensor) for o in content.values()):
        raise CheckpointError(
            f"{path} must hold a state dict, or a dict with one under {' or '.join(_STATE_KEYS)}; "
            f"got {_describe(content)}. Save model.state_dict() in it"
        )
    return {str(name): value for name, value in content.items()}


def _describe(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    return f"a dict with the keys {', '.join(map(str, list(content)[:8])) or '(none)'}"
