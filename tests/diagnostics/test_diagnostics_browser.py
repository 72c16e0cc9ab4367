"""The pages of `stepwrap report` and `stepwrap serve` in a real browser."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import FOREIGN_NAME, Browser
from run_folders import lines, record, two_runs, write_folder
from runner_parts import Command

from stepwrap.diagnostics.reports.page import plotly_source
from stepwrap.diagnostics.reports.serve import Folder, RunServer
from stepwrap.runner.command.cli import main

pytestmark = pytest.mark.slow


def chart(browser: Browser, name: str) -> Any:
    """Wait until a chart is drawn, and return its picture."""
    script = "return document.querySelector(`[data-name='${arguments[0]}'] .main-svg`)"
    return browser.wait(lambda: browser.run(script, name))


def shown_at(browser: Browser, name: str, step: int) -> str:
    """Move the mouse to a step of a chart and return the text of the label."""
    chart(browser, name)
    x, y = browser.run(
        """
        const chart = document.querySelector(`[data-name="${arguments[0]}"]`);
        chart.scrollIntoView({ block: "center", behavior: "instant" });
        const plot = chart.querySelector(".nsewdrag").getBoundingClientRect();
        const axis = chart._fullLayout.xaxis;
        return [plot.left + axis.l2p(arguments[1]), plot.top + plot.height / 2];
        """,
        name,
        step,
    )

    def text() -> str:
        # Plotly shows the label only after a movement inside the plot.
        browser.move_to(x + 3, y)
        browser.move_to(x, y)
        return str(
            browser.run(
                "return [...document.querySelectorAll(`[data-name='${arguments[0]}'] .hoverlayer "
                "text`)].map(one => one.textContent).join(' ')",
                name,
            )
        )

    return browser.wait(text)


def report(folder: Path, *paths: Path) -> Path:
    out = folder / "report.html"
    assert main(["report", *map(str, paths), "--out", str(out)]) == 0
    return out


def assert_quiet(browser: Browser, *addresses: str) -> None:
    """Check that the page logged no error and requested only addresses with these prefixes."""
    assert browser.errors() == []
    assert [request for request in browser.requests() if not request.startswith(addresses)] == []


def test_a_record_is_read_by_hover_and_runs_are_overlaid(browser: Browser, tmp_path: Path) -> None:
    page = report(tmp_path, *two_runs(tmp_path))
    browser.open(page)
    text = shown_at(browser, "loss", 40)
    assert re.search(r"slow train : 0\.4\b", text), text
    assert re.search(r"fast train : 0\.2\b", text), text
    names = browser.run("return document.querySelector('[data-name=loss]').data.map(d => d.name)")
    assert names == ["slow train", "fast train"]
    browser.run("document.querySelector('[data-run=slow]').click()")
    names = browser.run("return document.querySelector('[data-name=loss]').data.map(d => d.name)")
    assert names == ["train"]
    assert_quiet(browser, page.as_uri())


def test_rates_have_the_colors_of_their_runs_and_ranks_are_no_metric(
    browser: Browser, tmp_path: Path
) -> None:
    paths = []
    for name in ("a", "b"):
        rates = {"lr": 0.1, "lr/norm": 0.2, "slowest_rank": 1.0, "loss": 1.0}
        scores = [record(step, "val", score=1.0 / step) for step in (1, 2)]
        paths.append(
            write_folder(tmp_path / name, [record(1, **rates), record(2, **rates), *scores])
        )
    page = report(tmp_path, *paths)
    browser.open(page)
    chart(browser, "lr")
    script = (
        "return document.querySelector('[data-name=lr]').data.map(d => [d.line.color, d.line.dash])"
    )
    (first, second, third, fourth) = browser.run(script)
    loss = "return document.querySelector('[data-name=loss]').data.map(d => d.line.color)"
    assert [first[0], third[0]] == browser.run(loss)
    assert (first[0], third[0]) == (second[0], fourth[0])
    assert (first[1], second[1]) == (third[1], fourth[1]) == ("solid", "dash")
    where = "return document.querySelector('[data-name=slowest_rank]').closest('section').id"
    assert browser.run(where) == "system"
    assert "direction unknown" in browser.run("return document.body.textContent")
    assert_quiet(browser, page.as_uri())


def test_differences_of_settings_are_found(browser: Browser, tmp_path: Path) -> None:
    browser.open(report(tmp_path, *two_runs(tmp_path)))
    chart(browser, "loss")
    rows = "return [...document.querySelectorAll('#config tbody tr')].map(one => one.innerText)"
    cells = [row.split() for row in browser.run(rows)]
    assert [row[0] for row in cells] == ["name", "optimizer.lr"]
    assert cells[1][1:] == ["0.1", "configs/slow.yaml:2", "0.3", "configs/fast.yaml:2"]
    browser.run("document.querySelector('#differences').click()")
    assert len(browser.run(rows)) == 5


def test_smoothing_changes_the_line_and_shows_the_record(browser: Browser, tmp_path: Path) -> None:
    browser.open(report(tmp_path, *two_runs(tmp_path)))
    paths = (
        "return [...document.querySelectorAll('[data-name=loss] .scatterlayer .js-line')]"
        ".map(path => path.getAttribute('d'))"
    )
    chart(browser, "loss")
    assert len(browser.run(paths)) == 2
    browser.run(
        "const slider = document.querySelector('#smoothing'); slider.value = 0.9;"
        "slider.dispatchEvent(new Event('input'))"
    )
    # The recorded lines stay, in a paler colour, next to the smoothed ones.
    drawn = browser.wait(lambda: len(shown_paths := browser.run(paths)) == 4 and shown_paths)
    assert len(set(drawn)) == 4
    text = shown_at(browser, "loss", 40)
    assert "(recorded 0.4)" in text
    weights = [0.1 * 0.9**k for k in range(4)]
    recorded = [2 / 5, 2 / 4, 2 / 3, 2 / 2]
    smoothed = sum(w * v for w, v in zip(weights, recorded, strict=True)) / sum(weights)
    assert f"slow train : {smoothed:.6g}" in text


def test_incomplete_and_hostile_runs(browser: Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)></script><b>"
    config = f"{json.dumps(evil)}: {json.dumps(evil)}\n"
    records = [record(n, loss=None if n == 2 else 1.0, **{evil: 1.0}) for n in (1, 2, 3)]
    events = [{"event": "warning", "step": 1, "rank": 1, "text": evil}]
    environment = {"ranks": [{"held": {evil: 1}}], "groups": {evil: 1}, "mesh": {evil: 1}}
    hostile = write_folder(
        tmp_path / "evil<b>", records, config=config, events=events, environment=environment
    )
    empty = write_folder(tmp_path / "empty", config="")
    page = report(tmp_path, hostile, empty)
    browser.open(page)
    chart(browser, "loss")
    body = browser.run("return document.body.innerText")
    for text in ("not finite at step 2", "it needs hooks.run_info", evil, "has no config.yaml"):
        assert text in body
    assert browser.run("return document.querySelectorAll('main img, main b').length") == 0
    assert_quiet(browser, page.as_uri())


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_nothing_is_wider_than_the_window(
    width: int, dark: bool, browser: Browser, tmp_path: Path
) -> None:
    browser.open(report(tmp_path, *two_runs(tmp_path)), width=width, dark=dark)
    chart(browser, "loss")
    assert browser.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    back = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", back)[0]) < 100) == dark


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunServer]:
    two_runs(tmp_path / "runs")
    plotly = plotly_source(RuntimeError).encode()
    with RunServer("127.0.0.1", 0, Folder(tmp_path / "runs"), plotly) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_new_record_appears(browser: Browser, server: RunServer, tmp_path: Path) -> None:
    browser.open(server.url)
    chart(browser, "loss")
    with (tmp_path / "runs" / "slow" / "metrics.jsonl").open("a") as file:
        file.write(lines([record(120, loss=0.125)]))
    points = (
        "return document.querySelector('[data-name=loss]').data.find(d => d.name.includes('slow'))"
    )
    browser.wait(lambda: browser.run(f"{points}.x.at(-1)") == 120)
    assert "0.125" in shown_at(browser, "loss", 120)
    assert_quiet(browser, server.url)


def test_a_page_of_another_site_gets_nothing(browser: Browser, server: RunServer) -> None:
    """The name of the other site resolves to this machine, as after DNS rebinding."""
    browser.open(f"http://{FOREIGN_NAME}:{server.server_address[1]}/")
    text = browser.wait(lambda: browser.run("return document.body.innerText"))
    assert re.search("only .*own address", text)
    # The browser does not allow reading across origins.
    reply = browser.driver.execute_async_script(
        "fetch(arguments[0]).then(r => r.text()).catch(e => e.name).then(arguments[1])",
        f"{server.url}api/runs",
    )
    assert reply == "TypeError"


def test_a_training_is_shown_live(
    browser: Browser, start: Callable[..., Command], tmp_path: Path
) -> None:
    command = start(
        *("train", "points.yaml", "--run-dir", "runs/one", "train.log_every_steps=1"),
        *("data.train.dataset.pause_s=0.05", "train.max_epochs=1000"),
    )
    folder = tmp_path / "runs" / "one"
    command.wait_until(lambda: (folder / "metrics.jsonl").exists(), "no records")
    with RunServer(
        "127.0.0.1", 0, Folder(tmp_path / "runs"), plotly_source(RuntimeError).encode()
    ) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        browser.open(server.url)
        chart(browser, "loss")
        newest = "return document.querySelector('[data-name=loss]').data[0].x.at(-1)"
        initial = browser.run(newest)
        assert browser.wait(lambda: browser.run(newest) > initial)
        assert "training" in browser.run("return document.querySelector('#runs').innerText")
        command.process.terminate()
        browser.wait(
            lambda: "stopped" in browser.run("return document.querySelector('#overview').innerText")
        )
        assert_quiet(browser, server.url)
        server.shutdown()
        thread.join()
