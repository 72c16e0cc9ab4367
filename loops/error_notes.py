"""Add notes to errors: the ranks that are missing, the user's code that failed, the batch."""

from __future__ import annotations

import inspect
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import Progress, in_progress
from ..primitives.notes import add_note
from ..registry import is_users_file
from ..wrappers.steps.preprocess import get_fields
from ..wrappers.unwrap import plain_name, user_model
from .state import LoopState, Phase

# The number of entries of a batch, or kinds of samples, that are shown.
_SHOWN = 6
_NOTED = "_stepwrap_noted"
_ACTIVITIES = {
    Phase.TRAIN: "training",
    Phase.VAL: "validation",
    Phase.TEST: "test",
    Phase.PREDICT: "prediction",
}
# The dicts in which a module keeps tensors, which are left out of names.
_STORES = ("_parameters", "_buffers")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def naming_missing_ranks(state: LoopState) -> AbstractContextManager[None]:
    """Name the missing ranks in the error of a collective that fails in the block.

    Every rank must enter.
    """

    def progress() -> Progress:
        # Until the first batch of a pass is done, `running_epoch` still names the previous pass.
        epoch = state.epoch + 1 if state.in_step else state.running_epoch
        return Progress(_ACTIVITIES[state.phase], f"step {state.step}, epoch {epoch}")

    return in_progress(progress)


def note_failure(error: BaseException, state: LoopState, loader: Any, step_name: str) -> None:
    """Add notes that name the step, or the batch of ``loader``, that caused an error.

    All facts come from the traceback, so steps that succeed need not record anything.
    """
    if "inference tensor" in str(error).lower() and state.phase is Phase.TRAIN:
        _note_inference_tensors(error, state)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    passes = (frame for frame in reversed(frames) if frame.f_code.co_name == "_pass")
    loop_frame = next(passes, None)
    if loop_frame is None or vars(error).get(_NOTED) or not isinstance(error, Exception):
        return
    location = _place_text(state, loop_frame)
    steps = [frame for frame in frames if frame.f_code.co_name == step_name]
    if any(_first_argument(frame) is state.model for frame in steps):
        notes = _notes_on_step(frames, state.model, location, loop_frame)
    else:
        notes = _notes_on_reading(error, frames, loader, location)
    for text in notes:
        add_note(error, text)
        vars(error)[_NOTED] = True


def record_inference_tensors(state: LoopState) -> None:
    """Record that the evaluation that has ended created tensors which the model keeps."""
    text = f"the {_ACTIVITIES[state.phase]} after step {state.step}"
    for path in _inference_tensors(user_model(state.model)):
        state.inference_tensors.setdefault(path, text)


def _note_inference_tensors(error: BaseException, state: LoopState) -> None:
    """Name the model's tensors that training cannot use, and the evaluations that made them."""
    paths = _inference_tensors(user_model(state.model))
    sources = {path: state.inference_tensors.get(path, "your own code") for path in paths}
    for path, source in [*sources.items()][:_SHOWN]:
        add_note(error, f"{path!r} of the model was created by {source}, under inference mode")
    if not sources:
        add_note(error, "no attribute of the model holds such a tensor, but a cache may hold it")
    add_note(
        error,
        "tensors created under inference mode cannot be used in training: evaluate under "
        "torch.no_grad(), which is the default (inference_mode: false in the sections val and "
        "test, or ValLoop(..., inference_mode=False)), or create the tensors again in training",
    )


def _inference_tensors(model: nn.Module) -> Iterator[str]:
    """Yield the names of the attributes of ``model`` that hold tensors of inference mode."""
    for path, module in model.named_modules():
        prefix = f"{plain_name(path)}." if path else ""
        for name, tensor in _tensors_in(vars(module), set()):
            if tensor.is_inference():
                names = [step for step in name.split(".") if step not in _STORES]
                yield prefix + ".".join(names)


