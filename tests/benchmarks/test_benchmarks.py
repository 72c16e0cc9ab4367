"""The tools around the benchmarks, and the interface of each benchmark; speed is not tested."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def run(*command: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import report

    return report


class Results:
    """Write files as `make bench` does."""

    def __init__(self, report: Any, folder: Path) -> None:
        self.report = report
        self.folder = folder

    def write(self, times: Mapping[str, Sequence[float]], **options: Any) -> Path:
        path = self.folder / f"{len(list(self.folder.iterdir()))}"
        self.report.Report(path).add("a step", "us", times, "by hand", **options)
        lines = path.read_text().splitlines()
        figures = [{"benchmark": "steps", **json.loads(line)} for line in lines]
        machine = {"cpu": "a CPU", "cores": 2, "torch": "2.13.0", "device": "cpu"}
        about = {"date": "2026-11-22T21:00+00:00", "commit": "abc", "mode": "full"}
        results = {**about, "machine": machine, "peers": {}, "figures": figures}
        path.write_text(json.dumps(results))
        return path


@pytest.fixture
def results(report: Any, tmp_path: Path) -> Results:
    return Results(report, tmp_path)


def compare(before: Path, after: Path, *options: object, code: int = 0) -> str:
    return run(BENCHMARKS / "compare.py", before, after, *options, code=code)


def scaled(values: Sequence[float], factor: float) -> list[float]:
    return [factor * value for value in values]


STEADY = [99.0, 100.0, 100.0, 101.0, 100.0]
RESTLESS = [80.0, 90.0, 100.0, 110.0, 130.0]


def test_compare_distinguishes_a_regression_from_noise(results: Results) -> None:
    before = results.write({"by hand": STEADY, "stepwrap": STEADY})
    slower = results.write({"by hand": STEADY, "stepwrap": scaled(STEADY, 1.2)})
    assert "1.200  REGRESSION  steps: a step: stepwrap" in compare(before, slower, code=1)
    assert "0.833  faster" in compare(slower, before)
    assert "REGRESSION" not in compare(before, slower, "--threshold", 0.25)

    before = results.write({"by hand": STEADY, "stepwrap": RESTLESS})
    slower = results.write({"by hand": STEADY, "stepwrap": scaled(RESTLESS, 1.2)})
    assert "REGRESSION" not in compare(before, slower)
    assert "1.200  noise" in compare(before, slower, "--all")

    # The spread of a single round is unknown.
    before = results.write({"by hand": [1.0], "stepwrap": [1.0]})
    slower = results.write({"by hand": [1.0], "stepwrap": [2.0]})
    assert "2.000  noise" in compare(before, slower, "--all")


def test_a_slower_machine_or_peer_is_not_a_regression(results: Results) -> None:
    names = ("by hand", "stepwrap", "peer")
    before = results.write(dict.fromkeys(names, STEADY))
    slow = scaled(STEADY, 2)
    assert "0 regressions" in compare(before, results.write(dict.fromkeys(names, slow)))
    times = {"by hand": STEADY, "stepwrap": STEADY, "peer": slow}
    assert "2.000  slower      steps: a step: peer" in compare(before, results.write(times))


def test_compare_names_figures_that_only_one_run_has(results: Results) -> None:
    before = results.write({"by hand": STEADY, "stepwrap old": STEADY})
    text = compare(before, results.write({"by hand": STEADY, "stepwrap new": STEADY}))
    assert "only in old  steps: a step: stepwrap old" in text
    assert "only in new  steps: a step: stepwrap new" in text


def test_ratios_are_ratios_of_costs(report: Any, tmp_path: Path) -> None:
    path, twice = tmp_path / "figures", scaled(STEADY, 2)
    values = {"by hand": STEADY, "stepwrap": twice}
    report.Report(path).add("times", "us", values, "by hand")
    report.Report(path).add("rates", "/s", values, "by hand", higher_is_better=True)
    figures = [json.loads(line) for line in path.read_text().splitlines()]
    assert [figure.get("ratio_median") for figure in figures] == [None, 2.0, None, 0.5]
    assert figures[1]["median"] == 200.0
    assert figures[1]["rounds"] == 5


GOOD = """
import argparse
from report import Report, parse_options
parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=7)
options = parse_options(parser, {"rounds": 3})
times = {"by hand": [2.0] * options.rounds, "stepwrap": [1.0] * options.rounds}
Report(options.json).add("a step", "us", times, "by hand")
"""


def test_all_benchmarks_run_and_one_that_fails_is_named(tmp_path: Path) -> None:
    for name in ("run.py", "report.py", "peers.txt"):
        shutil.copy(BENCHMARKS / name, tmp_path)
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "new_soak.py").write_text("raise SystemExit('a soak is not a benchmark')")
    assert "1.000 ±0 us" in run(tmp_path / "run.py", "--quick")
    (tmp_path / "bad.py").write_text("raise SystemExit('no luck today')")
    text = run(tmp_path / "run.py", "--results", tmp_path / "full", code=1)
    assert "no luck today" in text
    assert text.endswith("failed: bad\n")

    (quick,) = (tmp_path / "results").glob("*-quick.json")
    assert quick.with_suffix(".png").stat().st_size > 0
    (full,) = (tmp_path / "full").glob("*.json")
    result = json.loads(full.read_text())
    assert result["failed"] == ["bad"]
    assert [figure["rounds"] for figure in result["figures"]] == [7, 7]
    assert [figure["rounds"] for figure in json.loads(quick.read_text())["figures"]] == [3, 3]


def test_the_page_of_figures_matches_its_file(
    report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    copy = tmp_path / "docs" / "page.md"
    copy.parent.mkdir()
    copy.write_text(page, encoding="utf-8")
    named = re.search(r"\(\.\./(benchmarks/results/\S+\.json)\)", page)
    if named:
        path = tmp_path / named[1]
        path.parent.mkdir(parents=True)
        shutil.copy(ROOT / named[1], path)
        report.update(copy, path)
        assert copy.read_text(encoding="utf-8") == page
        assert all(f"| {name}" in page for _, _, name in report.HEADLINES)
    monkeypatch.setattr(report, "HEADLINES", [("steps", "a step", "stepwrap")])
    results_file = Results(report, tmp_path).write(
        {"by hand": STEADY, "stepwrap": scaled(STEADY, 2)}
    )
    report.update(copy, results_file)
    assert "| steps: a step | stepwrap | 200.0 us | 2.00 | by hand |" in copy.read_text(
        encoding="utf-8"
    )


@pytest.mark.slow
def test_every_benchmark_has_the_options_that_all_have(report: Any) -> None:
    programs = [BENCHMARKS / f"{name}.py" for name in run_names()]
    helps = {program.name: run(program, "--help") for program in programs}
    lacking = {
        name: [option for option in ("--quick", "--json") if option not in text]
        for name, text in helps.items()
    }
    assert {name: options for name, options in lacking.items() if options} == {}


def run_names() -> list[str]:
    """Return the benchmarks that benchmarks/run.py offers."""
    choices = re.search(r"--only \{([\w,]+)\}", run(BENCHMARKS / "run.py", "--help"))
    assert choices is not None
    return choices[1].split(",")
