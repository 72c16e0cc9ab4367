"""The commands that write files of weights: average, convert and consolidate."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ...loops.checkpoints.files import open_synced, write_bytes
from ...loops.checkpoints.saved_tensors import load_whole_tensors
from ...loops.checkpoints.tensor_files import divide, index_text, pack
from ...primitives.files import replacing
from ...primitives.tensor_bits import same_bits
from ..pretrained.contents import is_tensor, read_whole, region
from ..pretrained.files import OpenedWeights
from ..rank_processes import raising_stops
from .checkpoint_commands import existing, opened, size_text
from .command import Options, mistake, output

_FORMATS = {
    "safetensors": (".safetensors",),
    "torch": (".pt", ".pth", ".bin", ".ckpt"),
}
_SHOWN = 8
# Buffers of BatchNorm, which depend on the weights.
_STATISTICS = ("running_mean", "running_var")


def run_convert(options: Options) -> int:
    """Write the weights of a checkpoint or a file to a file."""
    with _new_file(options) as out:
        _convert(options, out)
    return 0


def _convert(options: Options, out: Path) -> None:
    kind = _format(options, out)
    path = existing(options, options.words[0])
    if options.unsafe and path.is_file() and path.suffix not in (".safetensors", ".json"):
        print(f"warning: --unsafe unpickles {path}, which runs code that is in it", file=sys.stderr)
    with raising_stops():
        source = _open_for_conversion(options)
        _write(out, kind, source.weights)
    _report(source, out, options)


def run_consolidate(options: Options) -> int:
    """Write a divided or sharded model to one file."""
    with _new_file(options) as out:
        kind = _format(options, out)
        with raising_stops():
            source = _opened(options, options.words[0])
            _write(out, kind, source.weights)
        _report(source, out, options)
    return 0


def _open_for_conversion(options: Options) -> OpenedWeights:
    try:
        return _opened(options, options.words[0], unsafe=options.unsafe)
    except Exception as error:
        reasons = ("UnpicklingError", "weights_only=True", "must contain a dict of tensors")
        if options.unsafe or not any(reason in str(error) for reason in reasons):
            raise
        raise mistake(
            f"{str(error).strip()}. --unsafe unpickles the file, which runs code that is in it: "
            "only for files that you trust"
        ) from error


def _opened(options: Options, word: str, *, unsafe: bool = False) -> OpenedWeights:
    source = opened(options, word, unsafe=unsafe)
    if not any(map(is_tensor, source.weights.values())):
        raise mistake(f"stepwrap {options.command}: {source.path} has no weights")
    return source


@contextmanager
def _new_file(options: Options) -> Iterator[Path]:
    """Yield the path of the new file; raise if it exists and is not to be replaced."""
    with output(options, replace=options.force) as out:
        _require_new(options, out)
        yield out


def _require_new(options: Options, out: Path) -> None:
    if out.is_dir():
        raise mistake(f"stepwrap {options.command}: --out must be a file, and {out} is a folder")
    if out.exists() and not options.force:
        raise mistake(
            f"stepwrap {options.command}: {out} exists; --force replaces it when the new file is "
            "complete"
        )


def _format(options: Options, out: Path) -> str:
    to = vars(options).get("to")
    kind = next((kind for kind, suffixes in _FORMATS.items() if out.suffix in suffixes), None)
    if kind is None or to not in (None, kind):
        suffixes = _FORMATS[to] if to else sum(_FORMATS.values(), ())
        raise mistake(
            f"stepwrap {options.command}: --out must end in {', '.join(suffixes)}, got {out.name!r}"
        )
    return kind


def _write(out: Path, kind: str, weights: Mapping[str, Any]) -> None:
    """Write a file, which replaces ``out`` when it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    packed = _own_memory(weights)
    with replacing(out) as draft:
        if kind == "safetensors":
            # The file contains the name of its content, so it gets its own name later.
            file = pack("model", packed)
            with TemporaryDirectory(dir=draft.parent) as folder:
                file.write(Path(folder))
                Path(folder, file.name).replace(draft)
        else:
            with open_synced(draft, "wb") as opened_file:
                torch.save(packed, opened_file)


