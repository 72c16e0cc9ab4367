"""Whether a wrapper is anywhere in a model."""

from on_ranks import on_ranks
from step_models import classifier, mlp
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from stepwrap.wrappers import SingleDevice, is_model_wrapper, is_module_wrapper


class OwnParallel(DataParallel[nn.Module]):
    """A wrapper that a user derives."""


class OwnDistributed(DistributedDataParallel):
    """A wrapper that a user derives."""


def _nested(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.ModuleDict({"a": nn.Sequential(module)}))


def test_any_module_inside_counts() -> None:
    for wrapper in (DataParallel, OwnParallel):
        assert is_module_wrapper(wrapper(mlp()))
        assert is_module_wrapper(_nested(wrapper(mlp())))
        assert not is_model_wrapper(_nested(wrapper(mlp())))
    assert not is_module_wrapper(nn.Linear(2, 2))
    assert not is_module_wrapper(_nested(mlp()))


def test_other_wrappers_count_when_given() -> None:
    single = _nested(SingleDevice(classifier()))
    assert not is_module_wrapper(single)
    assert is_module_wrapper(single, [SingleDevice])
    assert is_module_wrapper(single, extra=iter([nn.Conv2d, SingleDevice]))
    assert not is_module_wrapper(single, [nn.Conv2d])


def test_modules_that_hold_each_other() -> None:
    first, second = nn.Module(), nn.Module()
    first.other, second.other = second, first
    assert not is_module_wrapper(first)
    second.wrapped = DataParallel(mlp())
    assert is_module_wrapper(first)


@on_ranks(2)
def test_distributed_wrappers() -> None:
    kinds = (DistributedDataParallel, OwnDistributed)
    assert [is_module_wrapper(_nested(kind(mlp()))) for kind in kinds] == [True, True]
