"""Build the page of runs, and write it to a file: ``stepwrap report``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from ...registry.local_paths import remote_url
from ...runner.command.command import Options, mistake, output
from .run_files import read_all


def run_report(options: Options) -> int:
    """Write a file that shows the runs without a network."""

    def fail(text: str) -> Exception:
        return mistake(f"stepwrap report: {text}")

    options.out = options.out or "report.html"
    with output(options, replace=True) as out:
        facts = _write_report(_local_folders(options.words, fail), out, fail)
    print(f"report: {options.out} ({facts}); open it in a browser")
    return 0


def _local_folders(words: list[str], fail: Callable[[str], Exception]) -> list[str]:
    """Return the folders of runs; a URL is replaced by a local copy."""
    if not any(map(remote_url, words)):
        return words
    # Imported here, because most reports have no URL.
    from ...runner.remote.copies import report_copy
    from ...runner.remote.stores import RemoteError

    try:
        return [str(report_copy(word)) for word in words]
    except RemoteError as error:
        raise fail(str(error)) from error


def _write_report(folders: list[str], out: Path, fail: Callable[[str], Exception]) -> str:
    """Write the page, and return its size and the number of runs."""
    runs = read_all(folders, fail)
    script = f"<script>{plotly_source(fail)}</script>"
    data = {
        "runs": [run.page_data() for run in runs],
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "version": metadata.version("stepwrap"),
    }
    try:
        out.write_text(page(data, script), encoding="utf-8")
    except OSError as error:
        raise fail(f"--out: {out} cannot be written: {error.strerror}") from error
    size_mib = out.stat().st_size / 2**20
    return f"{size_mib:.1f} MiB, {len(runs)} run(s)"


def page(data: Any, plotly: str) -> str:
    """Return the page as HTML.

    Args:
        data: the content; None for a page that asks the server for it.
        plotly: the element that loads Plotly.
    """
    text = _asset("page.html")
    for mark, content in {
        "/* style */": _asset("page.css"),
        "/* script */": _asset("page.js"),
        "<!-- plotly -->": plotly,
        "<!-- data -->": as_json(data),
    }.items():
        text = text.replace(mark, content, 1)
    return text


def as_json(data: Any) -> str:
    """Return JSON that can stand inside an element of HTML: no text in it can end the element."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def plotly_source(fail: Callable[[str], Exception]) -> str:
    """Return the code of Plotly; raise ``fail(text)`` if it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise fail("the page needs plotly: pip install 'stepwrap[report]'") from error
    return str(get_plotlyjs())


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
