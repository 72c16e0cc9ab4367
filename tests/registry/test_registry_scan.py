"""Listing what there is without importing it."""

import json
import subprocess
import sys

import pytest

from stepwrap.registry import METRICS, MODELS, OPTIMIZERS, list_registrations
from stepwrap.registry.catalog import REGISTRIES
from stepwrap.registry.scan import _TABLE, make_table

SCRIPT = """
import sys
from stepwrap.registry import list_registrations
assert sum(map(len, list_registrations().values())) > 300
sys.exit(any(name.startswith(("torch", "stepwrap.wrappers", "stepwrap.loops"))
             for name in sys.modules))
"""


def test_listing_imports_no_torch() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


def misfits(name: str) -> dict[str, set[str]]:
    """Return what a registry lists and cannot look up, and what it looks up and does not list."""
    entries = list_registrations(name)[name]
    listed = {known for entry in entries for known in (entry.name, *entry.aliases)}
    unknown = {known for known in listed if REGISTRIES[name].get(known) is None}
    # What a module only borrows from elsewhere in its package need not be listed, and what
    # other modules have registered in the meantime cannot be.
    homes = ("torch", "stepwrap.wrappers", "stepwrap.loops", "stepwrap.collectives")
    others = {
        known
        for known in set(REGISTRIES[name].names()) - listed
        if REGISTRIES[name].get(known).__module__.startswith(homes)
    }
    return {"listed only": unknown, "looked up only": others}


def test_the_table_is_that_of_the_installed_versions() -> None:
    """Else it is made anew, as registry/scan.py says; until then listing imports torch."""
    assert json.loads(_TABLE.read_text()) == make_table()


def test_the_list_is_what_can_be_looked_up() -> None:
    found = {name: misfits(name) for name in REGISTRIES}
    assert not [
        (name, kind, names) for name in found for kind, names in found[name].items() if names
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
    with pytest.raises(KeyError, match="there is no registry hook; did you mean HOOKS"):
        list_registrations("hook")
