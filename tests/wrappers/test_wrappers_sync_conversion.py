"""Conversion of models to synchronised batch normalisation, and back."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize

from stepwrap.registry import MODEL_WRAPPERS, build_from_cfg
from stepwrap.wrappers import (
    ReplicationCallbackDataParallel,
    SingleDevice,
    StepDistributedDataParallel,
    SupervisedModel,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_model,
    convert_sync_batchnorm,
    patch_sync_batchnorm,
    revert_sync_batchnorm,
    wrap_model,
)


class _SmallEps(nn.BatchNorm2d):
    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, eps=1e-3)


class _Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def _model() -> nn.Sequential:
    norm = nn.BatchNorm2d(3, momentum=None)
    inner = nn.Sequential(norm, nn.BatchNorm2d(3, affine=False), _SmallEps(3))
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), norm, inner, nn.BatchNorm2d(3, track_running_stats=False)
    )
    model(torch.randn(4, 3, 2, 2))
    return model


def _tensors(model: nn.Module) -> dict[str, int]:
    both = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: id(tensor) for name, tensor in both}


@pytest.mark.parametrize("training", [False, True])
def test_keeps_everything(training: bool) -> None:
    model = _model().train(training)
    model[1].weight.requires_grad_(False)
    model[2][2].double()
    calls: list[str] = []
    handle = model[1].register_forward_hook(lambda *_: calls.append("hook"))
    before, state = _tensors(model), copy.deepcopy(model.state_dict())
    options = [(m.eps, m.momentum, m.affine, m.track_running_stats) for m in _norms(model)]
    classes = [type(module) for module in model.modules()]
    assert convert_sync_batchnorm(model) is model
    assert all(type(norm) is SynchronizedBatchNorm2d for norm in _norms(model))
    assert model[1] is model[2][0]
    assert _tensors(model) == before
    assert all(module.training is training for module in model.modules())
    assert not model[1].weight.requires_grad
    assert [(m.eps, m.momentum, m.affine, m.track_running_stats) for m in _norms(model)] == options
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model[1](torch.randn(2, 3, 2, 2))
    assert calls == ["hook"]
    handle.remove()
    model[1](torch.randn(2, 3, 2, 2))
    assert calls == ["hook"]
    assert convert_sync_batchnorm(model) is model
    assert revert_sync_batchnorm(model) is model
    assert [type(module) for module in model.modules()] == classes
    assert _tensors(model) == before
    assert not any("eps_mode" in module.__dict__ for module in model.modules())


def _norms(model: nn.Module) -> list[Any]:
    return [
        module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]


def test_optimizers_and_state_dicts_keep_working() -> None:
    plain = _model().double()
    model = copy.deepcopy(plain)
    results = []
    for net in (plain, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if net is model:
            convert_sync_batchnorm(net)
        net(
            torch.ones(2, 3, 2, 2).double() * torch.arange(2).view(2, 1, 1, 1)
        ).square().sum().backward()
        optimizer.step()
        results.append(net.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    _model().double().load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("plain", "kind"),
    [
        (nn.BatchNorm1d, SynchronizedBatchNorm1d),
        (nn.BatchNorm2d, SynchronizedBatchNorm2d),
        (nn.BatchNorm3d, SynchronizedBatchNorm3d),
    ],
)
def test_a_root_that_is_a_layer(plain: Any, kind: Any) -> None:
    layer = plain(3)
    parameters = list(layer.parameters())
    converted = convert_model(layer)
    assert type(converted) is kind
    assert all(
        param is other for param, other in zip(converted.parameters(), parameters, strict=True)
    )
    assert type(revert_sync_batchnorm(converted)) is plain
    assert type(revert_sync_batchnorm(kind(3, eps_mode="clamp"))) is plain


def test_torchs_synchronised_layer() -> None:
    layer = nn.SyncBatchNorm(3)
    convert_sync_batchnorm(layer)
    x = torch.randn(4, 3, 2)
    assert torch.equal(layer(x), nn.BatchNorm1d(3)(x))
    with pytest.raises(ValueError, match="at least 2D input"):
        layer(torch.randn(4))
    assert type(revert_sync_batchnorm(layer)) is nn.SyncBatchNorm
    assert layer.process_group is None


@pytest.mark.parametrize("training", [False, True])
def test_torchs_implementation(training: bool) -> None:
    model = _model().train(training)
    before, classes = _tensors(model), [type(module) for module in model.modules()]
    assert convert_sync_batchnorm(model, implementation="torch") is model
    assert all(type(norm) is nn.SyncBatchNorm for norm in _norms(model))
    assert all(module.training is training for module in model.modules())
    assert _tensors(model) == before
    assert all(norm.process_group is None for norm in _norms(model))
    model(torch.randn(2, 3, 2, 2))
    for implementation in ("stepwrap", "torch", "stepwrap", "torch"):
        convert_sync_batchnorm(model, implementation)
    assert all(type(norm) is nn.SyncBatchNorm for norm in _norms(model))
    assert revert_sync_batchnorm(model) is model
    assert [type(module) for module in model.modules()] == classes
    assert _tensors(model) == before
    ours = SynchronizedBatchNorm2d(3)
    assert type(convert_sync_batchnorm(ours, "torch")) is nn.SyncBatchNorm
    assert type(revert_sync_batchnorm(ours)) is nn.BatchNorm2d
    with pytest.raises(ValueError, match='^sync_bn .*"torch" or "stepwrap", .*mmcv'):
        convert_sync_batchnorm(model, implementation="mmcv")


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4, 3, 2, 2), (4, 3, 2, 2, 2)])
def test_torchs_layers_become_plain(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.SyncBatchNorm(3, momentum=0.3))
    (layer,) = model
    weight = layer.weight
    assert revert_sync_batchnorm(model) is model
    assert not isinstance(layer, nn.SyncBatchNorm)
    assert model[0] is layer
    assert layer.weight is weight
    plain = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    expected = plain[len(shape)](3, momentum=0.3)
    x = torch.randn(*shape)
    assert torch.equal(layer(x), expected(x))
    assert torch.equal(layer.running_var, expected.running_var)
    with pytest.raises(ValueError, match="at least 2D input"):
        layer(torch.randn(3))
    again = copy.deepcopy(convert_sync_batchnorm(model))
    assert torch.equal(again.eval()(x), layer.eval()(x))
    assert type(revert_sync_batchnorm(again)[0]).__name__ == "BatchNormXd"


@on_ranks(2)
def test_torchs_layers_become_plain_on_ranks() -> None:
    """torch's layer trains only on GPUs; once reverted, each rank has its own statistics."""
    layer = revert_sync_batchnorm(nn.SyncBatchNorm(2))
    x = torch.randn(4, 2) + torch.distributed.get_rank()
    assert torch.equal(layer(x), nn.BatchNorm1d(2)(x))


