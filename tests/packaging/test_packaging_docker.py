"""The Dockerfile's instructions that can be checked without docker."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from pages import page, section
from source_tree import FOLDERS, ROOT

IGNORED = (ROOT / ".dockerignore").read_text().split()


def instructions() -> list[tuple[str, str]]:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    instruction_lines = [line for line in lines if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in instruction_lines]


def select_kind(kind: str) -> list[str]:
    return [text for name, text in instructions() if name == kind]


def is_ignored(path: Path) -> bool:
    ancestors = [*path.parents, path]
    return any(fnmatch(str(ancestor), pattern) for ancestor in ancestors for pattern in IGNORED)


def context() -> list[Path]:
    """Return the files of the repository in the docker context."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    files = [Path(line) for line in listed.stdout.splitlines()]
    return [file for file in files if (ROOT / file).is_file() and not is_ignored(file)]


def test_each_copied_file_exists_and_each_installed_extra_is_declared() -> None:
    names = {str(file) for file in context()}
    assert {name.partition("/")[0] for name in names} >= {*FOLDERS, "setup.cfg", "README.md"}
    assert not [name for name in names if name.startswith(("tests/", ".git", "docs/"))]
    copied = [text.split()[0] for text in select_kind("COPY")]
    assert copied == ["constraints.txt", "."]
    assert "constraints.txt" in names
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    arguments = dict(text.split("=", 1) for text in select_kind("ARG"))
    assert set(arguments["EXTRAS"].split(",")) <= set(parser["options.extras_require"])
    assert "stepwrap[${EXTRAS}]" in select_kind("RUN")[-1]
    assert 'ENTRYPOINT ["stepwrap"]' in (ROOT / "Dockerfile").read_text()
    assert parser["options.entry_points"]["console_scripts"].strip().startswith("stepwrap =")
    shown = section(page("commands"), "In a container")
    assert set(re.findall(r"--build-arg (\w+)=", shown)) == set(arguments)


def test_the_commands_of_the_image_are_valid() -> None:
    for text in select_kind("RUN"):
        subprocess.run(["bash", "-n", "-c", text], check=True)
    pips = [text for text in select_kind("RUN") if text.startswith("pip install")]
    for text in pips:
        options = re.findall(r"(?<= )--?[a-z][\w-]*", text)
        command = [sys.executable, "-m", "pip", "install", "--help"]
        help_text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert [option for option in options if not re.search(rf"{option}\b", help_text)] == []


@pytest.mark.slow
def test_the_context_of_the_image_has_all_that_the_package_needs(tmp_path: Path) -> None:
    for file in context():
        (tmp_path / "context" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / "context" / file)
    command = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path))
    subprocess.run([sys.executable, *command, str(tmp_path / "context")], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = {f"stepwrap/{file}" for file in context() if file.parts[0] in FOLDERS}
    sources = {source for source in sources if not source.startswith("stepwrap/version/")}
    assert {source for source in sources if not source.endswith(".pyi")} <= packed
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-m", "stepwrap.runner", "--help"],
        cwd=tmp_path, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "train and validate" in done.stdout
