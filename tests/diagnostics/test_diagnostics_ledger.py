"""The ledger: its entries, its sensitivity to changes, and its files after crashes and damage."""

import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_parts import make_loader, make_state
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn
from warm import ended

from stepwrap.diagnostics import LedgerError, LedgerHook, first_difference, read_ledger
from stepwrap.diagnostics.fingerprint import hash_tensors, hash_words
from stepwrap.loops import (
    CheckpointHook,
    EpochTrainLoop,
    HookList,
    find_checkpoint,
    load_checkpoint,
)
from stepwrap.wrappers import OptimWrapper, StepFullyShardedDataParallel, SupervisedModel


def train(
    folder: Path,
    *hooks: Any,
    resume: bool = False,
    epochs: int = 2,
    accumulate: int = 1,
    **ledger: Any,
) -> None:
    """Train on 6 batches per epoch, shared by the ranks."""
    state = make_state(run_dir=folder, dropout=0.2, accumulate=accumulate)
    if resume:
        load_checkpoint(find_checkpoint(folder)).restore(state)
    ledger_hooks = [LedgerHook(**ledger)] if ledger else []
    loop = EpochTrainLoop(make_loader(shuffle=True, seed=5), max_epochs=epochs)
    loop.run(state, HookList([*hooks, *ledger_hooks]))


def stages(folder: Path, step: int) -> dict[str, list[str]]:
    by_stage: dict[str, list[str]] = {}
    for stage, name in read_ledger(folder).entry(step):
        by_stage.setdefault(stage, []).append(name)
    return by_stage


def test_an_entry_has_every_stage_of_its_step(tmp_path: Path) -> None:
    train(tmp_path, every_steps=5)
    assert read_ledger(tmp_path).steps == [0, 5, 10]
    assert stages(tmp_path, 10) == {
        "data": ["sample ids", "batch.0", "batch.1"],
        "random state": ["python", "numpy", "torch"],
        "forward": ["loss"],
        "gradient": ["group 0"],
        "update": ["group 0"],
    }


def test_a_full_entry_has_modules_and_parameters(tmp_path: Path) -> None:
    train(tmp_path, full=True)
    by_stage = stages(tmp_path, 3)
    names = ["net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias", "group 0"]
    assert by_stage["gradient"] == by_stage["update"] == names
    modules = ("data_preprocessor", "net.0", "net.1", "net.2", "net.3", "loss")
    assert by_stage["forward"] == [*(f"output of {name}" for name in modules), "loss"]


def test_an_entry_has_all_batches_of_its_window(tmp_path: Path) -> None:
    train(tmp_path, accumulate=2, every_steps=2)
    by_stage = stages(tmp_path, 2)
    assert by_stage["data"][:4] == ["sample ids", "batch.0", "batch.1", "sample ids of batch 2"]
    assert by_stage["forward"] == ["loss", "loss of batch 2"]
    assert by_stage["gradient"] == ["group 0"]


def test_a_ledger_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    for name, settings in (("with", {"full": True}), ("without", {})):
        train(tmp_path / name, CheckpointHook(), **settings)
    files = [load_checkpoint(find_checkpoint(tmp_path / n)) for n in ("with", "without")]
    weights, second = (checkpoint.read("model") for checkpoint in files)
    assert all(torch.equal(value, second[name]) for name, value in weights.items())
    assert torch.equal(*(checkpoint.read("rank_00000")["rng"]["torch"] for checkpoint in files))


def test_runs_that_are_alike_have_no_difference_and_groups_compare_with_a_full_one(
    tmp_path: Path,
) -> None:
    for name, settings in (("a", {"every_steps": 2}), ("b", {"full": True, "every_steps": 1})):
        train(tmp_path / name, **settings)
    a, b = (read_ledger(tmp_path / name) for name in "ab")
    assert first_difference(a, b) is None
    assert (a.is_full(2), b.is_full(2)) == (False, True)


@pytest.mark.parametrize("hasher", [hash_tensors, hash_words])
@pytest.mark.parametrize(
    "dtype", [torch.float32, *slow(torch.float64, torch.bfloat16, torch.int64)]
)
def test_every_bit_and_the_order_count(hasher: Any, dtype: torch.dtype) -> None:
    values = torch.randn(101).mul(100).to(dtype)

    def hashed(bits: Tensor) -> int:
        return int(hasher([bits[:40], bits[40:]]))

    bits = values.view(torch.uint8)
    before = hashed(bits)
    for _ in range(200):
        changed = bits.clone()
        changed[random.randrange(len(bits))] ^= 1 << random.randrange(8)
        assert hashed(changed) != before
    for _ in range(200):
        a, b = random.sample(range(101), 2)
        swapped = values.clone()
        swapped[[a, b]] = -swapped[[b, a]]
        if torch.equal(swapped, values):
            continue
        assert hashed(swapped.view(torch.uint8)) != before
    assert hashed(bits.clone()) == before
    assert hashed(torch.cat([bits, bits.new_zeros(1)])) != before


