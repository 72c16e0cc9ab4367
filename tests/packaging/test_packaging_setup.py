"""setup.py, setup.cfg and the Makefile: the wheel has every package and needs no checkout."""

import json
import os
import re
import runpy
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import setuptools
from programs import ended

import stepwrap

ROOT = Path(__file__).parents[2]
NOT_SOURCE = {"benchmarks", "build", "dist", "docs", "examples", "runs", "tests"}


def test_every_source_folder_is_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", settings.update)
    runpy.run_path("setup.py")
    packages = {
        ".".join(("stepwrap", *file.parent.relative_to(ROOT).parts)): str(file.parent)
        for file in ROOT.glob("[a-z]*/**/__init__.py")
        if file.relative_to(ROOT).parts[0] not in NOT_SOURCE
    }
    packages["stepwrap"] = packages.pop("stepwrap.version")
    assert sorted(settings["packages"]) == sorted(packages)
    folders = {name: str(ROOT / folder) for name, folder in settings["package_dir"].items()}
    assert folders == {name: packages[name] for name in packages if name.count(".") < 2}


def test_the_root_is_not_a_package() -> None:
    assert not (ROOT / "__init__.py").exists()


def test_the_version() -> None:
    assert stepwrap.__version__ == metadata.version("stepwrap")


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    # Variables of a `make` that runs these tests must not reach the tested `make`.
    env = {
        name: value for name, value in (env or os.environ).items() if not name.startswith("MAKE")
    }
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an environment with our wheel; it uses the current third-party packages."""
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
        *("-w", str(folder), str(ROOT)),
        cwd=folder,
    )
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    run(
        *(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)),
        *("--no-compile", str(wheel)),
        cwd=folder,
    )
    # A plain path does not run the .pth files there, so the checkout is not on the path.
    third_party = Path(pytest.__file__).parents[1]
    (site / "third_party.pth").write_text(f"{third_party}\n")
    return folder / "env" / "bin" / "python"


@pytest.mark.slow
def test_the_wheel_brings_its_annotations(empty_environment: Path, tmp_path: Path) -> None:
    (site,) = (empty_environment.parents[1] / "lib").glob("python*/site-packages")
    folders = {file.parent.name for file in (site / "stepwrap").glob("*/__init__.py")}
    assert {file.parent.name for file in (site / "stepwrap").glob("*/py.typed")} == folders
    (tmp_path / "theirs.py").write_text(
        "from stepwrap.registry import load_config\n\nload_config(3)\n"
    )
    command = ("-m", "mypy", "--python-executable", empty_environment, "theirs.py")
    done = ended(*command, "--cache-dir", tmp_path / "cache", cwd=tmp_path, timeout=300)
    assert "[arg-type]" in done.stdout
    assert "Found 1 error in 1 file" in done.stdout


def test_the_demo_installs_no_more_than_it_needs() -> None:
    def extras(target: str) -> set[str]:
        commands = run("make", "-n", "-W", "setup.cfg", target, cwd=ROOT)
        return set(",".join(re.findall(r'-e "\.\[(.*?)\]"', commands)).split(","))

    assert extras("demo") == {"examples", "plots"}
    assert extras("test") >= extras("demo") | {"lightning", "mmengine", "tensorboard", "test"}


def test_each_target_leaves_out_the_slower_tests() -> None:
    def tests_run(target: str) -> list[str]:
        commands = run("make", "-n", target, cwd=ROOT).splitlines()
        return [line.strip() for line in commands if "-m pytest" in line]

    (every,) = tests_run("test-nightly")
    assert tests_run("test") == [f'{every} -m "not slow and not nightly"']
    assert tests_run("test-all") == [*tests_run("test-pretend"), f'{every} -m "not nightly"']
    assert re.findall(r"^make (.*)$", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE) == [
        "check",
        "test-all",
        "bench",
    ]


def test_another_torch_is_installed_in_a_fresh_environment() -> None:
    lines = run("make", "-n", "test-torch", "TORCH=9.8.7", cwd=ROOT).splitlines()
    assert lines[0].endswith("-m venv --clear build/torch/9.8.7")
    assert all("build/torch/9.8.7" in line for line in lines)
    (pin,) = [line for line in lines if "constraints.txt >" in line]
    pins = run("sh", "-c", pin.partition(" > ")[0], cwd=ROOT)
    assert "numpy==" in pins
    assert "torchmetrics==" in pins
    assert "\ntorch==" not in pins
    (install,) = [line for line in lines if "torch==9.8.7" in line]
    assert lines.index(install) < lines.index(next(line for line in lines if " -e " in line))
    assert lines[-1].endswith('-m "not slow and not nightly"')


def test_the_page_on_installing_lists_the_tested_torch() -> None:
    page = (ROOT / "docs/install.md").read_text()
    (listed,) = re.findall(r"It is tested with PyTorch ([^;]*);", page)
    tested = re.findall(r"\d+\.\d+\.\d+", listed)
    makefile, pins = ((ROOT / name).read_text() for name in ("Makefile", "constraints.txt"))
    assert f"TORCH ?= {tested[-1]}\n" in makefile
    assert f"\ntorch=={tested[0]}\n" in pins
    table = json.loads((ROOT / "registry/namespaces.json").read_text())
    assert {version.rpartition(".")[0] for version in tested} <= {*table["versions"]["torch"]}


@pytest.mark.slow
def test_the_wheel_trains_from_another_folder(empty_environment: Path, tmp_path: Path) -> None:
    where = run(
        str(empty_environment),
        "-c",
        "import stepwrap; print(stepwrap.__version__)\n"
        "import stepwrap.loops; print(stepwrap.loops.__file__)",
        cwd=tmp_path,
    )
    version, where = where.split()
    assert version == metadata.version("stepwrap")
    assert str(empty_environment.parents[1]) in where
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    out = run(
        *(str(empty_environment), "-m", "stepwrap.runner", "train", "digits_single"),
        *("train.max_epochs=1", "--run-dir", str(tmp_path / "run")),
        cwd=tmp_path,
        env=clean,
    )
    assert "accuracy" in out
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    run(
        *(str(empty_environment), "-m", "stepwrap.runner", "report", str(tmp_path / "run")),
        cwd=tmp_path,
        env=clean,
    )
    assert "</html>" in (tmp_path / "report.html").read_text()
