"""Print the figures of benchmarks as a table, write them as JSON, and draw them as a chart.

A benchmark passes one value per round and contestant to a `Report`, and gets the options that all
benchmarks share from `parse_options`. A contestant whose name begins with "stepwrap" is ours. A
ratio compares two contestants in the same round and is always a ratio of costs: 0.5 is half the
time, or twice the rate. The table shows the medians over the rounds, with the interquartile range
after `±`.

    python benchmarks/report.py RESULTS.json                                print the table again
    python benchmarks/report.py RESULTS.json --update docs/performance.md   write it into that page
"""

import argparse
import json
import math
import os
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

Figure = dict[str, Any]

OURS = "stepwrap"
# The figures in the table of docs/performance.md: benchmark, title and contestant.
HEADLINES = (
    ("step_overhead", "a training step", "stepwrap wrapper"),
    ("step_overhead", "a training step", "stepwrap loop, default hooks"),
    ("step_overhead", "a training step", "Lightning Trainer"),
    ("step_overhead", "a training step", "JAX, jitted step"),
    ("compiled", "a step of the perceptron", "stepwrap, compile: step"),
    ("compiled_ddp", "2 ranks, 10^6 parameters: a step", "stepwrap, compile: step"),
    ("wrappers", "fsdp, 10^6 parameters: a step", "stepwrap"),
    ("sync_batchnorm", "CNN, 2 ranks", "stepwrap"),
    ("feeding", "samples, digits", "stepwrap, in_memory: true"),
    ("pools", "tensors of 1 MB as arguments", "stepwrap Pool"),
)
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def parse_options(parser: argparse.ArgumentParser, quick: Mapping[str, Any]) -> argparse.Namespace:
    """Add the options that all benchmarks share, and parse the command line.

    Args:
        parser: the parser of one benchmark, with its specific options.
        quick: the defaults of options under `--quick`.
    """
    settings = ", ".join(f"{name} {value}" for name, value in quick.items())
    parser.add_argument("--quick", action="store_true", help=f"a short run ({settings})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures, one per line")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**quick)
    return parser.parse_args()


class Report:
    """Prints the figures of one benchmark, and appends them to a file.

    Args:
        path: a file that gets one line of JSON per figure; None for no file.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(
        self,
        title: str,
        unit: str,
        values: Mapping[str, Sequence[float]],
        ratio_to: str | Mapping[str, str],
        *,
        higher_is_better: bool = False,
        notes: Mapping[str, str] | None = None,
        summary: Collection[str] = (),
    ) -> None:
        """Add contestants that were measured in the same rounds.

        Args:
            title: the measured quantity, unique within a benchmark.
            unit: the unit of the values.
            values: one positive value per round, by contestant.
            ratio_to: the contestant with which all are compared, or a mapping of contestants to
                the one with which each is compared. Contestants that were not measured are ignored.
            higher_is_better: whether the values are rates, whose ratios are inverted.
            notes: remarks by contestant, needed for a fair comparison.
            summary: contestants to include in the chart, in addition to ours.
        """
        figures = []
        for name, rounds in values.items():
            peer = ratio_to if isinstance(ratio_to, str) else ratio_to.get(name)
            figure: Figure = {
                "title": title,
                "name": name,
                "unit": unit,
                "better": "higher" if higher_is_better else "lower",
                "rounds": len(rounds),
                **spread(rounds),
                "ratio_to": None,
                "note": (notes or {}).get(name, ""),
                "summary": name.startswith(OURS) or name in summary,
            }
            if peer is not None and peer in values and peer != name:
                pairs = zip(rounds, values[peer], strict=True)
                ratios = [b / a if higher_is_better else a / b for a, b in pairs]
                ratio = {f"ratio_{key}": value for key, value in spread(ratios).items()}
                figure |= {"ratio_to": peer, **ratio}
            figures.append(figure)
        print("\n".join(table(figures)), flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(figure) + "\n" for figure in figures)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the interquartile range."""
    if len(values) == 1:
        return {"median": values[0], "iqr": 0.0}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "iqr": high - low}


def sort_titles(figures: Iterable[Figure]) -> Iterator[tuple[str, list[Figure]]]:
    """Group figures by "benchmark: title"."""

    def heading(figure: Figure) -> str:
        return ": ".join(figure[key] for key in ("benchmark", "title") if key in figure)

    for title, group in groupby(figures, heading):
        yield title, list(group)