def test_hashes_of_words_do_not_collide() -> None:
    """Also if only sign bits differ."""
    signs = [torch.tensor([1.0 - 2 * (n >> at & 1) for at in range(12)]) for n in range(4096)]
    assert len({int(hash_words([row.view(torch.uint8)])) for row in signs}) == 4096


def test_words_of_several_blocks_are_hashed_whole() -> None:
    data = torch.zeros((1 << 23) + 4099, dtype=torch.uint8)
    hashes = {int(hash_words([data]))}
    for at in (0, (1 << 23) - 1, 1 << 23, len(data) - 1):
        data[at] = 1
        hashes.add(int(hash_words([data])))
        data[at] = 0
    assert len(hashes) == 5


def test_all_kinds_of_batch_items_are_hashed(tmp_path: Path) -> None:
    def entry(name: str, text: str, number: int) -> dict[Any, int]:
        state = make_state(run_dir=tmp_path / name)
        sparse = torch.eye(2).to_sparse()
        more = {"texts": ["a", text], "deep": [{"n": number, "none": None}], "sparse": sparse}
        batch = {"inputs": torch.ones(2, 4), "complex": torch.ones(2) * 1j, **more}
        model = state.model.module
        model.forward = lambda inputs, mode="", **options: {"loss": model.net(inputs).mean()}
        EpochTrainLoop([batch], max_epochs=1).run(state, HookList([LedgerHook()]))
        return read_ledger(tmp_path / name).entry(1)

    a, b, c = entry("a", "b", 1), entry("b", "c", 1), entry("c", "b", 2)
    assert {i.name for i in a if i.stage == "data"} == {
        f"batch.{key}" for key in ("inputs", "complex", "texts", "deep", "sparse")
    }
    assert [i.name for i in a if a[i] != b[i]] == ["batch.texts"]
    assert [i.name for i in a if a[i] != c[i]] == ["batch.deep"]


def test_arrays_of_objects_are_hashed_by_their_content(tmp_path: Path) -> None:
    def entry(name: str, ending: str) -> dict[Any, int]:
        state = make_state(run_dir=tmp_path / name)
        # Created anew, so that equal texts are different objects.
        texts = np.array(["".join(("a", "bc")), "".join(("d", ending))], dtype=object)
        batch = {"inputs": torch.ones(2, 4), "texts": texts}
        model = state.model.module
        model.forward = lambda inputs, mode="", **options: {"loss": model.net(inputs).mean()}
        EpochTrainLoop([batch], max_epochs=1).run(state, HookList([LedgerHook()]))
        return read_ledger(tmp_path / name).entry(1)

    reference, same, other = entry("a", "e"), entry("b", "e"), entry("c", "f")
    assert reference == same
    assert [i.name for i in reference if reference[i] != other[i]] == ["batch.texts"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse_tensors_are_hashed(layout: str) -> None:
    def hashed(matrix: Tensor) -> int | Tensor:
        block = (2, 2) if layout in ("bsr", "bsc") else None
        sparse = matrix.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=block)
        return hash_tensors([sparse])

    assert hashed(torch.eye(4)) == hashed(torch.eye(4))
    hashes = {hashed(tensor) for tensor in (torch.eye(4), 2 * torch.eye(4), torch.eye(4).flip(0))}
    assert len(hashes) == 3


def test_a_resumed_run_continues_its_file(tmp_path: Path) -> None:
    train(tmp_path / "whole", every_steps=1)
    broken = tmp_path / "broken"
    train(broken, CheckpointHook(every_steps=4, keep_last=None), every_steps=1, epochs=1)
    # The run resumes from step 4, so its later entries in the file no longer count.
    for path in (broken / "checkpoints").glob("step_00000006*"):
        path.rename(path.with_name("later"))
    file = broken / "ledger" / "rank_0.bin"
    file.write_bytes(file.read_bytes()[:-3])
    train(broken, resume=True, every_steps=3)
    ledger = read_ledger(broken)
    assert ledger.steps == [0, 1, 2, 3, 4, 6, 9, 12]
    assert first_difference(read_ledger(tmp_path / "whole"), ledger) is None


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_truncated_file_is_read_up_to_its_last_whole_entry(tmp_path: Path, cut: int) -> None:
    train(tmp_path, every_steps=1)
    file = tmp_path / "ledger" / "rank_0.bin"
    complete = read_ledger(tmp_path)
    file.write_bytes(file.read_bytes()[:-cut])
    truncated = read_ledger(tmp_path)
    assert truncated.steps == complete.steps[:-1]
    assert truncated.entry(11) == complete.entry(11)


