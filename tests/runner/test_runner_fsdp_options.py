"""Every option of the fully sharded wrapper from a config, compared with plain PyTorch."""

from typing import Any

import pytest
from parallel_runs import OPTIMIZERS, settings, train_plainly, trained
from ranks import run_ranks
from torch import Tensor, nn
from weights import apart

from stepwrap.registry import ConfigError
from stepwrap.runner import Runner

BLOCKS = {"shard": ["Block"]}


def ones(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, 0.5)


def make_config(options: dict[str, Any], **sections: Any) -> dict[str, Any]:
    wrapper = {"type": "fsdp", "sync_batchnorm": True, **options}
    config = settings(2, **{"optimizer": {"type": "SGD", **OPTIMIZERS["SGD"]}, **sections})
    config["model"]["net"]["dtype"] = "float32"
    return {**config, "wrapper": wrapper}


EXACT: list[dict[str, Any]] = [
    make_config({}),
    make_config(BLOCKS),
    make_config({"shard": ["net.head", "Block"], "reshard_after_forward": False}),
    make_config({"shard": {"min_params": 300}}),
    make_config({"cpu_offload": True}),
    make_config({"cpu_offload": {"offload_params": True, "pin_memory": False}}),
    make_config({**BLOCKS, "prefetch": {"forward": 1, "backward": 1}}),
    make_config({"mixed_precision": {"param_dtype": "float32", "reduce_dtype": "float32"}}),
    make_config({"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_PRE"}),
    make_config({"sharding_strategy": "HYBRID_SHARD"}),
    make_config({"auto_wrap_policy": "always_wrap_policy", "forward_prefetch": True}),
    make_config(
        {"auto_wrap_policy": {"type": "size_based_auto_wrap_policy", "min_num_params": 300}}
    ),
    make_config({"detect_anomalous_params": True, "use_orig_params": True,
                 "limit_all_gathers": True}),
    make_config({"type": "MMFullyShardedDataParallel", **BLOCKS}, mesh={"data": 2}),
    make_config(BLOCKS, mesh={"replicate": 2, "shard": 1}),
    make_config(BLOCKS, init_device="meta"),
]  # fmt: skip


def trained_by_all() -> list[dict[str, Tensor]]:
    return [trained(config) for config in EXACT]


@pytest.mark.slow
# A separately sharded linear layer returns a view for sequences.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_options_that_change_no_number() -> None:
    expected = train_plainly(EXACT[0])
    for results in run_ranks(trained_by_all, 2):
        for config, weights in zip(EXACT, results, strict=True):
            assert apart(weights, expected) <= 2e-6, config["wrapper"]


def test_a_custom_initialiser() -> None:
    still = {"type": "SGD", "lr": 0.0}
    options = {"param_init_fn": "test_runner_fsdp_options.ones"}
    config = make_config(options, init_device="meta", optimizer=still)
    for weights in run_ranks(trained, 2, config):
        assert all(bool((weight == 0.5).all()) for weight in weights.values())


@pytest.mark.parametrize(
    ("option", "nearest"), [("shards", "did you mean shard"), ("sharding_strat", "_strategy")]
)
def test_mistakes_are_reported_before_anything_runs(option: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"wrapper\.{option}: .*{nearest}"):
        Runner.from_config(make_config({option: ["Linear"]}))
