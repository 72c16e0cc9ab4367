"""List registered names without importing their modules."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwrap.registry import METRICS, MODELS, OPTIMIZERS, list_registrations, scan
from stepwrap.registry.catalog import REGISTRIES
from stepwrap.registry.scan import make_classes, read_table

SCRIPT = """
import sys
from stepwrap.registry import list_registrations
assert sum(map(len, list_registrations().values())) > 300
sys.exit(any(name.startswith(("torch", "stepwrap.wrappers", "stepwrap.loops"))
             for name in sys.modules))
"""


covered = pytest.mark.skipif(
    not read_table().covers_installed,
    reason="registry/namespaces.json lacks the installed torch or torchmetrics: run write_table()",
)


@covered
def test_listing_imports_no_torch() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


def misfits(registry: str) -> dict[str, set[str]]:
    """Return the names that a registry lists but cannot look up, and the reverse."""
    entries = list_registrations(registry)[registry]
    listed = {name for entry in entries for name in (entry.name, *entry.aliases)}
    unknown = {name for name in listed if REGISTRIES[registry].get(name) is None}
    # Names that a module imports from elsewhere in its package need not be listed; names that
    # other modules have registered since cannot be listed.
    homes = ("torch", "stepwrap.wrappers", "stepwrap.loops", "stepwrap.collectives")
    unlisted = {
        name
        for name in set(REGISTRIES[registry].names()) - listed
        if REGISTRIES[registry].get(name).__module__.startswith(homes)
    }
    return {"listed only": unknown, "looked up only": unlisted}


@covered
def test_the_table_has_the_classes_of_the_installed_versions() -> None:
    assert read_table().classes == make_classes()


def test_the_table_covers_the_pinned_versions() -> None:
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text()
    for name, releases in read_table().versions.items():
        (pinned,) = re.findall(rf"^{name}==(\d+\.\d+)", pins, flags=re.MULTILINE)
        assert pinned in releases


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replace the shipped table by one of another torch version."""
    path = tmp_path / "namespaces.json"
    versions = {"torch": ["1.0"], "torchmetrics": ["0.1"]}
    path.write_text(json.dumps({"versions": versions, "classes": make_classes()}))
    monkeypatch.setattr(scan, "_TABLE", path)
    scan._classes.cache_clear()
    yield path
    scan._classes.cache_clear()


def test_a_torch_that_the_table_lacks_is_imported(table: Path) -> None:
    expected = read_table()
    table.write_text(json.dumps(expected._replace(classes={})._asdict()))
    names = {entry.name for entry in list_registrations("optimizers")["OPTIMIZERS"]}
    assert expected.classes["torch.optim"].keys() <= names


def test_writing_the_table_keeps_releases_with_equal_classes(table: Path) -> None:
    scan.write_table()
    assert read_table().covers_installed
    assert "1.0" in read_table().versions["torch"]
    table.write_text(json.dumps(read_table()._replace(classes={})._asdict()))
    scan.write_table()
    assert read_table().covers_installed
    assert "1.0" not in read_table().versions["torch"]


def test_exactly_the_listed_names_can_be_looked_up() -> None:
    misfits_by_registry = {name: misfits(name) for name in REGISTRIES}
    assert not [
        (name, kind, names)
        for name in misfits_by_registry
        for kind, names in misfits_by_registry[name].items()
        if names
    ]


def test_summaries_are_the_first_lines_of_docstrings() -> None:
    wrappers = {
        entry.name: entry for entry in list_registrations("model_wrappers")["MODEL_WRAPPERS"]
    }
    ddp = wrappers["StepDistributedDataParallel"]
    assert {"ddp", "MMDistributedDataParallel"} <= set(ddp.aliases)
    assert ddp.source == "stepwrap.wrappers.ddp.distributed"
    for registry in (OPTIMIZERS, MODELS, METRICS):
        for entry in list_registrations(registry.name)[registry.name][:40]:
            doc = registry.get(entry.name).__doc__ or ""
            assert entry.summary in doc
            assert entry.summary or not doc.strip() or entry.name == "Container"


def test_an_unknown_registry_names_the_near_ones() -> None:
    with pytest.raises(KeyError, match="hook; did you mean HOOKS"):
        list_registrations("hook")
