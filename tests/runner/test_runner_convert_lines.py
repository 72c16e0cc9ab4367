"""Files of mmengine's configs: the line of each setting, and files that cannot be read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwrap.registry import ConfigError
from stepwrap.runner.command.cli import main
from stepwrap.runner.convert.convert import convert_config
from stepwrap.runner.convert.source import Lines, read_source

KEYS = st.text("abcxyz", min_size=1, max_size=4)
TREES = st.recursive(
    st.integers(0, 99) | st.booleans() | st.none(),
    lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3),
    max_leaves=12,
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# The first example waits for imports.
@settings(deadline=None)
@given(st.dictionaries(KEYS.map("section_{}".format), TREES, min_size=1, max_size=3))
@pytest.mark.slow
def test_every_key_has_its_own_line(tmp_path_factory: Any, values: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("lines") / "mm.py"
    path.write_text(
        "".join(f"{key} = {pformat(value, width=1)}\n" for key, value in values.items())
    )
    settings, file_lines = read_source(path)
    assert settings == values
    lines = path.read_text().splitlines()

    def compare(below: Mapping[str, Any], above: str) -> None:
        for key, value in below.items():
            file, _, line = file_lines.origin(above + key).rpartition(":")
            assert file == str(path)
            assert key in lines[int(line) - 1]
            if isinstance(value, dict):
                compare(value, f"{above}{key}.")

    compare(values, "")


BASE = """pipeline = [dict(type="Load"), dict(type="Flip")]
loader = dict(
    batch_size=4,
    workers=2)
"""
ABOVE = """_base_ = "base.py"
common = dict(
    lr=1,
    momentum=2)
a: dict = dict(common, lr=3)
b = {**common, "betas": 4}
b.update(
    dict(eps=5),
    foreach=6)
if True:
    c = dict(pipeline=_base_.pipeline)
    b["nested"] = dict(d=7)
hooks = [
    dict(e=8)]
hooks += [dict(f=9)]
e = {{_base_.loader}}
b = b
"""
PLACES = {
    "a": "above.py:5", "a.lr": "above.py:5", "a.momentum": "above.py:4",
    "b": "above.py:17", "b.lr": "above.py:3", "b.betas": "above.py:6",
    "b.eps": "above.py:8", "b.foreach": "above.py:9", "b.nested.d": "above.py:12",
    "c.pipeline": "above.py:11", "c.pipeline.1.type": "base.py:1",
    "hooks": "above.py:15", "hooks.0.e": "above.py:14",
    "e.workers": "base.py:4", "loader.batch_size": "base.py:3",
}  # fmt: skip


def test_the_many_ways_to_set_a_value() -> None:
    Path("base.py").write_text(BASE)
    Path("above.py").write_text(ABOVE)
    lines = Lines(Path("above.py"))
    assert {key: lines.origin(key) for key in PLACES} == PLACES
    assert {"common", "pipeline", "loader"} <= lines.read


def test_installed_bases_have_lines_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "zoo/configs").mkdir(parents=True)
    (here / "zoo/__init__.py").touch()
    (here / "zoo/configs/net.py").write_text("\nmodel = dict(depth=3)\n")
    monkeypatch.syspath_prepend(str(here))
    Path("mm.py").write_text("with read_base():\n    from zoo.configs.net import *\n")
    origin = Lines(Path("mm.py")).origin("model.depth")
    assert origin == f"{here / 'zoo/configs/net.py'}:2"


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("with read_base():\n    from .base import *\n", "read_base()"),
        ("_base_ = 'base.py'\nlr = _base_.loader\n", "_base_."),
        ("work_dir = 'work/{{ fileBasename }}'\n", "{{"),
    ],
)
def test_configs_that_need_mmengine(text: str, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Simulate that mmengine is not installed.
    monkeypatch.setitem(sys.modules, "mmengine", None)
    Path("base.py").write_text(BASE)
    Path("mm.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        convert_config("mm.py")
    assert f"mm.py: it uses {used}: install mmengine" in str(caught.value)


def test_bases_that_set_the_same_key_are_refused_as_in_mmengine(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mmengine", None)
    (here / "common.py").write_text("epochs = 1\n")
    (here / "a.py").write_text("_base_ = 'common.py'\nepochs = 5\n")
    (here / "b.py").write_text("_base_ = 'common.py'\n")
    (here / "mm.py").write_text("_base_ = ['a.py', 'b.py']\n")
    with pytest.raises(ConfigError, match=r"mm\.py: several .*files set epochs"):
        convert_config("mm.py")


def test_mistakes_end_with_2(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "bad.py": "model = dict(\n",
        "failing.py": "model = 1 / 0\n",
        "above.py": "_base_ = ['bad.py']\n",
        "alone.py": "_base_ = ['nowhere.py']\n",
        "mm.yaml": "model: 3\n",
    }
    for name, text in files.items():
        (here / name).write_text(text)
    syntax = "it cannot be executed: SyntaxError: '(' was never closed (bad.py"
    for words, said in (
        ("nothing.py", "nothing.py does not exist"),
        ("mm.yaml", "must be a .py file, got mm.yaml"),
        ("bad.py", f"bad.py: {syntax}"),
        ("above.py", f"above.py: {syntax}"),
        ("alone.py", "nowhere.py"),
        ("failing.py", "failing.py: it cannot be executed: ZeroDivisionError"),
        ("bad.py --epoch-length 0", "must be a positive integer"),
    ):
        assert main(["convert", *words.split()]) == 2
        out, err = capsys.readouterr()
        assert said in err
        assert not out


def test_a_mmengine_that_is_broken(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [module for module in sys.modules if module.partition(".")[0] == "mmengine"]:
        monkeypatch.delitem(sys.modules, name)
    (here / "mmengine").mkdir()
    (here / "mmengine/__init__.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(here))
    Path("mm.py").write_text("model = dict()\n")
    with pytest.raises(ConfigError, match="needs mmengine, .*cannot be imported"):
        convert_config("mm.py")
