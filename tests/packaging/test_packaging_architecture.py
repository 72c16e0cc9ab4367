"""The page on the architecture speaks of the code as it is."""

import re

import pytest
from source_tree import FILES, FOLDERS, ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
WAYS = ("batch", "config value", "checkpoint", "pool task", "rpc call")


def test_every_file_on_the_page_exists() -> None:
    files = set(re.findall(rf"\b(?:{'|'.join(FOLDERS)})/[\w/]+\.\w+", PAGE))
    assert len(files) > 30
    assert not [file for file in sorted(files) if not (ROOT / file).is_file()]


def test_every_room_has_its_line() -> None:
    rooms = {f"{file.parent.relative_to(ROOT)}/" for file in FILES if file.name == "__init__.py"}
    lines = re.findall(r"^\| `([\w/]+/)` \| .{10,} \|$", PAGE, flags=re.MULTILINE)
    assert sorted(lines) == sorted(rooms)


@pytest.mark.parametrize("thing", WAYS)
def test_each_way_is_short_and_names_its_files(thing: str) -> None:
    (way,) = re.findall(
        rf"^## The way of an? {thing}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL
    )
    lines = [line for line in way.splitlines() if line.strip()]
    assert len(lines) < 15
    assert len(set(re.findall(r"`[\w/]+\.py`", way))) >= 4