def _tensors_in(value: Any, visited: set[int], depth: int = 4) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in containers and objects, except in modules, by name."""
    visited.add(id(value))
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type, ModuleType)):
        entries = list(vars(value).items())
    for name, inner in entries if depth else ():
        if isinstance(inner, Tensor):
            yield str(name), inner
        elif id(inner) not in visited:
            for path, tensor in _tensors_in(inner, visited, depth - 1):
                yield f"{name}.{path}", tensor


def describe(data: Any, *, ranges: bool = True, depth: int = 3) -> str:
    """Describe types and shapes of nested data in one line.

    With ``ranges``, show also the smallest and largest value of integer tensors on the CPU, and the
    values of plain numbers.
    """
    try:
        return _described(data, ranges, depth)
    except Exception:  # noqa: BLE001 - must not hide the error that the note is for
        return type(data).__name__


def _described(data: Any, ranges: bool, depth: int) -> str:
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        kind = str(data.dtype).removeprefix("torch.")
        return f"{kind} {tuple(data.shape)}{_range(data) if ranges else ''}"
    data = get_fields(data)
    if isinstance(data, Mapping) and depth:
        shown = islice(data.items(), _SHOWN)
        texts = [f"{k}: {describe(v, ranges=ranges, depth=depth - 1)}" for k, v in shown]
        return f"{{{_listed(texts, len(data))}}}"
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)) and depth:
        texts = [describe(entry, ranges=ranges, depth=depth - 1) for entry in data[:_SHOWN]]
        return f"[{_listed(texts, len(data))}]"
    is_number = isinstance(data, (bool, int, float))
    return repr(data) if ranges and is_number else type(data).__name__


def describe_samples(samples: Any) -> str:
    """Describe samples in one line: how many there are of each type and shape."""
    if not isinstance(samples, Sequence):
        return describe(samples)
    kinds = Counter(describe(sample, ranges=False) for sample in samples)
    counts = [f"{count} x {kind}" for kind, count in kinds.most_common(_SHOWN)]
    return _listed(counts, len(kinds))


def get_name(target: Any) -> str:
    """Return the name of a function or an object's class, and its location in the user's code."""
    kind = target if inspect.isroutine(target) or isinstance(target, type) else type(target)
    name = str(getattr(kind, "__name__", type(target).__name__))
    try:
        file = inspect.getsourcefile(kind)
        is_users = file is not None and is_users_file(file)
        return f"{name} at {file}:{inspect.getsourcelines(kind)[1]}" if is_users else name
    except (OSError, TypeError):
        return name


def _notes_on_step(
    frames: Sequence[FrameType], wrapper: nn.Module, location: str, loop_frame: FrameType
) -> Iterator[str]:
    model = user_model(wrapper)
    paths = {id(module): plain_name(path) for path, module in model.named_modules()}
    running = [module for module in map(_first_argument, frames) if id(module) in paths]
    inner = running[-1] if running else model
    layer = f"{paths[id(inner)]} ({get_name(inner)}) of " if paths[id(inner)] else ""
    children = [(name, getattr(model, name, None)) for name in ("net", "loss")]
    parts_text = " and ".join(
        f"{name} {get_name(child)}" for name, child in children if callable(child)
    )
    yield f"in {layer}{get_name(model)}" + (f" with {parts_text}" if parts_text else "")
    yield f"{location}: {describe(loop_frame.f_locals.get('batch'))}"


def _notes_on_reading(
    error: BaseException, frames: Sequence[FrameType], loader: Any, location: str
) -> Iterator[str]:
    dataset = getattr(loader, "dataset", None)
    collate = unwrapped(getattr(loader, "collate_fn", None), "collate")
    readers = [reader for reader in (loader, dataset) if reader is not None]
    code = getattr(collate, "__code__", None)
    collating = [frame for frame in frames if code is not None and frame.f_code is code]
    is_read = any(_first_argument(frame) is reader for frame in frames for reader in readers)
    if not (collating or is_read or "in DataLoader worker process" in str(error)):
        return
    dataset = unwrapped(readers[-1], "samples")
    yield f"while reading {location} from {get_name(dataset)}"
    if collating:
        yield f"{get_name(collate)} was given {describe_samples(_first_argument(collating[0]))}"


def unwrapped(part: Any, name: str) -> Any:
    """Return the user's object if our loaders have wrapped it in ``part``, otherwise ``part``."""
    is_ours = type(part).__module__.startswith(f"{__package__}.")
    return getattr(part, name, part) if is_ours else part


def _place_text(state: LoopState, loop_frame: FrameType) -> str:
    if state.phase is Phase.TRAIN:
        return f"batch {state.batch + 1} of epoch {state.epoch + 1}"
    return f"batch {loop_frame.f_locals.get('count', 0) + 1} of the {_ACTIVITIES[state.phase]}"


def _first_argument(frame: FrameType) -> Any:
    """Return the first argument of a call, such as self."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None


def _range(tensor: Any) -> str:
    # Reading from an accelerator would wait for a device that may have failed.
    copy_to_cpu = isinstance(tensor, Tensor) and tensor.device.type == "cpu"
    if not copy_to_cpu or not tensor.numel() or tensor.dtype not in _INTEGERS:
        return ""
    low, high = tensor.aminmax()
    return f" from {low.item()} to {high.item()}"


def _listed(texts: Sequence[str], count: int) -> str:
    more = [f"... ({count} in all)"] if count > len(texts) else []
    return ", ".join([*texts, *more])
