"""Run everything that needs a GPU, from simple to complex, and write one report with a verdict.

Each stage runs the tests marked ``gpu`` of some folders, or a command. The first stage that fails
ends the check, because later stages build on it. A skipped test fails its stage: it would say that
something works that has not been tried. Tests that need two or four GPUs (``gpu2``, ``gpu4``) are
part of the check if the machine has them.

    python tests/gpu_check.py [--only wrappers loops] [--report build/gpu-check.txt]
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[1]
WRAPPERS = "tests/wrappers"
BATCHNORM = f"{WRAPPERS}/test_wrappers_sync_batchnorm.py"
PARITY = f"{WRAPPERS}/test_wrappers_parity_gpu.py"
COMPILED = f"{WRAPPERS}/test_wrappers_compiled_step.py"
CONFIG = "configs/digits_single.yaml"


@dataclass(frozen=True)
class Stage:
    """A part of the check: tests below ``paths`` without those below ``excluded``, then commands.

    Attributes:
        marker: which tests run; "gpu2" and "gpu4" need as many devices.
    """

    name: str
    paths: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    marker: str = "gpu"

    @property
    def num_devices(self) -> int:
        return int(self.marker.removeprefix("gpu") or 1)


STAGES = (
    Stage("wrappers", (WRAPPERS,), excluded=(BATCHNORM, PARITY, COMPILED)),
    Stage("loops", ("tests/loops",)),
    Stage("batchnorm", (BATCHNORM,)),
    Stage("collectives", ("tests/collectives",)),
    Stage(
        "runner",
        ("tests/runner",),
        commands=(("-m", "stepwrap.runner", "verify-resume", CONFIG, "device=cuda"),),
    ),
    Stage("parity", (PARITY,)),
    Stage("compiled", (COMPILED,)),
    Stage("plugins", ("tests/plugins",)),
    Stage("rpc", ("tests/rpc", "tests/parallel")),
    Stage("two-gpus", ("tests",), marker="gpu2"),
    Stage("four-gpus", ("tests",), marker="gpu4"),
    Stage(
        "benchmarks",
        commands=(
            ("benchmarks/run.py", "--quick", "--device", "cuda", "--results", "build/gpu-check"),
        ),
    ),
)


class Report:
    """Write to the terminal and to a file at the same time."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        for stream in (sys.stdout, self._file):
            stream.write(text)
            stream.flush()

    def run(self, command: list[str]) -> int:
        """Run a command of Python, with its output in the report; return its exit code."""
        self.write(f"$ python {' '.join(command)}\n")
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.write(line)
        return process.returncode


def describe_environment() -> tuple[str, int]:
    """Return a description of software and devices, and the number of CUDA devices."""
    import torch

    lines = [
        f"python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}",
        f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
    ]
    if torch.cuda.is_available():
        nccl = torch.cuda.nccl.version() if hasattr(torch._C, "_nccl_version") else None
        lines.append(f"NCCL {nccl}")
    count = torch.cuda.device_count()
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        gib = torch.cuda.mem_get_info(index)[1] / 2**30
        name = torch.cuda.get_device_name(index)
        lines.append(f"cuda:{index}: {name}, capability {major}.{minor}, {gib:.0f} GiB")
    git = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    lines.append(f"stepwrap {commit or 'without git'}")
    return "\n".join(lines), count


def run_tests(stage: Stage, report: Report) -> tuple[str | None, int]:
    """Run the tests of a stage; return why it failed, or None, and the number of tests."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        command = ["-m", "pytest", "-m", stage.marker, f"--junitxml={results}"]
        command += [f"--ignore={path}" for path in stage.excluded]
        code = report.run([*command, *stage.paths])
        if not results.exists():
            return f"pytest ended with code {code}", 0
        suite = ElementTree.parse(results).getroot()
        suite = suite if suite.tag == "testsuite" else suite[0]
        numbers = {
            key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")
        }
    count = numbers.pop("tests")
    counted = [f"{number} {key}" for key, number in numbers.items() if number]
    if counted:
        return ", ".join(counted), count
    if not count:
        return "no test ran", count
    return (None if code == 0 else f"pytest ended with code {code}"), count


def run_stage(stage: Stage, report: Report) -> tuple[str | None, int]:
    """Run the tests and commands of a stage; return why it failed, or None, and the tests."""
    count = 0
    if stage.paths:
        reason, count = run_tests(stage, report)
        if reason is not None:
            return reason, count
    for command in stage.commands:
        if code := report.run([*command]):
            return f"{command[-1]}: exit code {code}", count
    return None, count


def check(names: list[str], report: Report) -> bool:
    """Run the stages; return whether all of them passed."""
    text, num_devices = describe_environment()
    report.write(f"{text}\n")
    if not num_devices:
        report.write("verdict: FAILED in environment: torch finds no CUDA device\n")
        return False
    total, passed, absent = 0, [], []
    for stage in STAGES:
        if stage.name not in names:
            continue
        if stage.num_devices > num_devices:
            absent.append(stage.name)
            continue
        report.write(f"\n== {stage.name}\n")
        start = time.monotonic()
        reason, count = run_stage(stage, report)
        total += count
        report.write(f"== {stage.name}: {reason or 'passed'}, {time.monotonic() - start:.0f} s\n")
        if reason is not None:
            report.write(f"\nverdict: FAILED in {stage.name}: {reason}\n")
            return False
        passed.append(stage.name)
    needs = f"; not run for want of devices: {', '.join(absent)}" if absent else ""
    stages = ", ".join(passed)
    report.write(f"\nverdict: PASSED: {total} tests, none skipped ({stages}){needs}\n")
    return bool(passed)


def main() -> None:
    """Run the check, and exit with 1 if a stage failed."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STAGE")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "gpu-check.txt")
    options = parser.parse_args()
    options.report.parent.mkdir(parents=True, exist_ok=True)
    with options.report.open("w", encoding="utf-8") as file:
        has_passed = check(options.only, Report(file))
    print(f"written: {options.report}")
    if not has_passed:
        sys.exit("Please open an issue and attach this file.")


if __name__ == "__main__":
    main()
