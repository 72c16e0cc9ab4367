"""Compare two runs of all benchmarks: what became slower, and what is only noise.

Compared are the ratios of figures that have one, as both sides of a ratio were measured at the same
time and a slower machine slows down both; of the others, the medians. A figure has changed if the
two differ by more than the threshold, and by more than the spreads of both runs together: the sum
of their interquartile ranges, each times 1 + 4/rounds, as few rounds show little of the spread.
Nothing is said of a figure of a single round. A change for the worse is a regression if the figure
is ours: a peer may change as it likes. The times of what others are compared with, which tell how
fast the machine was, are shown by --all alone. Exits with 1 if there is a regression.

    python benchmarks/compare.py OLD.json NEW.json [--threshold 0.05] [--all]
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report

Key = tuple[str, str, str]


def by_key(results: dict[str, Any]) -> dict[Key, report.Figure]:
    return {(one["benchmark"], one["title"], one["name"]): one for one in results["figures"]}


def verdict(old: report.Figure, new: report.Figure, threshold: float) -> tuple[float, str]:
    """Return new/old, and "slower", "faster" or "noise"; a ratio above 1 is for the worse."""
    prefix = "ratio_" if old["ratio_to"] and old["ratio_to"] == new["ratio_to"] else ""
    before, after = old[f"{prefix}median"], new[f"{prefix}median"]
    # Ratios are ratios of costs; only medians may be rates.
    change = before / after if not prefix and new["better"] == "higher" else after / before
    noise = sum(one[f"{prefix}iqr"] * (1 + 4 / one["rounds"]) for one in (old, new))
    if min(old["rounds"], new["rounds"]) == 1 or abs(after - before) <= noise:
        return change, "noise"
    if change > 1 + threshold:
        return change, "slower"
    return change, "faster" if change < 1 / (1 + threshold) else "noise"


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield what else differs between the two runs, as that may be the reason."""
    for key in ("mode", "commit"):
        if old[key] != new[key]:
            yield f"{key}: {old[key]} -> {new[key]}"
    for part in ("machine", "peers"):
        for key in sorted(old[part].keys() | new[part].keys()):
            before, after = old[part].get(key), new[part].get(key)
            if before != after:
                yield f"{key}: {before} -> {after}"


def compare(old: dict[str, Any], new: dict[str, Any], options: argparse.Namespace) -> int:
    """Print the comparison; returns the number of regressions."""
    before, after = by_key(old), by_key(new)
    regressions = 0
    for key in [key for key in before if key in after]:
        change, word = verdict(before[key], after[key], options.threshold)
        is_ours = key[2].startswith(report.OURS)
        if word == "slower" and is_ours:
            word = "REGRESSION"
            regressions += 1
        is_told = word != "noise" and (is_ours or before[key]["ratio_to"])
        if is_told or options.all:
            print(f"{change:7.3f}  {word:10}  {': '.join(key)}")
    for one, other, side in ((before, after, "old"), (after, before, "new")):
        for key in sorted(one.keys() - other.keys()):
            print(f"{'':7}  {'only in ' + side:10}  {': '.join(key)}")
    print(f"{len(before.keys() & after.keys())} figures in both, {regressions} regressions")
    return regressions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.05, help="0.05: 5%% never count")
    parser.add_argument(
        "--all", action="store_true", help="print what is only noise too, and the machine's speed"
    )
    options = parser.parse_args()
    old, new = report.read(options.old), report.read(options.new)
    print("\n".join(differences(old, new)))
    sys.exit(1 if compare(old, new, options) else 0)


if __name__ == "__main__":
    main()
