"""Whether a model is wrapped, and by which wrapper."""

from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from step_models import batches, classifier, mlp, train
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from stepwrap.registry import MODEL_WRAPPERS, Registry
from stepwrap.wrappers import (
    ReplicationCallbackDataParallel,
    SeparateDistributedDataParallel,
    SingleDevice,
    StepDataParallel,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    is_model_wrapper,
    is_module_wrapper,
    wrap_model,
)

NAMES = {
    SingleDevice: ["SingleDevice", "single"],
    StepDataParallel: ["StepDataParallel", "MMDataParallel", "DataParallel", "dp"],
    ReplicationCallbackDataParallel: ["DataParallelWithCallback", "JacDataParallel"],
    StepDistributedDataParallel: ["ddp", "MMDistributedDataParallel", "DistributedDataParallel"],
    SeparateDistributedDataParallel: ["separate", "MMSeparateDistributedDataParallel"],
    StepFullyShardedDataParallel: [
        "fsdp",
        "MMFullyShardedDataParallel",
        "FullyShardedDataParallel",
    ],
}


@pytest.mark.parametrize(("wrapper", "names"), NAMES.items())
def test_registered_names(wrapper: type, names: list[str]) -> None:
    assert [MODEL_WRAPPERS.get(name) for name in names] == [wrapper] * len(names)
    assert {"ddp", "single"} <= set(MODEL_WRAPPERS)


@pytest.mark.parametrize(
    ("wrapper", "instead"),
    [
        (StepDistributedDataParallel, "wrap_model"),
        (SeparateDistributedDataParallel, "wrap_model"),
        (StepFullyShardedDataParallel, "SingleDevice"),
    ],
)
def test_wrappers_that_need_a_group(wrapper: Any, instead: str) -> None:
    first = r"call torch\.distributed\.init_process_group\(\) first"
    with pytest.raises(ValueError, match=rf"needs a process group.*{first}.*launch.*{instead}"):
        wrapper(classifier())


def test_names_of_wrappers() -> None:
    for name in ("single", "ddp", "MMDistributedDataParallel", "separate", "auto"):
        assert type(wrap_model(name, classifier())) is SingleDevice
    assert type(wrap_model("dp", classifier(), device_ids=["cpu"])) is StepDataParallel
    with pytest.raises(ValueError, match="'dpd'; .*mean dp or ddp"):
        wrap_model("dpd", classifier())
    with pytest.raises(TypeError, match="'ddp'.*only configs accept a dict"):
        wrap_model({"type": "ddp"}, classifier())  # type: ignore[arg-type]


@on_ranks(2)
def test_names_of_wrappers_in_a_group() -> None:
    classes = {"ddp": StepDistributedDataParallel, "fsdp": StepFullyShardedDataParallel}
    for name, expected in {**classes, "separate": SeparateDistributedDataParallel}.items():
        wrapper = wrap_model(name, classifier())
        assert type(wrapper) is expected
        train(wrapper, batches(1))


def test_the_default_on_one_process_ignores_options_of_ddp() -> None:
    model = classifier()
    model.net.append(nn.BatchNorm1d(3))
    wrapper = wrap_model(None, model, sync_batchnorm=True, broadcast_buffers=False)
    assert type(wrapper) is SingleDevice
    assert type(wrapper.module.net[-1]) is nn.BatchNorm1d
    with pytest.raises(TypeError, match="did you mean sync_batchnorm"):
        wrap_model(None, classifier(), sync_batchnrm=True)
    with pytest.raises(TypeError, match="SingleDevice has no argument 'sync_batchnorm'"):
        wrap_model(SingleDevice, classifier(), sync_batchnorm=True)


class OwnSingle(SingleDevice):
    """A user's registered wrapper."""


