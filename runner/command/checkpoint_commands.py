"""The commands that examine and remove checkpoints: ls, inspect, diff, verify, prune."""

from __future__ import annotations

import fnmatch
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...loops import CheckpointError, find_checkpoint
from ...loops.checkpoints.checkpoint import META
from ...registry import did_you_mean
from ...registry.local_paths import remote_url
from ..pretrained.contents import (
    Difference,
    Total,
    differences,
    is_tensor,
    leaves,
    name_states,
    num_bytes,
    short_text,
    sum_up,
)
from ..pretrained.files import OpenedWeights, open_weights
from ..pretrained.listing import (
    Entry,
    Files,
    LocalFiles,
    is_inner_link,
    list_entries,
    mark_entries,
    read_entry,
)
from .command import Options, mistake

if TYPE_CHECKING:
    pass


# Paths.


def existing(options: Options, word: str) -> Path:
    """Return the path; raise, with the nearest name, if it does not exist.

    Of a URL, the path of a copy is returned.
    """
    if remote_url(word):
        # Imported here, because most commands have no URL.
        from ..remote.copies import local_copy

        return local_copy(word)
    path = Path(word)
    if path.exists():
        return path
    folder = path.parent
    if not folder.is_dir():
        raise mistake(
            f"stepwrap {options.command}: {path} does not exist, nor does the folder {folder}"
        )
    names = [str(folder / entry.name) for entry in folder.iterdir() if entry.name[0] != "."]
    hint = did_you_mean(str(path), names, limit=1)
    raise mistake(f"stepwrap {options.command}: {path} does not exist{hint}")


def opened(options: Options, word: str, *, unsafe: bool = False) -> OpenedWeights:
    """Open the weights that a word of the command line names."""
    path = existing(options, word)
    evaluated = bool(vars(options).get("evaluated"))
    try:
        source = open_weights(path, evaluated=evaluated, unsafe=unsafe)
    except CheckpointError as error:
        # Damage is not a mistake in the command line.
        if _find_folder(path) is not None or (path / META).exists():
            raise
        raise mistake(f"stepwrap {options.command}: {error}") from error
    if evaluated and source.checkpoint is None:
        raise mistake(
            f"stepwrap {options.command}: --evaluated requires checkpoints, and {path} is a file "
            "of weights"
        )
    return source


def _find_folder(path: Path) -> Path | None:
    """Return the folder of checkpoints at or in ``path``; None if there is none."""
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    has_some = folder.is_dir() and any(folder.glob("*step_*")) and not (folder / META).exists()
    return folder if has_some or folder.name == "checkpoints" else None


def _checkpoints_folder(options: Options, word: str) -> Path:
    path = existing(options, word)
    folder = _find_folder(path)
    if folder is None:
        if (path / META).exists():
            problem = "a checkpoint, and the run's folder is required"
        else:
            problem = "neither a run's folder nor its folder of checkpoints"
        raise mistake(f"stepwrap {options.command}: {path} is {problem}")
    return folder


# Listing.


def _checkpoint_files(options: Options, word: str) -> Files:
    """Return the files of the checkpoints that a word names; raise if it has none."""
    if not remote_url(word):
        return LocalFiles(_checkpoints_folder(options, word))
    from ..remote.examination import RemoteFiles
    from ..remote.stores import RemoteError

    try:
        return RemoteFiles(word)
    except RemoteError as error:
        raise mistake(f"stepwrap {options.command}: {error}") from error


def run_ls(options: Options) -> int:
    """Print a table of a run's checkpoints."""
    files = _checkpoint_files(options, options.words[0])
    folder = files.folder
    entries = list_entries(files)
    marks = mark_entries(entries)
    rows = [
        {
            "name": entry.path.name,
            "step": entry.meta.get("step"),
            "epoch": entry.meta.get("epoch"),
            "saved": _saved_at(entry.path),
            "reason": entry.meta.get("reason", ""),
            "metrics": entry.meta.get("metrics", {}),
            "marks": marks[entry.path],
            "bytes": entry.num_bytes,
            "state": entry.state,
        }
        for entry in entries
    ]
    if options.json:
        print_json({"folder": str(folder), "checkpoints": rows})
        return 0
    if not rows:
        print(f"{folder} has no checkpoints")
        return 0
    print_table(
        ("name", "step>", "epoch>", "saved", "reason", "metrics", "", "size>", "state"),
        (
            [
                row["name"],
                row["step"],
                row["epoch"],
                row["saved"],
                row["reason"],
                _metrics(row["metrics"]),
                row["marks"],
                size_text(row["bytes"]),
                row["state"],
            ]
            for row in rows
        ),
    )
    return 0


