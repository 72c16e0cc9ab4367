"""What every test gets: one thread, the same surroundings, no processes left at the end."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks

# Before torch is imported: the rank processes and the tests share few cores.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Has yapf, which mmengine imports, write its cache before several processes import it.

    It renames the file into place before all of it is written, and another process then reads a
    part of it.
    """
    if not hasattr(config, "workerinput"):
        with contextlib.suppress(ImportError):
            importlib.import_module("yapf")


def pytest_sessionfinish() -> None:
    ranks.shutdown()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip(f"no CUDA device (torch {torch.__version__})")


@pytest.fixture(autouse=True)
def _restore_surroundings() -> Iterator[None]:
    """No launcher's variables inside a test; afterwards all is as before.

    Environment, directory, and whether torch's algorithms are deterministic, which a run sets.
    """
    environment, cwd = dict(os.environ), Path.cwd()
    for name in environment.keys() - ranks.without_launcher(environment.items()):
        del os.environ[name]
    yield
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