class Passing(SingleDevice):
    """A wrapper that passes unknown options to its base class."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)


class OwnDDP(StepDistributedDataParallel):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        return super().train_step(data, optim_wrapper)


def test_is_model_wrapper() -> None:
    wrapped = SingleDevice(classifier())
    assert is_model_wrapper(wrapped)
    assert is_model_wrapper(OwnSingle(classifier()))
    assert is_model_wrapper(DataParallel(mlp()))
    assert not is_model_wrapper(classifier())
    assert not is_model_wrapper(nn.Sequential(wrapped))


def test_is_model_wrapper_of_a_registry() -> None:
    parent = Registry("parent", scope="parent")
    child = Registry("child", parent=parent, scope="child")
    child.register_module(module=OwnSingle)
    custom, other = OwnSingle(classifier()), SingleDevice(classifier())
    assert is_model_wrapper(custom, parent)
    assert is_model_wrapper(custom, child)
    assert not is_model_wrapper(other, parent)
    parent.register_module(module=SingleDevice)
    assert is_model_wrapper(other, parent)
    assert not is_model_wrapper(other, child)
    assert not is_model_wrapper(DataParallel(mlp()), parent)


@pytest.mark.parametrize("wrapper", [None, StepDistributedDataParallel, SingleDevice])
def test_without_a_group(wrapper: Any) -> None:
    wrapped = wrap_model(wrapper, classifier(), detect_anomalous_params=True)
    assert type(wrapped) is SingleDevice
    assert wrapped.detect_anomalous_params
    train(wrapped, batches(1))


def test_options_of_ddp_without_a_group() -> None:
    options = {"find_unused_parameters": True}
    wrapped = wrap_model(StepDistributedDataParallel, classifier(), **options)
    assert type(wrapped) is SingleDevice
    with pytest.raises(TypeError, match="did you mean find_unused_parameters"):
        wrap_model(StepDistributedDataParallel, classifier(), find_unused=True)
    with pytest.raises(RuntimeError, match="OwnDDP .*train_step .*needs .*process group"):
        wrap_model(OwnDDP, classifier())


def test_options_that_a_subclass_passes_on() -> None:
    assert wrap_model(Passing, classifier(), detect_anomalous_params=True).detect_anomalous_params
    with pytest.raises(TypeError, match="did you mean detect_anomalous_params"):
        wrap_model(Passing, classifier(), detect_anomalous=True)


def test_named_wrappers_and_devices() -> None:
    assert type(wrap_model(OwnSingle, classifier())) is OwnSingle
    wrapped = wrap_model(None, classifier(), device="meta")
    assert all(parameter.is_meta for parameter in wrapped.parameters())
    assert wrapped.module.data_preprocessor.device.type == "meta"


def test_wrapped_already() -> None:
    wrapped = SingleDevice(classifier())
    assert wrap_model(None, wrapped) is wrapped
    with pytest.raises(TypeError, match="already wrapped in SingleDevice"):
        wrap_model(SingleDevice, wrapped)
    with pytest.raises(TypeError, match="already wrapped in SingleDevice"):
        wrap_model(None, wrapped, detect_anomalous_params=True)
    with pytest.raises(TypeError, match="DataParallel has no train_step"):
        wrap_model(None, DataParallel(mlp()))


@on_ranks(2)
def test_in_a_group() -> None:
    for wrapper in (None, StepDistributedDataParallel):
        assert type(wrap_model(wrapper, classifier())) is StepDistributedDataParallel
    assert wrap_model(None, classifier(), find_unused_parameters=True).find_unused_parameters
    assert type(wrap_model(OwnDDP, classifier())) is OwnDDP
    bare = DistributedDataParallel(mlp())
    assert is_model_wrapper(bare)
    assert not is_model_wrapper(nn.Sequential(bare))


class OwnParallel(DataParallel[nn.Module]):
    """A user's subclass of a wrapper."""


class OwnDistributed(DistributedDataParallel):
    """A user's subclass of a wrapper."""


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
    module_a, second = nn.Module(), nn.Module()
    module_a.other, second.other = second, module_a
    assert not is_module_wrapper(module_a)
    second.wrapped = DataParallel(mlp())
    assert is_module_wrapper(module_a)


@on_ranks(2)
def test_distributed_wrappers() -> None:
    kinds = (DistributedDataParallel, OwnDistributed)
    assert [is_module_wrapper(_nested(kind(mlp()))) for kind in kinds] == [True, True]