def _own_memory(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return whole tensors that share memory only if they are tied.

    ``torch.save`` would write all of the memory of which a tensor is a slice.
    """
    copies: dict[Any, Tensor] = {}
    result: dict[str, Any] = {}
    for name, value in weights.items():
        if not is_tensor(value):
            result[name] = load_whole_tensors(value)
            continue
        key = region(value)
        if key not in copies:
            tensor = read_whole(value).detach()
            is_slice = tensor.layout is torch.strided and (
                tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
            )
            copies[key] = tensor.clone() if is_slice else tensor
        result[name] = copies[key]
    return result


def _report(source: OpenedWeights, out: Path, options: Options) -> None:
    count = sum(map(is_tensor, source.weights.values()))
    print(f"read: {source.path}")
    print(f"written: {options.out} ({count:,} tensors, {size_text(out.stat().st_size)})")
    if source.left_out:
        print(f"left out: {', '.join(source.left_out)}")
    if "ema_state_dict" in source.left_out:
        print("mmengine's EMAHook stores the averages in state_dict, so these were written")
    _report_evaluated(source, options)


def _report_evaluated(source: OpenedWeights, options: Options) -> None:
    """Say so if the evaluations used other weights than those that were taken."""
    checkpoint = source.checkpoint
    if checkpoint is None or len(checkpoint.evaluated) == 1 or vars(options).get("evaluated"):
        return
    where = " / ".join(checkpoint.evaluated)
    hint = "; --evaluated takes them" if "evaluated" in vars(options) else ""
    print(f"these are the plain weights; evaluations used those in {where}{hint}")


def run_average(options: Options) -> int:
    """Average the weights of checkpoints or files."""
    with output(options, replace=options.force) as out:
        _write_average(options, out)
    return 0


def _write_average(options: Options, out: Path) -> None:
    if out.suffix == ".safetensors":
        _require_new(options, out)
    elif out.suffix in _FORMATS["torch"] or out.is_file() or (out.exists() and any(out.iterdir())):
        raise mistake(
            f"stepwrap {options.command}: --out must be a file that ends in .safetensors, or a new "
            f"folder, got {out}"
        )
    with raising_stops():
        sources = [_opened(options, word) for word in options.words]
        _check_alike(options, sources)
        average, not_averaged = _average([source.weights for source in sources])
        if out.suffix == ".safetensors":
            _write(out, "safetensors", average)
        else:
            _write_folder(out, average, sources[-1])
    for source in sources:
        print(f"read: {source.path}")
    size = sum(file.stat().st_size for file in ([out] if out.is_file() else out.iterdir()))
    count = sum(map(is_tensor, average.values()))
    print(f"written: {options.out} ({count:,} tensors, {size_text(size)})")
    if not_averaged:
        print(f"not averaged, taken from {sources[-1].path}: {_some(not_averaged)}")
    stale = [name for name in average if name.rpartition(".")[2] in _STATISTICS]
    if stale:
        layers = {name.rpartition(".")[0] for name in stale}
        print(
            f"stale: the BatchNorm statistics of {len(layers)} layer(s), such as {stale[0]}, are "
            "averages that fit no weights; compute them again with "
            "torch.optim.swa_utils.update_bn"
        )
    _report_evaluated(sources[-1], options)


def _check_alike(options: Options, sources: Sequence[OpenedWeights]) -> None:
    """Raise with a list of the names and shapes that differ from the last source."""
    reference = sources[-1]
    problems = []
    for source in sources[:-1]:
        for name in dict.fromkeys([*reference.weights, *source.weights]):
            a: Any = source.weights.get(name)
            b: Any = reference.weights.get(name)
            if name not in source.weights or name not in reference.weights:
                holder, other = (
                    (source, reference) if name in source.weights else (reference, source)
                )
                problems.append(f"{name} is in {holder.path}, but not in {other.path}")
            elif is_tensor(a) != is_tensor(b):
                problems.append(
                    f"{name} is a tensor in only one of {source.path} and {reference.path}"
                )
            elif is_tensor(a) and a.shape != b.shape:
                shapes = (
                    f"{tuple(a.shape)} in {source.path} and {tuple(b.shape)} in {reference.path}"
                )
                problems.append(f"{name} has shape {shapes}")
            elif is_tensor(a) and _is_number(a) != _is_number(b):
                dtypes = f"{a.dtype} in {source.path} and {b.dtype} in {reference.path}"
                problems.append(f"{name} has dtype {dtypes}")
    if problems:
        raise mistake(
            f"stepwrap {options.command}: names, shapes and kinds of dtypes must be the same in "
            f"all files: {_some(problems, separator='; ')}"
        )


def _is_number(value: Any) -> bool:
    return bool(value.dtype.is_floating_point or value.dtype.is_complex)


def _some(texts: Sequence[str], separator: str = ", ") -> str:
    more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return separator.join([*texts[:_SHOWN], *more])


def _average(every: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the averages, and the names of different values that were taken from the last one."""
    averages: dict[Any, Tensor] = {}
    result: dict[str, Any] = {}
    not_averaged = []
    for name, value in every[-1].items():
        values = [weights[name] for weights in every]
        if not is_tensor(value):
            result[name] = load_whole_tensors(value)
            if any(repr(other) != repr(value) for other in values):
                not_averaged.append(name)
            continue
        # Weights that are tied in all files are averaged once.
        key = tuple(map(region, values))
        if key not in averages:
            averages[key], is_kept = _mean(values)
            not_averaged += [name] * is_kept
        result[name] = averages[key]
    return result, not_averaged


def _mean(values: Sequence[Any]) -> tuple[Tensor, bool]:
    """Return the mean in the last one's dtype; of integers that differ, the last one and True."""
    tensor: Tensor = read_whole(values[-1]).detach()
    is_averaged = _is_number(tensor) and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_averaged:
        earlier = (read_whole(value).detach() for value in values[:-1])
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized
        return tensor, not (is_plain and all(same_bits(other, tensor) for other in earlier))
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    total = torch.zeros(tensor.shape, dtype=wide)
    for value in values:
        total += read_whole(value).detach().to(wide)
    return total.div_(len(values)).to(tensor.dtype), False


def _write_folder(out: Path, weights: Mapping[str, Any], source: OpenedWeights) -> None:
    """Write a folder as other libraries and ``load_from`` read it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    files = divide(pack("model", weights))
    with replacing(out) as draft:
        draft.mkdir()
        for file in files:
            file.write(draft)
        texts = dict(filter(None, [index_text(files)]))
        settings = source.path / "config.json"
        if source.checkpoint is not None and settings.is_file():
            texts[settings.name] = settings.read_text()
        for name, text in texts.items():
            write_bytes(draft / name, text.encode())
