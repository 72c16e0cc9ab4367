"""The shipped configs do on real data what their first lines say."""

import json
from pathlib import Path

import pytest
from marks import slow
from warm import run

from stepwrap.registry import check_config, load_config

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(file.stem for file in (ROOT / "configs").glob("*.yaml"))


def train(name: str, run_dir: Path, *overrides: str) -> str:
    words = "-m", "stepwrap.runner", "train", name, *overrides, "--run-dir", str(run_dir)
    return run(*words, cwd=run_dir.parent)


def last_record(run_dir: Path, phase: str) -> dict[str, float]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    record: dict[str, float] = [record for record in records if record["phase"] == phase][-1]
    return record


def test_there_are_configs() -> None:
    assert {"digits_ddp", "digits_single", "digits_accumulate_bf16", "source_lm"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_config_has_no_mistakes(name: str) -> None:
    assert check_config(load_config(name)).name == name


@pytest.mark.parametrize("name", slow("digits_single", "digits_ddp", "digits_accumulate_bf16"))
def test_digits_are_learnt(name: str, tmp_path: Path) -> None:
    out = train(name, tmp_path / "run")
    assert last_record(tmp_path / "run", "test")["accuracy"] >= 0.97
    assert (tmp_path / "run" / "curves.png").exists()
    assert f"curves: {tmp_path / 'run' / 'curves.png'}" in out
    assert "best checkpoint: " in out


@pytest.mark.slow
def test_language_model_beats_the_unigram_entropy(tmp_path: Path) -> None:
    out = train("source_lm", tmp_path / "run", "train.max_steps=100", "train.val_interval=50")
    record = last_record(tmp_path / "run", "val")
    # Letters, spaces and signs of source text have an entropy of a little over 3 nats.
    assert 2.5 < record["unigram"] < 3.5
    assert record["loss"] < record["unigram"] - 0.5
    assert "unigram" in out


@pytest.mark.parametrize("name", SHIPPED)
def test_a_copy_in_another_folder_has_the_same_settings(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "mine.yaml"
    copy.write_text((ROOT / "configs" / f"{name}.yaml").read_text())
    assert load_config(copy).to_dict() == load_config(name).to_dict()
