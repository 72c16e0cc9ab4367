"""The options of fully sharded training in all spellings, without a process group."""

import copy
import functools
from typing import Any

import pytest
import torch
from fsdp_runs import Block, Net
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from stepwrap.registry.arguments import argument_problems
from stepwrap.wrappers import StepFullyShardedDataParallel
from stepwrap.wrappers.fsdp.options import EXTRA_OPTIONS, read_options
from stepwrap.wrappers.fsdp.units import find_units

HALF = torch.bfloat16
NO_PIN = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())


def init_ones(module: nn.Module, scale: float = 1.0) -> None:
    for param in module.parameters():
        nn.init.constant_(param, scale)


@pytest.mark.parametrize(
    ("setting", "name", "expected"),
    [
        ({}, "free_after_forward", True),
        ({"sharding_strategy": "FULL_SHARD"}, "free_after_forward", True),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "free_after_forward", False),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, "free_after_forward", False),
        ({"sharding_strategy": "HYBRID_SHARD"}, "hybrid", True),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, "free_after_forward", False),
        ({"reshard_after_forward": 2}, "free_after_forward", 2),
        ({"cpu_offload": None}, "offload", OffloadPolicy()),
        ({"cpu_offload": False}, "offload", OffloadPolicy()),
        ({"cpu_offload": True}, "offload", NO_PIN),
        ({"cpu_offload": CPUOffload(offload_params=True)}, "offload", NO_PIN),
        ({"cpu_offload": CPUOffload()}, "offload", OffloadPolicy()),
        ({"cpu_offload": {"offload_params": True}}, "offload", NO_PIN),
        ({"cpu_offload": {"pin_memory": False}}, "offload", CPUOffloadPolicy(pin_memory=False)),
        ({"cpu_offload": NO_PIN}, "offload", NO_PIN),
        ({"mixed_precision": None}, "precision", MixedPrecisionPolicy()),
        (
            {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "torch.float32"}},
            "precision",
            MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32),
        ),
        (
            {"mixed_precision": {"output_dtype": HALF, "cast_forward_inputs": False}},
            "precision",
            MixedPrecisionPolicy(output_dtype=HALF, cast_forward_inputs=False),
        ),
        (
            {"mixed_precision": MixedPrecision(param_dtype=HALF)},
            "precision",
            MixedPrecisionPolicy(param_dtype=HALF),
        ),
        (
            {"mixed_precision": MixedPrecision(HALF, cast_root_forward_inputs=False)},
            "precision",
            MixedPrecisionPolicy(param_dtype=HALF, cast_forward_inputs=False),
        ),
        ({"prefetch": 2}, "prefetch", (2, 2)),
        ({"prefetch": {"backward": 1}}, "prefetch", (0, 1)),
        ({"forward_prefetch": True}, "prefetch", (1, 0)),
        ({"forward_prefetch": False}, "prefetch", (0, 0)),
        ({"backward_prefetch": "BACKWARD_PRE"}, "prefetch", (0, 0)),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}, "prefetch", (0, 0)),
        ({"use_orig_params": None, "limit_all_gathers": True}, "same_weights", True),
        ({"sync_module_states": False}, "same_weights", False),
        ({"device_id": "cpu"}, "device", torch.device("cpu")),
        ({"ignored_modules": "head", "ignored_parameters": ["a"]}, "ignored", ("a", "head")),
        ({"param_init_fn": init_ones}, "param_init_fn", init_ones),
        ({"param_init_fn": "torch.nn.init.ones_"}, "param_init_fn", nn.init.ones_),
    ],
)
def test_spellings(setting: dict[str, Any], name: str, expected: Any) -> None:
    before = copy.deepcopy(setting)
    assert getattr(read_options(setting), name) == expected
    assert repr(setting) == repr(before)


def test_functions_with_arguments() -> None:
    settings = {"param_init_fn": {"type": f"{__name__}.init_ones", "scale": 3.0}}
    init = read_options(settings).param_init_fn
    layer = nn.Linear(2, 2)
    assert init is not None
    init(layer)
    assert bool((layer.weight == 3).all())
    assert settings == {"param_init_fn": {"type": f"{__name__}.init_ones", "scale": 3.0}}


def always(module: nn.Module, recurse: bool, nonwrapped_numel: int, kind: type = Block) -> bool:
    return recurse or isinstance(module, kind)


BLOCKS = ["blocks.0", "blocks.1", "blocks.1.inner"]
LINEARS = [f"{block}.{layer}" for block in BLOCKS for layer in ("up", "down")] + ["head"]


@pytest.mark.parametrize(
    ("policy", "paths"),
    [
        ("size_based_auto_wrap_policy", None),
        ({"type": "size_based_auto_wrap_policy", "min_num_params": 130}, BLOCKS),
        ({"type": "transformer_auto_wrap_policy", "transformer_layer_cls": ["Block"]}, BLOCKS),
        ({"type": "ModuleWrapPolicy", "module_classes": [nn.Linear]}, LINEARS),
        ("always_wrap_policy", [*BLOCKS, *LINEARS, "blocks"]),
        (ModuleWrapPolicy({Block}), BLOCKS),
        (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), BLOCKS),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=100), None),
        (f"{__name__}.always", BLOCKS),
        ({"type": f"{__name__}.always", "kind": nn.Linear}, LINEARS),
    ],
)
def test_wrapping_policies(policy: Any, paths: list[str] | None) -> None:
    options = read_options({"auto_wrap_policy": policy})
    model = Net()
    if policy == "size_based_auto_wrap_policy":
        with pytest.raises(ValueError, match=r"min_params=1e\+08 parameters; the largest has"):
            find_units(model, options, set())
        return
    units = list(find_units(model, options, set()))
    if paths is None:
        sizes = [sum(p.numel() for p in model.get_submodule(unit).parameters()) for unit in units]
        assert sizes
        assert min(sizes) >= 100
    else:
        assert sorted(units) == sorted(paths)