def test_models_that_cannot_be_converted(caplog: pytest.LogCaptureFixture) -> None:
    lazy = nn.Sequential(nn.LazyBatchNorm2d())
    with pytest.raises(TypeError, match=r"0 \(LazyBatchNorm2d\) is not initialised yet"):
        convert_sync_batchnorm(lazy)
    lazy(torch.randn(2, 3, 2, 2))
    assert type(convert_sync_batchnorm(lazy)[0]) is SynchronizedBatchNorm2d
    parametrized = nn.BatchNorm2d(3)
    parametrize.register_parametrization(parametrized, "weight", nn.Softplus())
    model = nn.Sequential(_Activated(3), parametrized, nn.InstanceNorm2d(3))
    kinds = [type(layer) for layer in model]
    with caplog.at_level(logging.WARNING):
        convert_sync_batchnorm(model)
    assert [type(layer) for layer in model] == kinds
    names = ["0 (_Activated)", "1 (ParametrizedBatchNorm2d)"]
    assert [record.getMessage().split(" has")[0] for record in caplog.records] == names
    caplog.clear()
    layer = nn.SyncBatchNorm(3)
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    with caplog.at_level(logging.WARNING):
        assert isinstance(revert_sync_batchnorm(layer), nn.SyncBatchNorm)
    assert "stays synchronised" in caplog.text


def test_data_parallel_gets_callbacks() -> None:
    model = DataParallel(nn.Sequential(nn.BatchNorm2d(3)), dim=0)
    container = nn.ModuleDict({"inner": model})
    convert_sync_batchnorm(container)
    assert isinstance(container["inner"], ReplicationCallbackDataParallel)
    assert type(model.module[0]) is SynchronizedBatchNorm2d
    assert model(torch.randn(4, 3, 2, 2)).shape == (4, 3, 2, 2)


