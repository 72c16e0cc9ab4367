"""Settings shared by the tests of the registry."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepwrap.registry.catalog import REGISTRIES


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to an empty working directory; modules imported from it are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]
            for registry in REGISTRIES.values():
                for key, value in list(registry.module_dict.items()):
                    if value.__module__ == name:
                        del registry.module_dict[key]


@pytest.fixture
def write(workplace: Path) -> Callable[[str, str], Path]:
    """Return a function that writes a file below the working directory."""

    def write_file(name: str, text: str) -> Path:
        path = workplace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file