@pytest.mark.parametrize(
    ("setting", "error", "text"),
    [
        ({"sharding_strategy": "NO_SHARD"}, ValueError, r"no counterpart.*\(wrapper: ddp\)"),
        (
            {"sharding_strategy": "FULL_SHRAD"},
            ValueError,
            "one of FULL_SHARD, SHARD_GRAD_OP, .*got 'FULL_SHRAD'; did you mean FULL_SHARD",
        ),
        ({"sharding_strategy": 3}, TypeError, "or a ShardingStrategy, got 3"),
        ({"cpu_offload": "yes"}, TypeError, "cpu_offload must be true or false, got 'yes'"),
        ({"cpu_offload": {"offload": True}}, TypeError, "did you mean offload_params"),
        ({"cpu_offload": {"pin_memory": 1}}, TypeError, "pin_memory must be true or false"),
        ({"use_orig_params": False}, ValueError, "FSDP2 shards each parameter separately"),
        ({"limit_all_gathers": False}, ValueError, "prefetch sets how many"),
        ({"mixed_precision": "bfloat16"}, TypeError, "a mapping of dtype names"),
        ({"mixed_precision": {"param_type": HALF}}, TypeError, "did you mean param_dtype"),
        ({"mixed_precision": {"param_dtype": "bflot16"}}, ValueError, "did you mean bfloat16"),
        ({"mixed_precision": {"param_dtype": 16}}, TypeError, "the name of a dtype, got 16"),
        ({"mixed_precision": {"buffer_dtype": HALF}}, ValueError, "FSDP2 keeps the dtype of"),
        (
            {"mixed_precision": MixedPrecision(keep_low_precision_grads=True)},
            ValueError,
            "gradients always have the dtype of their parameters",
        ),
        (
            {"mixed_precision": {"cast_root_forward_inputs": False}},
            ValueError,
            "cast_forward_inputs=False, which leaves",
        ),
        ({"mixed_precision": {"cast_forward_inputs": 0}}, TypeError, "must be true or false"),
        ({"backward_prefetch": "BACKWARD_POST"}, ValueError, "FSDP2 always gathers the next block"),
        ({"backward_prefetch": "BACKWARD"}, ValueError, "one of BACKWARD_PRE, BACKWARD_POST"),
        ({"prefetch": 1, "forward_prefetch": True}, ValueError, "prefetch and forward_prefetch"),
        ({"prefetch": -1}, TypeError, "number of blocks to gather ahead"),
        ({"prefetch": {"forwards": 1}}, TypeError, "did you mean forward"),
        ({"prefetch": True}, TypeError, "got True"),
        ({"reshard_after_forward": 0}, TypeError, "a number of ranks"),
        ({"reshard_after_forward": "no"}, TypeError, "got 'no'"),
        ({"shard": "Block", "auto_wrap_policy": always}, ValueError, "shard and auto_wrap_policy"),
        ({"process_group": "world"}, TypeError, "two of them"),
        ({"mesh": object(), "device_mesh": object()}, ValueError, "mesh and device_mesh have"),
        (
            {"reshard_after_forward": True, "sharding_strategy": "FULL_SHARD"},
            ValueError,
            "have the same meaning",
        ),
        ({"auto_wrap_policy": "size_based"}, ValueError, "did you mean size_based_auto_wrap_poli"),
        ({"auto_wrap_policy": {"type": "ModuleWrapPolicy"}}, ValueError, "needs module_classes"),
        ({"auto_wrap_policy": "torch.nn.nothing"}, ValueError, "import path of a function: "),
        (
            {"auto_wrap_policy": 3},
            TypeError,
            "auto_wrap_policy must be a function or its import path, got 3",
        ),
        ({"auto_wrap_policy": CustomPolicy(lambda module: True)}, TypeError, "name the blocks in"),
        ({"param_init_fn": "torch.nn.init"}, TypeError, "must be a function or its import path"),
        ({"param_init_fn": {"scale": 2}}, TypeError, "must be a function or its import path"),
        ({"ignored_modules": 3}, TypeError, "a list of names, modules or parameters, got 3"),
        ({"ignored_states": [3]}, TypeError, "must contain names, modules or parameters, got 3"),
        ({"sync_module_states": "yes"}, TypeError, "sync_module_states must be true or false"),
    ],
)
def test_refusals(setting: dict[str, Any], error: type[Exception], text: str) -> None:
    before = copy.copy(setting)
    with pytest.raises(error, match=text):
        read_options(setting)
    assert setting == before


def test_options_are_checked_by_name() -> None:
    with pytest.raises(TypeError, match="'sharding_strat'; did you mean sharding_strategy"):
        StepFullyShardedDataParallel(Net(), sharding_strat="FULL_SHARD")
    (problem,) = argument_problems(StepFullyShardedDataParallel, ["prefetsch"], ["module"])
    assert "did you mean prefetch" in problem.what


def test_signature_for_configs() -> None:
    names = list(StepFullyShardedDataParallel.config_signature().parameters)
    assert names[:3] == ["module", "shard", "mesh"]
    assert set(EXTRA_OPTIONS) < set(names)
    torch_names = set(torch.distributed.fsdp.FullyShardedDataParallel.__init__.__annotations__)
    assert torch_names - {"module", "return"} <= set(names)

    class Narrow(StepFullyShardedDataParallel):
        def __init__(self, module: nn.Module, weight: float, **options: Any) -> None:
            super().__init__(module, **options)

    inherited = list(Narrow.config_signature().parameters)
    assert inherited[:3] == ["module", "weight", "shard"]
    assert set(inherited) == {*names, "weight"}
