"""Damaged checkpoints are named, do not stop the search and run no code."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_parts import make_loader, make_state
from marks import slow
from ranks import run_ranks
from sharded_runs import make_run, train

from stepwrap.loops import (
    CheckpointError,
    EMAHook,
    EpochTrainLoop,
    GradNormHook,
    HookList,
    LoopState,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.loops.checkpoints.checkpoint import _digest
from stepwrap.loops.checkpoints.files import fingerprint
from stepwrap.loops.checkpoints.tensor_files import TensorFile, pack

OTHERS = [None, True, -1, 0, 1.5, float("nan"), "x", [], {}, [[]], torch.ones(2)]


def fresh() -> LoopState:
    state = make_state(accumulate=2)
    state.stateful = {"hooks.ema": EMAHook(), "hooks.grad_norm": GradNormHook()}
    return state


def _save_sharded(folder: Path) -> None:
    state = make_run("fsdp")
    train(state, range(1))
    save_checkpoint(folder, state)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two checkpoints, the last inside an accumulation window and a log interval."""
    folder = tmp_path_factory.mktemp("plain")
    state = fresh()
    save_checkpoint(folder, state)
    hooks: Any = [*state.stateful.values()]
    EpochTrainLoop(make_loader(10), max_epochs=1).run(state, HookList(hooks))
    save_checkpoint(folder, state)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(_save_sharded, 2, folder)
    return folder


def last(folder: Path) -> Path:
    return max(folder.glob("step_*"))


