"""Back-ends by name, and custom ones."""

import threading
import time
from collections.abc import Iterator

import pytest

from stepwrap.collectives import (
    BaseMetric,
    NonDist,
    TorchCPUDist,
    TorchDist,
    get_dist_backend,
    list_all_backends,
    register_dist_backend,
    set_default_dist_backend,
    unregister_dist_backend,
)
from stepwrap.registry import DIST_BACKENDS

BUILTIN = ["non_dist", "mpi4py", "torch", "torch_cpu", "torch_cuda"]


class _OwnDist(NonDist):
    """A custom backend."""


class _CountingDist(NonDist):
    created = 0

    def __init__(self) -> None:
        # Long enough that another thread asks for the same name.
        time.sleep(0.05)
        type(self).created += 1
        if self.created == 1:
            raise ImportError("not yet")


class _Count(BaseMetric):
    def add(self, values: list[int]) -> None:
        self._results += values

    def compute_metric(self, results: list[int]) -> int:
        return len(results)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for name in list_all_backends():
        unregister_dist_backend(name)
    set_default_dist_backend("torch")


def test_names_are_listed_in_order() -> None:
    assert list_all_backends() == BUILTIN
    register_dist_backend("own", _OwnDist)
    assert list_all_backends() == [*BUILTIN, "own"]


def test_one_instance_for_a_name() -> None:
    assert get_dist_backend("torch_cpu") is get_dist_backend("torch_cpu")
    assert type(get_dist_backend("torch_cpu")) is TorchCPUDist
    assert type(get_dist_backend("non_dist")) is NonDist
    assert type(get_dist_backend()) is TorchDist


def test_a_constructor_that_failed_is_tried_again() -> None:
    _CountingDist.created = 0
    register_dist_backend("counting", _CountingDist)
    with pytest.raises(ImportError, match="not yet"):
        get_dist_backend("counting")
    assert get_dist_backend("counting") is get_dist_backend("counting")
    assert _CountingDist.created == 2


def test_threads_get_one_instance() -> None:
    _CountingDist.created = 1
    register_dist_backend("counting", _CountingDist)
    threads = [threading.Thread(target=get_dist_backend, args=("counting",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _CountingDist.created == 2


def test_classes_and_instances_are_back_ends_too() -> None:
    instance = _OwnDist()
    assert get_dist_backend(instance) is instance
    assert type(get_dist_backend(_OwnDist)) is _OwnDist
    with pytest.raises(TypeError, match="subclass of BaseDistBackend"):
        get_dist_backend(dict)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["torch-cpu", "horovod", "", 3])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    for call in (get_dist_backend, set_default_dist_backend, unregister_dist_backend):
        with pytest.raises(AssertionError) as error:
            call(name)
        assert f"must be one of {', '.join(BUILTIN)}, got {name!r}" in str(error.value)
        assert ("did you mean torch_cpu?" in str(error.value)) == (name == "torch-cpu")


def test_the_default_is_for_metrics_made_later() -> None:
    before = _Count()
    set_default_dist_backend("torch_cpu")
    assert type(_Count().dist_backend) is TorchCPUDist
    assert type(before.dist_backend) is TorchDist
    assert type(_Count(dist_backend="non_dist").dist_backend) is NonDist


def test_a_name_is_taken_once() -> None:
    register_dist_backend("own", _OwnDist)
    backend = get_dist_backend("own")
    with pytest.raises(KeyError, match="own .*_OwnDist.*force=True"):
        register_dist_backend("own", NonDist)
    register_dist_backend("own", _OwnDist, force=True)
    assert get_dist_backend("own") is not backend
    register_dist_backend("torch", _OwnDist, force=True)
    assert type(get_dist_backend("torch")) is _OwnDist
    unregister_dist_backend("torch")
    assert type(get_dist_backend("torch")) is TorchDist


def test_the_default_does_not_outlive_its_back_end() -> None:
    register_dist_backend("own", _OwnDist)
    set_default_dist_backend("own")
    assert type(get_dist_backend()) is _OwnDist
    unregister_dist_backend("own")
    assert type(get_dist_backend()) is TorchDist


def test_only_back_ends_with_a_name_are_registered() -> None:
    with pytest.raises(TypeError, match="BaseDistBackend, got <class 'dict'>"):
        register_dist_backend("own", dict)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name must .*str, got 3"):
        register_dist_backend(3, _OwnDist)  # type: ignore[arg-type]


def test_configs_know_the_same_back_ends() -> None:
    """The registry for configs has the names of the classes and these short names."""
    short = {name: DIST_BACKENDS.get(name) for name in BUILTIN}
    assert short["torch"] is DIST_BACKENDS.get("TorchDist") is TorchDist
    assert set(DIST_BACKENDS.names()) >= {*BUILTIN, *(kind.__name__ for kind in short.values())}
    for name in ("non_dist", "torch", "torch_cpu"):
        assert type(get_dist_backend(name)) is short[name]
    assert DIST_BACKENDS.get("BaseDistBackend") is None


def test_a_back_end_of_the_config_registry_can_be_used() -> None:
    DIST_BACKENDS.register_module("own_dist", module=_OwnDist)
    try:
        assert type(get_dist_backend(DIST_BACKENDS.get("own_dist"))) is _OwnDist
        backend = get_dist_backend(DIST_BACKENDS.build({"type": "own_dist"}))
        assert type(_Count(dist_backend=backend).dist_backend) is _OwnDist
    finally:
        del DIST_BACKENDS.module_dict["own_dist"]
