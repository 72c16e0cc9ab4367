"""Read weights from checkpoints of stepwrap, state dicts, and safetensors files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ...collectives import broadcast, run_together
from ...loops import Checkpoint, CheckpointError, load_checkpoint
from ...loops.checkpoints.format_1 import LAST, read_tensors
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


@dataclass(frozen=True)
class OpenedWeights:
    """Weights whose larger tensors are read when they are used.

    Attributes:
        path: the checkpoint, or the file.
        weights: by name: tensors, ``SavedTensor`` objects, and values that are not tensors.
        checkpoint: the checkpoint; None for the file of another program.
        left_out: the other entries of a file that a training program wrote.
    """

    path: Path
    weights: dict[str, Any]
    checkpoint: Checkpoint | None = None
    left_out: tuple[str, ...] = ()


def open_weights(path: Path, *, evaluated: bool = False, unsafe: bool = False) -> OpenedWeights:
    """Open the weights at ``path`` in one process.

    Args:
        path: a checkpoint, one of its files, a run's folder or its folder of checkpoints, or what
            ``read_weights`` reads.
        evaluated: take the weights that a run's evaluations used.
        unsafe: unpickle a file of ``torch.save``, which runs code that is in it.

    Raises:
        CheckpointError: ``path`` does not exist or has no weights that can be read.
    """
    if path.name == "model.safetensors.index.json" and _is_own(path.parent):
        # The containers of all files are in the first one.
        path = path.parent
    if _is_own(path) or any(path.glob("step_*/checkpoint.json")):
        # The empty name stands for the best checkpoint of a folder, or the latest.
        is_run = not (path / "checkpoint.json").is_file()
        checkpoint = load_checkpoint(resolve_checkpoint(path, "") if is_run else path)
        # The files of earlier releases are read as a whole: that keeps tied weights.
        by_parts = checkpoint.meta["format"] > LAST
        weights = checkpoint.read_model(evaluated=evaluated, by_parts=by_parts)
        return OpenedWeights(checkpoint.path, weights, checkpoint)
    if path.is_dir():
        path = _file_in(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist{_near(path)}")
    stem = path.name.partition(".")[0]
    if stem != "model" and (path.parent / "checkpoint.json").is_file():
        checkpoint = load_checkpoint(path.parent)
        if path.name in checkpoint.meta["files"] and stem in checkpoint.stems:
            # Such as the optimizers.
            return OpenedWeights(path, checkpoint.read(stem, by_parts=True))
    if path.name.endswith(".index.json"):
        return OpenedWeights(path, _read_shards(path, by_parts=True))
    if path.suffix == ".safetensors":
        return OpenedWeights(path, _add_tied(path, _read_safetensors(path, by_parts=True)))
    content = _unpickle(path) if unsafe else _read_checked(path)
    key = _state_key(content)
    left_out = () if key is None else tuple(str(name) for name in content if name != key)
    return OpenedWeights(path, _state_in(path, content), left_out=left_out)


def _add_tied(path: Path, weights: dict[str, Any]) -> dict[str, Any]:
    """Add the further names of tied weights, which ``safetensors.torch.save_model`` stores."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        entries = (file.metadata() or {}).items()
    tied = {name: weights[other] for name, other in entries if other in weights}
    return {**tied, **weights} if tied.keys() - weights.keys() else weights


def _unpickle(path: Path) -> Any:
    try:
        content = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be unpickled: {type(error).__name__}: {error}; a file with classes of "
            "yours can be read only where their modules can be imported"
        ) from error
    if isinstance(content, nn.Module):
        return content.state_dict()
    if isinstance(content, Mapping):
        return {k: v.state_dict() if isinstance(v, nn.Module) else v for k, v in content.items()}
    return content


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


def _read_shards(index: Path, *, by_parts: bool = False) -> dict[str, Any]:
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
        if by_parts and file.endswith(".safetensors"):
            weights.update(_read_safetensors(index.parent / file, by_parts=True))
        else:
            weights.update(_read(index.parent / file))
    if missing := [name for name in names if name not in weights]:
        raise CheckpointError(
            f"{index} lists {len(missing)} weights that its files do not have, such as "
            f"{missing[0]}; download the folder again"
        )
    return weights


def _read_safetensors(path: Path, *, by_parts: bool = False) -> dict[str, Any]:
    # Imported here, because most runs read no such file.
    from safetensors.torch import load_file

    try:
        # Checkpoints contain further values, and tensors of dtypes that safetensors lacks.
        content = read_file(path, by_parts=by_parts)
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
    return _state_in(path, _read_checked(path))


def _read_checked(path: Path) -> Any:
    try:
        return _read_without_objects(path)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: {error}; if it holds a whole model, load it in the program that wrote it and "
            "save model.state_dict() instead"
        ) from error


def _state_key(content: Any) -> str | None:
    """Return the key of the state dict; None if the content is one itself."""
    keys = _STATE_KEYS if isinstance(content, Mapping) else ()
    return next((key for key in keys if isinstance(content.get(key), Mapping)), None)


def _state_in(path: Path, content: Any) -> dict[str, Any]:
    key = _state_key(content)
    if key is not None:
        content = content[key]
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
