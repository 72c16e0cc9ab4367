"""`stepwrap compare`, and wrong arguments of `stepwrap report`."""

import re
from pathlib import Path

import pytest
from run_folders import record, two_runs, write_folder

from stepwrap.diagnostics import LedgerHook
from stepwrap.runner.command.cli import main

EXPECTED = """\
settings that differ:
  name
    slow  "slow"
    fast  "fast"
  optimizer.lr
    slow  0.1
    fast  0.3
metrics, best and last:
  train/loss
    slow  0.181818 at step 100          0.181818 at step 100
    fast  0.0909091 at step 100         0.0909091 at step 100
  val/accuracy
    slow  0.98 at step 100              0.98 at step 100
    fast  0.99 at step 100              0.99 at step 100
speed, median:
  samples per second
    slow  200
    fast  100  (0.50 x)
"""


def test_differences_metrics_and_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *map(str, two_runs(tmp_path))]) == 0
    assert capsys.readouterr().out == EXPECTED


def test_ledgers_lead_to_bisect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = two_runs(tmp_path)
    for path in paths:
        (path / "ledger").mkdir()
        (path / "ledger" / "rank_0.bin").touch()
    assert main(["compare", *map(str, paths)]) == 0
    assert f"  stepwrap bisect {paths[0]} {paths[1]}\n" in capsys.readouterr().out
    assert LedgerHook.__doc__ is not None
    assert "ledger/rank_<rank>.bin" in LedgerHook.__doc__


def test_lines_fit_into_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["a" * 50, "b" * 50]
    for name in names:
        config = f"key: [{', '.join(name for _ in range(9))}]\n"
        write_folder(tmp_path / name, [record(1, loss=1.0)], config=config)
    assert main(["compare", *(str(tmp_path / name) for name in names)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(lines).count("b") >= 250


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other = (write_folder(tmp_path / name) for name in "ab")
    (folder / "config.yaml").unlink()
    assert main(["compare", str(folder), str(other)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"no settings: a \(.*config\.yaml\)", out)
    assert "metrics: no records yet" in out
    assert "speed: not recorded (hooks.throughput)" in out


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, _ = map(str, two_runs(tmp_path))
    assert main(["compare", slow, f"{slow}/"]) == 2
    assert "same folder" in capsys.readouterr().err
    assert main(["compare", slow, f"{slow}x"]) == 2
    assert f"did you mean {slow}" in capsys.readouterr().err
    assert main(["report", f"{slow}x"]) == 2
    assert "stepwrap report: " in capsys.readouterr().err
    assert main(["report", slow, "--out", str(tmp_path / "no" / "x.html")]) == 2
    assert re.search(r"x\.html .*written: No such file", capsys.readouterr().err)
    assert main(["serve", f"{slow}x"]) == 2
    assert f"{slow}x is not a folder" in capsys.readouterr().err


def test_the_missing_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, _ = map(str, two_runs(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    assert main(["report", slow]) == 2
    assert "pip install 'stepwrap[report]'" in capsys.readouterr().err
