"""Compare two runs of all benchmarks, and separate real changes from noise.

If a figure has a ratio, the ratios are compared, because a slower machine slows down both sides of
a ratio; otherwise the medians. A figure has changed if the two values differ by more than the
threshold and by more than the noise. The noise is the sum of the interquartile ranges of both runs,
each times 1 + 4/rounds, because few rounds underestimate the spread. A figure of a single round
never counts as changed. If one of our figures became worse, this is a regression; a peer's is not.
The times of the contestants in the denominators, which show how fast the machine was, are printed
with --all only. Exits with 1 if there is a regression.

    python benchmarks/compare.py OLD.json NEW.json [--threshold 0.05] [--all]
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report

Key = tuple[str, str, str]


def index_rows(results: dict[str, Any]) -> dict[Key, report.Figure]:
    return {
        (figure["benchmark"], figure["title"], figure["name"]): figure
        for figure in results["figures"]
    }


def verdict(
    old_figure: report.Figure, new_figure: report.Figure, threshold: float
) -> tuple[float, str]:
    """Return new/old as a ratio of costs, and "slower", "faster" or "noise"."""
    prefix = (
        "ratio_"
        if old_figure["ratio_to"] and old_figure["ratio_to"] == new_figure["ratio_to"]
        else ""
    )
    before, after = old_figure[f"{prefix}median"], new_figure[f"{prefix}median"]
    # Ratios are ratios of costs; only medians may be rates.
    change = before / after if not prefix and new_figure["better"] == "higher" else after / before
    noise = sum(
        figure[f"{prefix}iqr"] * (1 + 4 / figure["rounds"]) for figure in (old_figure, new_figure)
    )
    if min(old_figure["rounds"], new_figure["rounds"]) == 1 or abs(after - before) <= noise:
        return change, "noise"
    if change > 1 + threshold:
        return change, "slower"
    return change, "faster" if change < 1 / (1 + threshold) else "noise"


def differences(old_results: dict[str, Any], new_results: dict[str, Any]) -> Iterator[str]:
    """Yield other differences between the two runs, which may explain a change."""
    for key in ("mode", "commit"):
        if old_results[key] != new_results[key]:
            yield f"{key}: {old_results[key]} -> {new_results[key]}"
    for section in ("machine", "peers"):
        for key in sorted(old_results[section].keys() | new_results[section].keys()):
            before, after = old_results[section].get(key), new_results[section].get(key)
            if before != after:
                yield f"{key}: {before} -> {after}"


def compare(
    old_results: dict[str, Any], new_results: dict[str, Any], options: argparse.Namespace
) -> int:
    """Print the comparison and return the number of regressions."""
    before, after = index_rows(old_results), index_rows(new_results)
    regressions = 0
    for key in [key for key in before if key in after]:
        change, word = verdict(before[key], after[key], options.threshold)
        is_ours = key[2].startswith(report.OURS)
        if word == "slower" and is_ours:
            word = "REGRESSION"
            regressions += 1
        is_shown = word != "noise" and (is_ours or before[key]["ratio_to"])
        if is_shown or options.all:
            print(f"{change:7.3f}  {word:10}  {': '.join(key)}")
    for figures, other, side in ((before, after, "old"), (after, before, "new")):
        for key in sorted(figures.keys() - other.keys()):
            print(f"{'':7}  {'only in ' + side:10}  {': '.join(key)}")
    print(f"{len(before.keys() & after.keys())} figures in both, {regressions} regressions")
    return regressions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.05, help="0.05: ignore up to 5%%")
    parser.add_argument("--all", action="store_true", help="print all figures, also noise")
    options = parser.parse_args()
    old_results, new_results = report.read(options.old), report.read(options.new)
    print("\n".join(differences(old_results, new_results)))
    sys.exit(1 if compare(old_results, new_results, options) else 0)


if __name__ == "__main__":
    main()
