"""Setup of every test: one thread, a clean environment, no processes left at the end."""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
import warm

# Must be set before torch is imported. The rank processes and the tests share few cores.
os.environ["OMP_NUM_THREADS"] = "1"
# How many CUDA devices the tests with a marker need.
DEVICES = {"gpu": 1, "gpu2": 2, "gpu4": 4}


def pytest_configure(config: pytest.Config) -> None:
    """Declare our markers, and make yapf write its cache before several processes import it.

    mmengine imports yapf. It renames the file into place before all of it is written, so that
    another process may read an incomplete file.
    """
    config.addinivalue_line("markers", "nightly: further cases, run only by `make test-nightly`")
    config.addinivalue_line("markers", "triton: compiles kernels for a CUDA device")
    config.addinivalue_line("markers", "pretend: needs pretend devices; run by `make test-pretend`")
    warm.fork_ranks()
    if not hasattr(config, "workerinput"):
        with contextlib.suppress(ImportError):
            importlib.import_module("yapf")


def pytest_sessionfinish() -> None:
    ranks.shutdown()
    warm.shutdown()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("pretend") is not None:
        if "PRETEND_CUDA" not in os.environ:
            pytest.skip("no pretend devices: make test-pretend")
        import pretend_devices

        if pretend_devices.reason is not None:
            pytest.skip(pretend_devices.reason)
    if item.get_closest_marker("triton") is not None and "PRETEND_CUDA" in os.environ:
        pytest.skip("Triton compiles only for real devices")
    _require_devices(item)


def _require_devices(item: pytest.Item) -> None:
    """Skip a test if there are fewer CUDA devices than its marker says."""
    needed = max(
        (count for name, count in DEVICES.items() if item.get_closest_marker(name)), default=0
    )
    if needed:
        import torch

        count = torch.cuda.device_count()
        if count < needed:
            pytest.skip(f"needs {needed} CUDA devices, got {count} (torch {torch.__version__})")


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def _forked_processes() -> set[int]:
    """Return the living children of this process that were forked from it."""
    forked = set()
    for children in Path("/proc/self/task").glob("*/children"):
        # A thread or child may have ended meanwhile.
        with contextlib.suppress(OSError):
            command = Path("/proc/self/cmdline").read_bytes()
            for pid in children.read_text().split():
                if Path(f"/proc/{pid}/cmdline").read_bytes() == command:
                    forked.add(int(pid))
    return forked


@pytest.fixture(autouse=True)
def _restore_surroundings() -> Iterator[None]:
    """Hide a launcher's variables from tests, and undo what a test changes.

    This covers the environment, the working directory, and torch's deterministic algorithms. A test
    that leaves a process group fails, because later tests would train in that group. So does one
    that leaves a forked process, which keeps copies of all file descriptors open.
    """
    environment, cwd = dict(os.environ), Path.cwd()
    had_group, forked = _has_group(), _forked_processes()
    for name in environment.keys() - ranks.remove_launcher(environment.items()):
        del os.environ[name]
    yield
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    if _has_group() and not had_group:
        sys.modules["torch.distributed"].destroy_process_group()
        pytest.fail("the test left its process group open")
    if _forked_processes() - forked:
        # A loader ends its workers when it is freed; a traceback refers to it.
        gc.collect()
        orphans = _forked_processes() - forked
        if orphans:
            pytest.fail(f"the test left forked processes: {sorted(orphans)}")
