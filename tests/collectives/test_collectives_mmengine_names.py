"""mmengine's names take mmengine's arguments, also by keyword."""

import inspect
import warnings

import pytest

from stepwrap.collectives import dist


def test_arguments_by_their_names() -> None:
    assert dist.all_gather_object(data=3) == [3]
    assert dist.gather_object(data=3, dst=0) == [3]
    assert dist.collect_results_cpu(result_part=[1, 2], size=1) == [1]
    assert dist.collect_results_gpu(result_part=[1, 2], size=2) == [1, 2]


def test_every_argument_of_mmengine_is_there_in_its_place() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip("mmengine.dist", reason="the extra mmengine is not installed")
    assert set(dist.__all__) == set(theirs.__all__)
    for name in theirs.__all__:
        expected = list(inspect.signature(getattr(theirs, name)).parameters)
        actual = list(inspect.signature(getattr(dist, name)).parameters)
        assert actual[: len(expected)] == expected, name
