"""Every option of the fully sharded wrapper from a config, on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from stepwrap.registry import ConfigError
from stepwrap.runner import Runner

HERE = "test_runner_fsdp_options"
SAMPLES, BATCH, EPOCHS = 24, 3, 2


class Points(TensorDataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(SAMPLES, 4, generator=generator)
        super().__init__(inputs, (inputs.sum(1) > 0).long())


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 2))


def ones(module: nn.Module) -> None:
    for one in module.parameters(recurse=False):
        nn.init.constant_(one, 0.5)


def settings(wrapper: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "model": {
            "type": "SupervisedModel",
            "net": {"type": f"{HERE}.Net"},
            "loss": {"type": "CrossEntropyLoss"},
        },
        "wrapper": {"type": "fsdp", "sync_batchnorm": True, **wrapper},
        "optimizer": {"type": "SGD", "lr": 0.5, "momentum": 0.9},
        "data": {"train": {"dataset": {"type": f"{HERE}.Points"}, "batch_size": BATCH}},
        "train": {"type": "EpochTrainLoop", "max_epochs": EPOCHS},
        "hooks": {"progress": False, "checkpoint": False},
        "launch": {"nproc": 2},
        "device": "cpu",
        **changes,
    }


def train(configs: list[dict[str, Any]], folder: Path) -> list[dict[str, Tensor]]:
    results = []
    for at, config in enumerate(configs):
        runner = Runner.from_config({**config, "run_dir": str(folder / str(at))})
        runner.train()
        model: Any = runner.state.model
        parameters = dict(model.module.named_parameters())
        assert any(isinstance(one, DTensor) for one in parameters.values())
        results.append(
            {
                name: (one.full_tensor() if isinstance(one, DTensor) else one).detach()
                for name, one in parameters.items()
            }
        )
    return results


def alone() -> dict[str, Tensor]:
    """Return what plain PyTorch makes of the batches of both ranks together."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    inputs, target = Points().tensors
    for at in range(EPOCHS * SAMPLES // (2 * BATCH)):
        start = at * 2 * BATCH % SAMPLES
        batch = slice(start, start + 2 * BATCH)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs[batch]), target[batch]).backward()
        optimizer.step()
    return {f"net.{name}": one.detach() for name, one in net.named_parameters()}


EXACT: list[dict[str, Any]] = [
    {},
    {"shard": ["Linear"]},
    {"shard": ["net.3", "Linear"], "reshard_after_forward": False},
    {"shard": {"min_params": 20}},
    {"cpu_offload": True},
    {"cpu_offload": {"offload_params": True, "pin_memory": False}},
    {"shard": ["Linear"], "prefetch": {"forward": 1, "backward": 1}},
    {"mixed_precision": {"param_dtype": "float32", "reduce_dtype": "float32"}},
    {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_PRE"},
    {"sharding_strategy": "HYBRID_SHARD"},
    {"auto_wrap_policy": "always_wrap_policy", "forward_prefetch": True},
    {"auto_wrap_policy": {"type": "size_based_auto_wrap_policy", "min_num_params": 20}},
    {"detect_anomalous_params": True, "use_orig_params": True, "limit_all_gathers": True},
]


@pytest.mark.slow
def test_options_that_change_no_number(tmp_path: Path) -> None:
    configs = [settings(options) for options in EXACT]
    configs += [
        settings({"type": "MMFullyShardedDataParallel", "shard": ["Linear"]}, mesh={"data": 2}),
        settings({"shard": ["Linear"]}, mesh={"replicate": 2, "shard": 1}),
        settings({"shard": ["Linear"]}, init_device="meta"),
    ]
    expected = alone()
    for results in run_ranks(train, 2, configs, tmp_path):
        for config, weights in zip(configs, results, strict=True):
            assert weights.keys() == expected.keys()
            for name, one in expected.items():
                assert (weights[name] - one).abs().max().item() <= 2e-6, (config["wrapper"], name)


def test_an_initialiser_of_ones_own(tmp_path: Path) -> None:
    wrapper = {"param_init_fn": f"{HERE}.ones"}
    config = settings(wrapper, init_device="meta", optimizer={"type": "SGD", "lr": 0.0})
    for (weights,) in run_ranks(train, 2, [config], tmp_path):
        assert all(bool((one == 0.5).all()) for one in weights.values())


@pytest.mark.parametrize(
    ("wrapper", "where", "text"),
    [
        ({"shards": ["Linear"]}, "wrapper.shards", "did you mean shard"),
        ({"sharding_strat": "FULL_SHARD"}, "wrapper.sharding_strat", "sharding_strategy"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    wrapper: dict[str, Any], where: str, text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Runner.from_config(settings(wrapper, launch={"nproc": 1}))
    assert where in str(error.value)
    assert text in str(error.value)