def _saved_at(path: Path) -> str:
    file = path / META if (path / META).exists() else path
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.stat().st_mtime))
    except OSError:
        return ""


def _metrics(metrics: Mapping[str, float | None]) -> str:
    return ", ".join(f"{k} {'nan' if v is None else f'{v:.4g}'}" for k, v in metrics.items())


# Contents.


def _matching(
    options: Options, weights: Mapping[str, Any], *more: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the weights that ``--weights`` selects of each mapping."""
    every = [weights, *more]
    if options.weights is None:
        return [dict(mapping) for mapping in every]
    pattern = options.weights
    selected = [
        {name: v for name, v in leaves(mapping) if fnmatch.fnmatchcase(name, pattern)}
        for mapping in every
    ]
    if not any(selected):
        names = [name for mapping in every for name, _ in leaves(mapping)]
        hint = did_you_mean(pattern.strip("*."), names)
        raise mistake(f"stepwrap {options.command}: no weight matches {pattern!r}{hint}")
    return selected


def run_inspect(options: Options) -> int:
    """Print the weights and the other contents of a checkpoint or a file."""
    source = opened(options, options.words[0])
    (weights,) = _matching(options, source.weights)
    totals = sum_up(weights, options.depth)
    values = {name: value for name, value in leaves(weights) if not is_tensor(value)}
    about = {} if source.checkpoint is None else _describe(source)
    if options.json:
        shown = {name: short_text(value) for name, value in values.items()}
        rows = [total.as_json() for total in totals]
        print_json({"path": str(source.path), **about, "weights": rows, "values": shown})
        return 0
    print(f"path: {source.path}")
    for name, text in about.items():
        print(f"{name}: {_inline(text)}")
    count, num_bytes = sum(t.count for t in totals), sum(t.bytes for t in totals)
    tensors = sum(t.tensors for t in totals)
    print(f"weights: {tensors:,} tensors, {count:,} elements, {size_text(num_bytes)}")
    if options.depth is None:
        heads = ["name", "shape", "dtype", "size>", "norm>", ""]
    else:
        heads = ["module", "tensors>", "elements>", "dtype", "size>", "norm>", ""]
    print_table(heads, (_total_row(total, options.depth is not None) for total in totals))
    for name, value in values.items():
        print(f"{name}: {short_text(value)}")
    if source.left_out:
        print(f"other entries of the file: {', '.join(source.left_out)}")
    return 0


def _total_row(total: Total, is_module: bool) -> list[Any]:
    note = f"{total.non_finite:,} NaN or infinite" if total.non_finite else ""
    dtypes, size, norm = ", ".join(total.dtypes), size_text(total.bytes), f"{total.norm:.6g}"
    if total.tied_to:
        size, norm, note = "", "", f"tied to {total.tied_to}"
    if is_module:
        return [total.name, total.tensors, f"{total.count:,}", dtypes, size, norm, note]
    return [total.name, total.shape, dtypes, size, norm, note]


def _describe(source: OpenedWeights) -> dict[str, Any]:
    """Return what a checkpoint has besides the weights, by title."""
    checkpoint = source.checkpoint
    assert checkpoint is not None
    meta = checkpoint.meta
    about: dict[str, Any] = {
        "saved": {
            "at": _saved_at(checkpoint.path),
            "torch": meta.get("torch"),
            "format": meta["format"],
            "world_size": meta["world_size"],
            "reason": meta.get("reason"),
            "best": meta["best"],
        },
        "counters": {k: meta[k] for k in ("step", "epoch", "batch", "iteration") if k in meta},
        "metrics": meta.get("metrics", {}),
    }
    optim = checkpoint.read("optim", by_parts=True)
    is_single = "param_groups" in optim or not optim
    members = {"": optim} if is_single else optim
    about["optimizers"] = {
        name or "optimizer": _optimizer(member) for name, member in members.items() if member
    }
    stateful = checkpoint.read("state", by_parts=True)["stateful"]
    about["states"] = {name: _contents(value) for name, value in stateful.items()}
    ranks = {s: checkpoint.read(s, by_parts=True) for s in checkpoint.stems if "rank_" in s}
    about["ranks"] = {
        name: ", ".join(key for key, value in content.items() if value)
        for name, content in ranks.items()
    }
    streams = [f"{name} ({', '.join(content.get('rng', {}))})" for name, content in ranks.items()]
    about["random states"] = streams
    about["evaluated weights"] = " / ".join(checkpoint.evaluated)
    return about


def _optimizer(state: Any) -> str:
    if not isinstance(state, Mapping):
        return short_text(state)
    groups = state.get("param_groups", [])
    rates = ", ".join(f"{group.get('lr', 0):g}" for group in groups)
    kind = state.get("stepwrap.optimizer", "")
    states = f"{len(state.get('state', {}))} parameters with a state, {_contents(state)}"
    return f"{kind} {len(groups)} group(s), lr {rates}, {states}".strip()


def _contents(value: Any) -> str:
    """Describe nested containers by their numbers of tensors and values."""
    tensors = [entry for _, entry in leaves(value) if is_tensor(entry)]
    num_values = sum(1 for _ in leaves(value)) - len(tensors)
    texts = [f"{len(tensors)} tensors ({size_text(sum(map(num_bytes, tensors)))})"] * bool(tensors)
    return ", ".join([*texts, *[f"{num_values} values"] * bool(num_values)])


def _inline(value: Any) -> str:
    if not isinstance(value, Mapping):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    is_long = any(", " in str(entry) for entry in value.values())
    between, after = ("; ", ":") if is_long else (", ", "")
    return between.join(f"{name}{after} {entry}" for name, entry in value.items()) or "none"


# Comparison.


def run_diff(options: Options) -> int:
    """Print the differences between two checkpoints or files; return 1 if there are any."""
    a, b = (opened(options, word) for word in options.words)
    selected = _matching(options, a.weights, b.weights)
    rows = [*differences("model", *selected)]
    compared = ["model"]
    if options.weights is None and a.checkpoint is not None and b.checkpoint is not None:
        checkpoints = (a.checkpoint, b.checkpoint)
        for stem in dict.fromkeys([*a.checkpoint.stems, *b.checkpoint.stems]):
            if stem == "model":
                continue
            if all(stem in checkpoint.stems for checkpoint in checkpoints):
                compared.append(stem)
                contents = [checkpoint.read(stem, by_parts=True) for checkpoint in checkpoints]
                if stem == "optim":
                    contents = [*map(name_states, contents)]
                rows += differences(stem, *contents)
            else:
                rows.append(
                    Difference(stem, "", f"only in {'A' if stem in a.checkpoint.stems else 'B'}")
                )
    if options.json:
        texts = [{k: _finite(v) for k, v in vars(row).items()} for row in rows]
        print_json({"a": str(a.path), "b": str(b.path), "compared": compared, "differences": texts})
        return int(bool(rows))
    print(f"A: {a.path}\nB: {b.path}")
    if rows:
        numbers = (("" if x is None else f"{x:.4g}" for x in (d.largest, d.relative)) for d in rows)
        print_table(
            ("content", "name", "max abs>", "relative>", "difference"),
            ([d.file, d.name, *n, d.text] for d, n in zip(rows, numbers, strict=True)),
        )
    counts = Counter(row.file for row in rows)
    for stem in dict.fromkeys([*compared, *counts]):
        number = counts[stem]
        text = f"{number:,} difference{'s' * (number > 1)}" if number else "equal"
        print(f"{stem}: {text}")
    return int(bool(rows))


def _finite(value: Any) -> Any:
    is_other = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_other else value


# Hashes.


def run_verify(options: Options) -> int:
    """Check the hashes of one checkpoint or of all of a run; return 1 if one is damaged."""
    path, checked = _checked(options, options.words[0])
    checked = [entry for entry in checked if entry.kind not in ("draft", "link")]
    damaged = [entry for entry in checked if entry.problem]
    if options.json:
        rows = [
            {"name": e.path.name, "state": e.state, "damaged": bool(e.problem)} for e in checked
        ]
        print_json({"path": str(path), "checkpoints": rows})
        return int(bool(damaged))
    print_table(
        ("name", "files>", "size>", "state"),
        (
            [e.path.name, len(e.meta.get("files", ())), size_text(e.num_bytes), e.state]
            for e in checked
        ),
    )
    print(f"{len(checked)} checked, {len(damaged)} damaged")
    return int(bool(damaged))


def _checked(options: Options, word: str) -> tuple[str | Path, list[Entry]]:
    """Check the hashes of the files at a path or URL, and return the path and the entries."""
    if remote_url(word):
        remote = _checkpoint_files(options, word)
        if remote.name:
            return word, [read_entry(remote, remote.folder / remote.name, hashes=True)]
        return word, list_entries(remote, hashes=True)
    path = existing(options, word)
    if (path / META).exists():
        return path, [read_entry(LocalFiles(path.parent), path, hashes=True)]
    folder = _find_folder(path)
    if folder is None:
        raise mistake(
            f"stepwrap {options.command}: {path} is not a checkpoint, because it has no {META}, "
            "and has no folder of checkpoints"
        )
    return path, list_entries(LocalFiles(folder), hashes=True)


# Removal.


def run_prune(options: Options) -> int:
    """List or remove the checkpoints that no rule keeps."""
    if not (options.keep_last or options.keep_best or options.keep):
        raise mistake(
            f"stepwrap {options.command}: a rule is required: --keep-last N, --keep-best or --keep "
            "PATTERN"
        )
    files = _checkpoint_files(options, options.words[0])
    if in_use := files.lock_problem():
        raise mistake(f"stepwrap {options.command}: {in_use.partition(';')[0]}; wait until it ends")
    try:
        # No run may start in the folder between the decision and the removal.
        with files.locked() if options.yes else nullcontext():
            entries = list_entries(files)
            reasons = _reasons(options, entries, files)
            removed = [entry for entry in entries if not reasons[entry.path]]
            if options.yes:
                files.remove(entry.path for entry in removed)
    except BlockingIOError as error:
        raise mistake(f"stepwrap {options.command}: {error}; wait until it ends") from error
    freed = sum(entry.num_bytes for entry in removed)
    if options.json:
        reason_texts = {path.name: reason for path, reason in reasons.items() if reason}
        names = [entry.path.name for entry in removed]
        done = {
            "removed" if options.yes else "would_remove": names,
            "kept": reason_texts,
            "bytes": freed,
        }
        print_json({"folder": str(files.folder), **done})
        return 0
    rows = (
        [
            entry.path.name,
            entry.meta.get("step"),
            size_text(entry.num_bytes),
            f"keep: {reasons[entry.path]}" if reasons[entry.path] else "remove",
            "" if entry.kind == "complete" and not entry.problem else entry.state,
        ]
        for entry in entries
    )
    print_table(("name", "step>", "size>", "", ""), rows)
    count = f"{len(removed)} of {len(entries)}, {size_text(freed)}"
    print(f"removed {count}" if options.yes else f"to remove: {count}; --yes removes them")
    return 0


def _reasons(options: Options, entries: Sequence[Entry], files: Files) -> dict[Path, str]:
    """Return why each checkpoint is kept; "" if it is removed."""
    folder = files.folder
    reasons: dict[Path, list[str]] = {entry.path: _rules(options, entry) for entry in entries}
    regular = [entry.path for entry in entries if entry.is_regular]
    for path in regular[-options.keep_last :] if options.keep_last else ():
        reasons[path].append(f"one of the last {options.keep_last}")
    # These read whole files: a checkpoint that the run cannot load protects nothing.
    files.fetch("latest")
    files.fetch("best")
    latest, best = find_checkpoint(folder, "latest"), find_checkpoint(folder, "best")
    if latest is not None and not options.unprotected:
        reasons[latest].append("latest")
    if best is not None and (options.keep_best or not options.unprotected):
        reasons[best].append("best")
    for link in filter(is_inner_link, folder.iterdir()):
        if (target := folder / link.resolve().name) in reasons:
            reasons[target].append(f"{link.name} links to it")
    if latest is None or not reasons[latest]:
        _keep_one(entries, reasons, files)
    return {path: ", ".join(texts) for path, texts in reasons.items()}


def _keep_one(entries: Sequence[Entry], reasons: Mapping[Path, list[str]], files: Files) -> None:
    """Keep an undamaged checkpoint if the rules keep none from which a run continues."""
    saved = [entry for entry in reversed(entries) if entry.meta]
    # Prefer complete checkpoints to abandoned and incomplete ones, and those that are kept.
    saved.sort(key=lambda entry: (not entry.is_regular, not reasons[entry.path]))
    for entry in saved:
        if not files.damage(entry.path, entry.meta["files"]):
            reasons[entry.path].append("no other undamaged one would be left")
            return


def _rules(options: Options, entry: Entry) -> list[str]:
    """Return the reasons to keep a checkpoint that do not depend on others."""
    reasons = []
    if any(fnmatch.fnmatchcase(entry.path.name, pattern) for pattern in options.keep):
        reasons.append("its name")
    if entry.kind in ("draft", "link"):
        reasons.append(f"a {entry.kind}")
    elif not entry.meta:
        reasons.append("no readable description")
    return reasons


# Output.


def print_json(content: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(content, indent=1, default=str))


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as a short text."""
    from rich.filesize import decimal

    return decimal(num_bytes)


def print_table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table; a head that ends in ">" aligns its column to the right."""
    # Imported lazily: JSON needs no table.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(
            head.rstrip(">"), justify="right" if head.endswith(">") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        # Other programs read whole lines.
        console.width = 10_000
    console.print(table, markup=False)
