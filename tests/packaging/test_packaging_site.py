"""The documentation site: it has every page, and every link has a target."""

import functools
import http.server
import os
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import Browser
from pages import find_all, page, section
from programs import ended, run
from source_tree import FOLDERS, ROOT

# Pages that are read from start to end, or are only reference.
NO_EXAMPLE = {"architecture"}
TASKS = (
    "train a model",
    "resume a run",
    "add a metric",
    "write a custom step",
    "use Lightning",
    "run on two processes",
    "read a failure",
    "fine-tune",
    "predict",
    "export",
    "sweep over settings",
    "compare runs",
)
SCRIPTS = {"script", "link", "img", "iframe", "source"}


class Links(HTMLParser):
    """The anchors of a page, its links, and the addresses that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors |= {attributes.get("id") or "", attributes.get("name") or ""}
        address = attributes.get("href") or attributes.get("src") or ""
        if tag == "a" and address:
            self.links.append(address)
        elif tag in SCRIPTS and attributes.get("rel") != "canonical":
            self.loaded.append(address)


# Rules for every page.


def test_every_page_is_in_the_navigation() -> None:
    named = find_all(r"^ +- .*?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text())
    assert len(named) == len(set(named))
    assert {file.name for file in (ROOT / "docs").glob("*.md")} <= set(named)
    # Users do not import transport/, primitives/ and version/; configs/ only has examples.
    without_page = {"transport", "primitives", "version", "configs"}
    assert {f"api/{folder}.md" for folder in FOLDERS if folder not in without_page} <= set(named)


def test_the_front_page_leads_to_every_task() -> None:
    table = section(page("index"), "I want to ...")
    rows = dict(find_all(r"^\| ([^|]+) \| (.+?) \|", table))
    assert not [task for task in TASKS if "](" not in rows.get(task, "")]
    links = find_all(r"\]\(([\w.]+)[#)]", table)
    assert not [link for link in links if not (ROOT / "docs" / link).exists()]


def test_the_figures_of_the_front_page_are_measured() -> None:
    figures = section(page("index"), "Measured")
    ratios = find_all(r"(\d\.\d+) times", figures)
    assert len(ratios) == 3
    assert not [ratio for ratio in ratios if f"| {ratio} | " not in page("performance")]
    cells = find_all(r"(\d+) of (\d+) combinations", figures)
    assert cells == find_all(r"Of (\d+) cells,\n  (\d+) are within", page("parity"))


def test_every_page_starts_with_its_purpose_and_an_example() -> None:
    wrong = []
    for file in sorted((ROOT / "docs").glob("*.md")):
        title, purpose, body = file.read_text().split("\n\n", 2)
        has_example = "```" in "\n".join(body.splitlines()[:40])
        if not title.startswith("# ") or not re.match(r"(\*\*|`)?[A-Z0-9a-z]", purpose):
            wrong.append(f"{file.name}: no sentence below the title")
        if not has_example and file.stem not in NO_EXAMPLE:
            wrong.append(f"{file.name}: no example in the first 40 lines")
    assert not wrong


# The built site.


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site from this checkout; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    assert os.system(f"make -s -C {ROOT} types-link") == 0
    done = ended("-m", "mkdocs", "build", "--strict", "--site-dir", folder, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_link_and_anchor_of_the_site_exists(site: Path) -> None:
    pages = {file: Links(file.read_text()) for file in sorted(site.rglob("*.html"))}
    assert len(pages) > 50
    wrong = []
    for file, content in pages.items():
        if file.name == "404.html":
            continue
        for link in content.links:
            address = urlsplit(link)
            if address.scheme in ("http", "https", "mailto"):
                continue
            path = unquote(address.path)
            target = (file.parent / path).resolve() if path else file
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(address.fragment)
            is_there = target in pages and anchor in pages[target].anchors | {"__top"}
            if not (is_there or (target.exists() and not anchor)):
                wrong.append(f"{file.relative_to(site)}: {link}")
    assert not wrong


@pytest.mark.slow
def test_no_page_of_the_site_loads_anything_from_elsewhere(site: Path) -> None:
    wrong = [
        f"{file.relative_to(site)}: {address}"
        for file in sorted(site.rglob("*.html"))
        for address in Links(file.read_text()).loaded
        if urlsplit(address).scheme not in ("", "data")
    ]
    assert not wrong
    for file in site.rglob("*.css"):
        assert not find_all(r"url\(\s*['\"]?https?:", file.read_text()), file


@pytest.mark.slow
def test_the_lists_of_the_site_are_lists(site: Path) -> None:
    # mkdocs, unlike GitHub, shows a list without an empty line above it as text.
    wrong = [
        f"{file.relative_to(site)}: {line}"
        for file in sorted(site.rglob("*.html"))
        for text in re.findall(r"<p>(.*?)</p>", file.read_text(), flags=re.DOTALL)
        for line in find_all(r"^(?:[-*|] |\d\. ).*", text)
    ]
    assert not wrong


@pytest.mark.slow
def test_the_reference_of_the_site_has_a_meaning_for_every_setting(site: Path) -> None:
    rows = re.findall(
        r"<tr>\s*<td><code>(\w+)</code></td>(.*?)</tr>",
        (site / "reference" / "settings.html").read_text(),
        flags=re.DOTALL,
    )
    assert len(rows) > 70
    assert not [name for name, cells in rows if cells.rstrip().endswith("<td></td>")]


@pytest.mark.slow
def test_the_reference_of_the_site_has_every_registered_class_of_ours(site: Path) -> None:
    text = (site / "reference" / "classes.html").read_text()
    listed = run("-m", "stepwrap.runner", "list", "hooks")
    names = find_all(r"^  (\w+)", listed)
    assert len(names) > 10
    assert not [name for name in names if f'id="{name.lower()}"' not in text]


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Serve the site on this machine; yield its address."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "server"])
def test_the_search_finds_a_page(way: str, site: Path, address: str, browser: Browser) -> None:
    start = address if way == "server" else site.as_uri()
    browser.open(f"{start}/index.html")
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    browser.driver.switch_to.active_element.send_keys("keep_best")
    links = browser.wait(
        lambda: browser.run(
            "return [...document.querySelectorAll('a.md-search-result__link')].map(one => one.href)"
        )
    )
    assert any("/hooks.html" in link or "/metrics.html" in link for link in links)
    assert not browser.errors()
    assert all(request.startswith(start) for request in browser.requests())