def copied(folder: Path, target: Path) -> Path:
    """Copy a folder and return its last checkpoint."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    return last(target)


def rewritten(path: Path, name: str, content: Any) -> None:
    """Replace the content of a file and its checksum."""
    if isinstance(content, TensorFile):
        content.write(path)
    else:
        torch.save(content, path / name)
    meta = json.loads((path / "checkpoint.json").read_text())
    meta["files"][name] = fingerprint(path / name)
    meta["sha256"] = _digest(meta)
    (path / "checkpoint.json").write_text(json.dumps(meta, indent=2))


def _other_file(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.unlink()
        make(file)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b" "),
    "flipped": lambda file: file.write_bytes(
        bytes([file.read_bytes()[0] ^ 1, *file.read_bytes()[1:]])
    ),
    "folder": _other_file(Path.mkdir),
    "pipe": _other_file(os.mkfifo),
    "endless": _other_file(lambda file: file.symlink_to("/dev/zero")),
    "loop": _other_file(lambda file: file.symlink_to(file)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_taken(
    plain: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    for file in last(plain).iterdir():
        caplog.clear()
        bad = copied(plain, tmp_path / "run")
        DAMAGES[kind](bad / file.name)
        checkpoint = find_checkpoint(tmp_path / "run")
        assert checkpoint == min(bad.parent.glob("step_*"))
        assert f"{bad}" in caplog.text
        assert file.name in caplog.text
        with pytest.raises(CheckpointError, match=file.name):
            load_checkpoint(bad).restore(fresh())


TEXTS = ["", "null", "3", "[]", "{}", "NaN", '"x"', '{"format": NaN}', "[" * 99999, "\ud800"]


def _descriptions(meta: dict[str, Any]) -> Iterator[str]:
    """Yield changed descriptions without the digest that would reveal every change."""
    yield from TEXTS
    for key in meta:
        if key == "sha256":
            continue
        without = {k: v for k, v in meta.items() if k not in (key, "sha256")}
        yield json.dumps(without)
        for other in OTHERS[:-1]:
            yield json.dumps({**without, key: other})
    for name in ("../model.safetensors", "/etc/passwd", "", "a\0b"):
        files = {**meta["files"], name: meta["files"]["model.safetensors"]}
        digest = _digest({**meta, "files": files})
        yield json.dumps({**meta, "files": files, "sha256": digest}, indent=2)


def test_a_description_of_another_shape_is_named(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = copied(plain, tmp_path / "run")
    good = min(bad.parent.glob("step_*"))
    meta = json.loads((bad / "checkpoint.json").read_text())
    for text in _descriptions(meta):
        (bad / "checkpoint.json").write_bytes(text.encode(errors="surrogatepass"))
        caplog.clear()
        assert find_checkpoint(bad.parent) == good, text[:200]
        assert f"{bad} is damaged: checkpoint.json" in caplog.text, text[:200]


def _damaged(content: bytes, chance: random.Random) -> bytes:
    """Return content with bits and bytes changed, dropped, repeated, moved or inserted."""
    at, other = chance.randrange(len(content)), chance.randrange(len(content))
    byte, length = bytes([chance.randrange(256)]), chance.randint(1, 32)
    before, after = content[:at], content[at:]
    return chance.choice(
        [
            before + bytes([after[0] ^ 1 << chance.randrange(8)]) + after[1:],
            before + byte + after[1:],
            before + byte + after,
            before + chance.choice(b" \n\r\t").to_bytes(1, "big") + after,
            before + after[length:],
            before + after[:length] + after,
            before + bytes(len(after[:length])) + after[length:],
            before + content[other : other + 1] + after[1:],
            before,
            after,
        ]
    )


@pytest.mark.parametrize(
    "numbers", [range(300), *slow(range(300, 1500), range(1500, 2700), range(2700, 4000))], ids=str
)
def test_any_damage_of_bytes_is_named(
    plain: Path, tmp_path: Path, numbers: range, caplog: pytest.LogCaptureFixture
) -> None:
    bad = copied(plain, tmp_path / "run")
    good, files = min(bad.parent.glob("step_*")), sorted(bad.iterdir())
    for number in numbers:
        chance = random.Random(number)
        # Damage the description half of the time, because no other file is a check of it.
        file = chance.choice([bad / "checkpoint.json", chance.choice(files)])
        content = file.read_bytes()
        damaged = _damaged(content, chance)
        file.write_bytes(damaged)
        caplog.clear()
        checkpoint = find_checkpoint(bad.parent)
        assert checkpoint == (bad if damaged == content else good), number
        # A change to a later format number is valid.
        is_later = re.search(rf"{re.escape(str(bad))} has format \d+;.* skipped", caplog.text)
        assert damaged == content or is_later or f"{bad} is damaged" in caplog.text, number
        file.write_bytes(content)


def test_an_entry_of_a_description_that_was_changed_is_found(plain: Path, tmp_path: Path) -> None:
    bad = copied(plain, tmp_path / "run")
    meta = json.loads((bad / "checkpoint.json").read_text())
    for change in ({"serial": 1}, {"best": True}, {"step": 1}, {"metrics": {"loss": 0.0}}):
        (bad / "checkpoint.json").write_text(json.dumps({**meta, **change}))
        with pytest.raises(CheckpointError, match=r"checkpoint\.json: checksum mismatch"):
            load_checkpoint(bad)


def _replaced(content: Any, depth: int = 5) -> Iterator[Any]:
    """Yield copies of nested containers, each with one entry missing or of another type."""
    for other in OTHERS:
        yield copy.copy(other)
    if depth == 0 or not isinstance(content, (dict, list, tuple)):
        return
    keys = list(content) if isinstance(content, dict) else range(len(content))
    for key in list(keys)[:3]:
        for changed in _replaced(content[key], depth - 1):
            if isinstance(content, tuple):
                yield (*content[:key], changed, *content[key + 1 :])
            else:
                damaged = copy.copy(content)
                damaged[key] = changed
                yield damaged
        if isinstance(content, dict):
            yield {k: v for k, v in content.items() if k != key}


def _check_contents(folder: Path, target: Path, name: str, every: int) -> int:
    """Check each `every`-th change of a file's content; return the number of errors."""
    bad = copied(folder, target)
    content = load_checkpoint(bad).read(name)
    texts = []
    for changed in itertools.islice(_replaced(content), 0, None, every):
        rewritten(bad, name, pack(name.removesuffix(".safetensors"), changed))
        try:
            load_checkpoint(bad).restore(fresh())
        except CheckpointError as error:
            texts.append(str(error))
    # A rank's gradients and logs are searched in the files of all ranks.
    names = (name, "rank_*") if name.startswith("rank_") else (name,)
    unnamed = [text for text in texts if str(bad) not in text or not any(n in text for n in names)]
    assert unnamed == []
    return len(texts)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optim.safetensors", "state.safetensors", "rank_00000.safetensors"],
)
@pytest.mark.parametrize("every", [5, *slow(1)])
def test_content_of_another_kind_is_named(
    name: str, every: int, plain: Path, tmp_path: Path
) -> None:
    assert _check_contents(plain, tmp_path / "run", name, every) > 20 // every


def test_only_files_that_can_be_read_are_listed(sharded: Path) -> None:
    checkpoint = load_checkpoint(last(sharded))
    for name in ("checkpoint.json", "nothing.pt"):
        with pytest.raises(CheckpointError, match=f"must be one of .*, got {name}") as caught:
            checkpoint.read(name)
        listed = str(caught.value).partition("one of ")[2].partition(", got")[0].split(", ")
        for file_name in listed:
            checkpoint.read(file_name)


class Harm:
    """An object whose unpickling creates a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_no_pickle_is_executed(plain: Path, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for name in (
        "model.safetensors",
        "optim.safetensors",
        "state.safetensors",
        "rank_00000.safetensors",
    ):
        bad = copied(plain, tmp_path / "run")
        for harmful in (Harm(mark), {"model": Harm(mark)}):
            rewritten(bad, name, harmful)
            with pytest.raises(CheckpointError, match=f"{name}: the content cannot be restored"):
                load_checkpoint(bad).restore(fresh())
    assert not mark.exists()


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
