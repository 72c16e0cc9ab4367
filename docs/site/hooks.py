"""The parts of the site that mkdocs does not build from docs/: reference pages and linked files.

mkdocs calls the functions whose names begin with ``on_``.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# The pages with files of the repository, such as examples, which our pages link.
SOURCE = "source"
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=(?:#[^)\s]*)?\))")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".cfg": "ini", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference pages, and a page for each linked file that is not in docs/."""
    pages = reference.pages()
    texts = {
        f"docs/{source_page.src_uri}": source_page.content_string
        for source_page in files.documentation_pages()
    }
    waiting = list(texts.items())
    while waiting:
        for target in _linked(*waiting.pop()):
            if (uri := _page_uri(target)) not in pages and not target.startswith("docs/"):
                pages[uri] = _source_page(target)
                if target.endswith(".md") or (ROOT / target).is_dir():
                    waiting.append((target, pages[uri]))
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository lead to their pages on the site."""
    uri = page.file.src_uri
    path = _repository_path(uri)
    folder = posixpath.dirname(uri)

    def on_site(link: re.Match[str]) -> str:
        target = _resolve(path, link[0])
        return posixpath.relpath(_page_uri(target), folder) if target else link[0]

    return _LINK.sub(on_site, markdown)


def _repository_path(uri: str) -> str:
    """Return the path in the repository of the text that a page shows."""
    return uri.removeprefix(f"{SOURCE}/") if uri.startswith(f"{SOURCE}/") else f"docs/{uri}"


def _resolve(path: str, link: str) -> str:
    """Return the linked path in the repository; "" if nothing is there."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return target if (ROOT / target).exists() else ""


def _linked(path: str, text: str) -> Iterator[str]:
    targets = (_resolve(path, link) for link in _LINK.findall(text))
    return (target for target in targets if target)


def _page_uri(target: str) -> str:
    """Return the page of the site that shows a file or folder of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    is_whole = target.endswith((".md", ".png"))
    return f"{SOURCE}/{target}" if is_whole else f"{SOURCE}/{target}.md"


def _source_page(target: str) -> str | bytes:
    """Return a page with the text of a file or the list of a folder, or an image."""
    path = ROOT / target
    if path.suffix == ".png":
        return path.read_bytes()
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.suffix in _LANGUAGES)
        return f"# {target}\n\n" + "\n".join(f"- [{name}]({path.name}/{name})" for name in names)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"# {target}\n\n`````{_LANGUAGES.get(path.suffix, '')}\n{text}`````\n"
