"""Computes the packages: each source folder is a package of `stepwrap`. The rest is setup.cfg."""

from pathlib import Path

from setuptools import find_packages, setup

# A source folder has a py.typed, which mypy asks for. The repository's root has no __init__.py, so
# the top of the package is the folder version.
FOLDERS = sorted(file.parent.name for file in Path(__file__).parent.glob("*/py.typed"))
FOLDERS.remove("version")

setup(
    package_dir={"stepwrap": "version", **{f"stepwrap.{folder}": folder for folder in FOLDERS}},
    packages=[
        "stepwrap",
        *(f"stepwrap.{folder}" for folder in FOLDERS),
        *(f"stepwrap.{folder}.{room}" for folder in FOLDERS for room in find_packages(folder)),
    ],
)
