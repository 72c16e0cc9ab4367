"""Run all benchmarks one after the other, and write their figures to a file.

Every file in this folder is a benchmark, except for the soak tests and the tools `report.py`,
`compare.py`, `turns.py` and this one. Each is a program with the options `--quick` and `--json`
(see `report.py`). Benchmarks with `--device` also run on CUDA; the others are skipped there. Prints
a table and writes `benchmarks/results/<date>.json` with a chart. A failing benchmark does not stop
the others, but makes this program fail at the end.

    python benchmarks/run.py [--quick] [--device cuda] [--only step_overhead wrappers]
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).resolve().parent
TOOLS = {"compare", "report", "run", "turns"}
PACKAGES = HERE / "peers.txt"
QUICK_TIMEOUT_S, TIMEOUT_S = 600, 7200


def benchmarks() -> list[str]:
    names = {file.stem for file in HERE.glob("*.py")} - TOOLS
    return sorted(name for name in names if not name.endswith("_soak"))


def has_device(name: str) -> bool:
    return '"--device"' in (HERE / f"{name}.py").read_text(encoding="utf-8")


def run_one(name: str, options: argparse.Namespace) -> list[report.Figure] | None:
    """Return the figures of one benchmark; if it fails, print its output and return None."""
    command = [sys.executable, str(HERE / f"{name}.py")]
    command += ["--quick"] if options.quick else []
    command += ["--device", options.device] if has_device(name) else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures")
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [*command, "--json", str(path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=QUICK_TIMEOUT_S if options.quick else TIMEOUT_S,
                check=True,
            )
            lines = path.read_text(encoding="utf-8").splitlines()
        except (subprocess.SubprocessError, FileNotFoundError) as error:
            output = done.stdout if isinstance(error, FileNotFoundError) else error.stdout
            print(f"{name}: {error}\n{output}", flush=True)
            return None
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return [{"benchmark": name, **json.loads(line)} for line in lines]


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Return the date, the commit, the machine and the versions of the packages."""
    now = datetime.now().astimezone()
    return {
        "date": now.isoformat(timespec="minutes"),
        "commit": commit(),
        "mode": "quick" if options.quick else "full",
        "machine": {
            "cpu": cpu(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "device": device(options.device),
        },
        "peers": dict(sorted(peers())),
    }


def commit() -> str:
    """Return the short hash of the commit, with a `+` if there are local changes."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--exclude=*", "--dirty=+"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def device(name: str) -> str:
    if not name.startswith("cuda"):
        return name
    import torch

    return torch.cuda.get_device_name(name)


def peers() -> list[tuple[str, str]]:
    """Return the installed packages of peers.txt with their versions."""
    versions = []
    for line in PACKAGES.read_text(encoding="utf-8").splitlines():
        name = line.split("=")[0].strip()
        if not name or name.startswith("#"):
            continue
        try:
            versions.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under five minutes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", choices=benchmarks(), default=benchmarks())
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="FOLDER")
    options = parser.parse_args()
    # Read the date and the commit before the benchmarks run.
    results = {**describe(options), "failed": [], "figures": []}
    options.results.mkdir(parents=True, exist_ok=True)
    stem = results["date"][:16].replace(":", "") + ("-quick" if options.quick else "")
    path = options.results / f"{stem}.json"
    for name in options.only:
        if options.device != "cpu" and not has_device(name):
            print(f"{name}: skipped, it measures the CPU only", flush=True)
        elif (figures := run_one(name, options)) is None:
            results["failed"].append(name)
        else:
            results["figures"] += figures
        # Write after each benchmark, so that an interrupted run keeps its figures.
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(report.table(results["figures"])))
    report.draw(results, path.with_suffix(".png"))
    print(f"written: {path} and {path.with_suffix('.png').name}")
    if results["failed"]:
        sys.exit(f"failed: {', '.join(results['failed'])}")


if __name__ == "__main__":
    main()