def test_patched_names() -> None:
    before = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
    with patch_sync_batchnorm(), patch_sync_batchnorm():
        layers = [nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.BatchNorm3d(3, device="cpu")]
    kinds = [SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d]
    assert [type(layer) for layer in layers] == kinds
    assert (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) == before
    with pytest.raises(KeyError), patch_sync_batchnorm():
        raise KeyError
    assert (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) == before
    with patch_sync_batchnorm():
        assert type(convert_sync_batchnorm(before[1](3))) is SynchronizedBatchNorm2d


def test_whole_models_are_saved(tmp_path: Path) -> None:
    model = convert_sync_batchnorm(_model())
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(revert_sync_batchnorm(loaded)[2][2]) is _SmallEps


def test_the_option_on_one_process() -> None:
    cfg = {"type": "ddp", "sync_batchnorm": True}
    kind: Any = MODEL_WRAPPERS.get(cfg.pop("type"))
    assert kind is StepDistributedDataParallel
    wrapped = wrap_model(kind, SupervisedModel(_model(), nn.MSELoss()), **cfg)
    assert type(wrapped) is SingleDevice
    with pytest.raises(TypeError, match="did you mean sync_batchnorm"):
        wrap_model(kind, SupervisedModel(_model(), nn.MSELoss()), sync_batchnrm=True)


@pytest.mark.parametrize("kind", [DistributedDataParallel, StepDistributedDataParallel])
@on_ranks(1)
def test_wrong_order(kind: Any) -> None:
    wrapped = kind(_model())
    name = kind.__name__
    inside = f"^Sequential is already inside {name}: convert the model before you wrap it"
    for module, text in (
        (wrapped, f"^the model is already wrapped in {name}"),
        (nn.ModuleList([wrapped]), f"^'0' of the model is already wrapped in {name}"),
        (wrapped.module, inside),
        (wrapped.module[2], inside),
    ):
        with pytest.raises(ValueError, match=text):
            convert_sync_batchnorm(module)
    assert not any(isinstance(module, SynchronizedBatchNorm2d) for module in wrapped.modules())
    # Other models may be converted, and so may a model whose wrapper has been deleted.
    convert_sync_batchnorm(_model())
    model = wrapped.module
    del wrapped, module
    convert_sync_batchnorm(model)
    assert type(model[1]) is SynchronizedBatchNorm2d


def test_precision() -> None:
    model = convert_sync_batchnorm(_model(), precision="fp64")
    assert {norm.precision for norm in _norms(model)} == {"fp64"}
    convert_sync_batchnorm(model)
    assert {norm.precision for norm in _norms(copy.deepcopy(model))} == {"fp64"}
    revert_sync_batchnorm(model)
    assert not any("precision" in vars(norm) for norm in _norms(model))
    assert {norm.precision for norm in _norms(convert_sync_batchnorm(model))} == {"fp32"}
    with pytest.raises(ValueError, match="precision .*'fp32' .*'fp64', got 'double'"):
        convert_sync_batchnorm(model, precision="double")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision must .*None .*implementation='torch'"):
        convert_sync_batchnorm(model, "torch", precision="fp64")


def test_precision_by_option() -> None:
    def build(**options: str) -> Any:
        model = SupervisedModel(_model(), nn.MSELoss())
        return build_from_cfg(
            {"type": "dp", "sync_batchnorm": options, "module": model}, MODEL_WRAPPERS
        )

    assert build(precision="fp64").module.net[1].precision == "fp64"
    with pytest.raises(TypeError, match="sync_batchnorm .*'precison'; .*you mean precision"):
        build(precison="fp64")


@on_ranks(1)
def test_the_option_with_ranks() -> None:
    cfg = {"type": "ddp", "sync_batchnorm": True, "module": SupervisedModel(_model(), nn.MSELoss())}
    wrapped = build_from_cfg(cfg, MODEL_WRAPPERS)
    plain = StepDistributedDataParallel(_model())
    norms = wrapped.module.net[1], plain.module[1]
    assert [type(norm) is SynchronizedBatchNorm2d for norm in norms] == [True, False]
