"""Read the README and the pages of docs/."""

import re
from functools import cache

from source_tree import ROOT


@cache
def page(name: str) -> str:
    """Return a page of docs/ by its name, or another file by its path."""
    return (ROOT / (name if "." in name else f"docs/{name}.md")).read_text()


def section(text: str, title: str) -> str:
    """Return the text below a heading of the second level."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a language; "" for blocks without one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [code for kind, code in fenced if kind == language]


def find_all(pattern: str, text: str) -> list[str]:
    """Return all matches, with ^ and $ for each line."""
    return re.findall(pattern, text, flags=re.MULTILINE)