def table(figures: Iterable[Figure]) -> Iterator[str]:
    """Yield the lines of a table: each figure with its spread and its ratio."""
    for title, group in sort_titles(figures):
        yield title
        for figure in group:
            value = f"{number(figure['median'])} ±{number(figure['iqr'], 2)} {figure['unit']}"
            about = [f"to {figure['ratio_to']}"] if figure["ratio_to"] else []
            line = f"  {figure['name']:42} {value:>22} {compute_ratio(figure):>15}"
            yield "  ".join([line, *about, figure["note"]]).rstrip()


def markdown(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a page: the origin of the figures, and a table of the main ones."""
    machine = results["machine"]
    yield (
        f"The {results['mode']} run of {results['date'][:10]}, commit {results['commit']}: "
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{machine['device']}."
    )
    yield from ("", "| what | who | median | ratio | to |", "|---|---|--:|--:|---|")
    figures = {
        tuple(figure[key] for key in ("benchmark", "title", "name")): figure
        for figure in results["figures"]
    }
    for figure in filter(None, map(figures.get, HEADLINES)):
        subject = f"{figure['benchmark']}: {figure['title']}"
        name = f"{figure['name']}: {figure['note']}" if figure["note"] else figure["name"]
        value = f"{number(figure['median'])} {figure['unit']}"
        to = figure["ratio_to"] or ""
        ratio = f"{figure['ratio_median']:.2f}" if to else ""
        yield f"| {subject} | {name} | {value} | {ratio} | {to} |"


def compute_ratio(figure: Figure) -> str:
    if figure["ratio_to"] is None:
        return ""
    return f"{figure['ratio_median']:.3f} ±{figure['ratio_iqr']:.3f}"


def number(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits."""
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(max(decimals, 0), 6)}f}"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios of the summary as horizontal bars into a PNG; ours are blue."""
    os.environ.setdefault("MPLBACKEND", "agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    figures = [figure for figure in results["figures"] if figure["summary"] and figure["ratio_to"]]
    labels = [f"{figure['benchmark']}: {figure['title']}, {figure['name']}" for figure in figures]
    ratios = [figure["ratio_median"] for figure in figures]
    colors = ["tab:blue" if figure["name"].startswith(OURS) else "silver" for figure in figures]
    canvas, axes = plt.subplots(figsize=(12, 1 + 0.2 * len(figures)))
    # Bars start at 1 and extend to the left if the ratio is below 1.
    bars = axes.barh(range(len(ratios)), [ratio - 1 for ratio in ratios], left=1, color=colors)
    axes.bar_label(bars, [f" {ratio:.2f} " for ratio in ratios], fontsize=7)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set_xlim(0.6 * min(ratios, default=1), 1.6 * max(ratios, default=1))
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("ratio of costs, log scale: left of 1 is better (blue: stepwrap)")
    canvas.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(canvas)
    # Reduce the file to about a quarter, because results are under version control.
    with Image.open(path) as image:
        image.convert("RGB").quantize(16).save(path, optimize=True)


def read(path: Path) -> dict[str, Any]:
    """Read a run of all benchmarks, as benchmarks/run.py writes it."""
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results


def update(page: Path, path: Path) -> None:
    """Replace the text between the two marks in a page by the figures of a file.

    Raises:
        ValueError: a mark is missing.
    """
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} must have the lines {BEGIN!r} and {END!r}")
    before, remainder = text.split(BEGIN)
    link = Path(os.path.relpath(path, page.parent)).as_posix()
    chart = f"![Ratios of costs]({link.removesuffix('.json')}.png)"
    lines = [f"All figures: [{path.name}]({link}).", *markdown(read(path)), "", chart]
    after = remainder.split(END)[1]
    page.write_text("\n".join([before + BEGIN, *lines, END + after]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Show the figures of a run of all benchmarks.")
    parser.add_argument("results", type=Path, help="a file of benchmarks/results")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="replace the table in a page")
    options = parser.parse_args()
    if options.update is None:
        print("\n".join(table(read(options.results)["figures"])))
    else:
        update(options.update, options.results)


if __name__ == "__main__":
    main()