def test_entries_from_a_damaged_one_on_are_ignored(tmp_path: Path) -> None:
    train(tmp_path, every_steps=1)
    file = tmp_path / "ledger" / "rank_0.bin"
    data = bytearray(file.read_bytes())
    data[-200] ^= 4
    file.write_bytes(data)
    assert read_ledger(tmp_path).steps in ([*range(n)] for n in range(10, 12))


def test_a_file_stays_below_its_bound_by_longer_intervals(tmp_path: Path) -> None:
    size = 4096
    train(tmp_path, every_steps=1, epochs=60, max_mib=size / 2**20)
    steps = read_ledger(tmp_path).steps
    assert (tmp_path / "ledger" / "rank_0.bin").stat().st_size <= size
    assert steps[:10] == [*range(10)]
    gaps = [after - before for before, after in zip(steps, steps[1:], strict=False)]
    assert set(gaps) >= {1, 2, 4, 8}
    assert gaps == sorted(gaps)
    assert steps[-1] > 100


KILLED = """
import sys, os, signal
sys.path[:0] = {path!r}
from pathlib import Path
from stepwrap.loops import Hook
from test_diagnostics_ledger import train

class Killer(Hook):
    order = 100
    def on_update(self, state):
        if state.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)

train(Path({folder!r}), Killer(), every_steps=1)
"""


@pytest.mark.slow
def test_a_kill_loses_no_entry(tmp_path: Path) -> None:
    code = KILLED.format(path=sys.path, folder=str(tmp_path / "killed"))
    assert ended("-c", code).returncode == -signal.SIGKILL
    train(tmp_path / "whole", every_steps=1)
    killed = read_ledger(tmp_path / "killed")
    assert killed.steps == [*range(8)]
    assert first_difference(read_ledger(tmp_path / "whole"), killed) is None


def train_sharded(folder: Path, scale: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model = StepFullyShardedDataParallel(SupervisedModel(net, nn.CrossEntropyLoss()))
    state = make_state(run_dir=folder)
    state.model = model
    state.optim_wrapper = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=0.01 * scale))
    loop = EpochTrainLoop(make_loader(), max_epochs=1)
    loop.run(state, HookList([LedgerHook(full=True)]))


def test_sharded_runs_have_ledgers(tmp_path: Path) -> None:
    for name, scale in (("a", 1.0), ("b", 1.0), ("c", 1.5)):
        run_ranks(train_sharded, 2, tmp_path / name, scale)
    a, b, c = (read_ledger(tmp_path / name) for name in "abc")
    assert a.world_size(1) == 2
    assert first_difference(a, b) is None
    assert str(first_difference(a, c)) == "step 1, rank 0, update: net.0.weight"


def test_ledgers_that_cannot_be_compared_raise_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="nothing .*no such folder"):
        read_ledger(tmp_path / "nothing")
    with pytest.raises(LedgerError, match="has no ledger: train with"):
        read_ledger(tmp_path)
    train(tmp_path / "one", every_steps=1)
    run_ranks(train, 2, tmp_path / "two", every_steps=1)
    ledger, two = read_ledger(tmp_path / "one"), read_ledger(tmp_path / "two")
    with pytest.raises(LedgerError, match="ranks.* step 0 .*one/ledger has 1 .* has 2"):
        first_difference(ledger, two)
    with pytest.raises(LedgerError, match="no step in common"):
        first_difference(ledger, ledger, after=12)
    with pytest.raises(KeyError, match="rank 1 of 1"):
        ledger.entry(1, 1)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="every_steps must .*>= 1, got 0"):
        LedgerHook(every_steps=0)
    with pytest.raises(ValueError, match="max_mib must be > 0, got 0"):
        LedgerHook(max_mib=0)


def test_without_a_folder_nothing_is_written() -> None:
    state = make_state()
    EpochTrainLoop(make_loader(), max_epochs=1).run(state, HookList([LedgerHook()]))
    assert state.step == 6
