"""Options of the strategies, and errors at construction."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning_parts import QUIET
from torch import nn

from stepwrap.plugins.lightning import StepFabricStrategy, StepStrategy
from stepwrap.plugins.lightning.tree import FABRIC_REGISTRY, TREE, StrategyRegistry
from stepwrap.wrappers import SeparateDistributedDataParallel, StepDistributedDataParallel

pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in QUIET]


@pytest.mark.parametrize(
    ("wrapper", "options", "nearest"),
    [
        (None, {"find_unused_parameter": True}, "find_unused_parameters"),
        ("ddp", {"syncbatchnorm": True}, "sync_batchnorm"),
        ("ddp", {"ddp_comm_hook": print}, "comm_hook"),
        ("ddp", {"process_group_backends": "gloo"}, "process_group_backend"),
        ("ddp", {"module": nn.Linear(1, 1)}, "StepDistributedDataParallel"),
        ("fsdp", {"mixed_precisions": {}}, "mixed_precision"),
        ("separate", {"detect_anomalous_params": True}, "an option of .*ddp and .*single"),
        ("ddp", {"shard": ["net"]}, "an option of .*fsdp"),
        ("fsdp", {"find_unused_parameters": True}, "an option of .*ddp and separate"),
    ],
)
def test_an_unknown_option_is_an_error_at_construction(
    wrapper: str | None, options: dict[str, Any], nearest: str
) -> None:
    with pytest.raises(TypeError, match=nearest):
        StepStrategy(wrapper, **options)


def test_an_unknown_wrapper_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(KeyError, match="separate"):
        StepStrategy("seperate")


@pytest.mark.parametrize("wrapper", [3, nn.Linear(1, 1), nn.Linear, "torch.nn.Linear"])
def test_a_wrapper_of_another_type_is_an_error_at_construction(wrapper: Any) -> None:
    with pytest.raises(TypeError, match="class .*train_step, .*name .*fsdp"):
        StepStrategy(wrapper)


def test_a_value_that_cannot_be_used_is_an_error_at_construction() -> None:
    with pytest.raises((KeyError, ValueError), match="bf16_compress"):
        StepStrategy(comm_hook="bf16_compres")
    with pytest.raises(ValueError, match="same number of batches"):
        StepStrategy(uneven_inputs=True)


def test_options_go_to_the_wrapper_and_to_lightnings_strategy() -> None:
    strategy = StepStrategy("separate", sync_batchnorm=True, process_group_backend="gloo")
    assert strategy.wrapper is SeparateDistributedDataParallel
    assert strategy.wrapper_options == {"sync_batchnorm": True}
    assert strategy.process_group_backend == "gloo"
    assert StepStrategy(StepDistributedDataParallel).wrapper is StepDistributedDataParallel


@pytest.mark.parametrize("name", ["stepwrap", "stepwrap_spawn"])
def test_the_names_in_lightnings_registries(name: str) -> None:
    assert type(StrategyRegistry.get(name)) is StepStrategy
    assert type(FABRIC_REGISTRY.get(name)) is StepFabricStrategy


@pytest.mark.parametrize("wrapper", ["fsdp", "separate", "single"])
def test_fabric_refuses_wrappers_that_it_could_not_accumulate_under(wrapper: str) -> None:
    with pytest.raises(TypeError, match="no_backward_sync"):
        StepFabricStrategy(wrapper)


def test_fabric_refuses_a_step_that_it_does_not_call() -> None:
    class Unused(StepDistributedDataParallel):
        def train_step(self, data: Any, optim_wrapper: Any) -> Any:
            raise AssertionError

    with pytest.raises(TypeError, match="Unused has a custom train_step"):
        StepFabricStrategy(Unused)


def test_fabric_refuses_unknown_options() -> None:
    with pytest.raises(TypeError, match="did you mean gradient_as_bucket_view"):
        StepFabricStrategy(gradients_as_bucket_view=True)


def test_the_front_door() -> None:
    door = importlib.import_module("stepwrap.plugins.lightning")
    assert door.__all__ == ["StepFabricStrategy", "StepLightningModule", "StepStrategy"]


@pytest.mark.filterwarnings("ignore:.*tensorboardX")
@pytest.mark.skipif(TREE != "pytorch_lightning", reason="the page imports pytorch_lightning")
def test_the_page_shows_the_strategy_correctly() -> None:
    page = (Path(__file__).parents[2] / "docs/lightning.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})


def _remove_option(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Import our modules again as if those packages were not installed."""
    for name in list(sys.modules):
        if name.split(".")[0] in names or name.startswith("stepwrap.plugins"):
            monkeypatch.delitem(sys.modules, name)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_without_lightning_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    _remove_option(monkeypatch, "pytorch_lightning", "lightning_fabric", "lightning")
    with pytest.raises(ImportError, match=r"stepwrap\[lightning\]"):
        importlib.import_module("stepwrap.plugins.lightning")
