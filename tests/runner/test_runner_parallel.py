"""Meshes, split layers and prepared models in configs, compared with plain PyTorch."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from marks import nightly, slow
from parallel_runs import (
    OPTIMIZERS,
    PLAN,
    SEQUENCE_PLAN,
    Transformer,
    settings,
    train_plainly,
    trained,
)
from ranks import run_ranks
from weights import apart

from stepwrap.runner import Runner
from stepwrap.wrappers import (
    SeparateDistributedDataParallel,
    SingleDevice,
    StepDataParallel,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
)

# Warnings of the compiler's own imports and of its checks of block inputs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

TP = {"tensor_parallel": {"plan": PLAN}}


def worst(ranks: int, config: dict[str, Any]) -> float:
    """Return the largest difference of any rank from plain PyTorch."""
    expected = train_plainly(config)
    everywhere = run_ranks(trained, ranks, config)
    return max(apart(weights, expected) for weights in everywhere)


def with_(optimizer: str, data_size: int, dtype: str = "float64", **sections: Any) -> Any:
    config = settings(data_size, **sections)
    config["model"]["net"]["dtype"] = dtype
    return {**config, "optimizer": {"type": optimizer, **OPTIMIZERS[optimizer]}}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-12), *nightly(("float32", 2e-6))])
def test_split_over_two_ranks(optimizer: str, dtype: str, limit: float) -> None:
    assert worst(2, with_(optimizer, 1, dtype, mesh={"tensor": 2}, **TP)) <= limit


@pytest.mark.parametrize(
    ("wrapper", "optimizer", "dtype", "limit"),
    [
        ("ddp", "SGD", "float64", 1e-12),
        ("fsdp", "AdamW", "float64", 1e-12),
        *slow(
            ("ddp", "AdamW", "float64", 1e-12),
            ("fsdp", "SGD", "float64", 1e-12),
        ),
        *nightly(
            *((wrapper, two, "float32", 2e-6) for wrapper in ("ddp", "fsdp") for two in OPTIMIZERS)
        ),
    ],
)
def test_split_and_replicated_or_sharded(
    wrapper: str, optimizer: str, dtype: str, limit: float
) -> None:
    sections = {"wrapper": {"type": wrapper}, "mesh": {"data": 2, "tensor": -1}, **TP}
    if wrapper == "fsdp":
        sections["wrapper"]["shard"] = ["Block"]
    assert worst(4, with_(optimizer, 2, dtype, **sections)) <= limit


def test_sequence_plan() -> None:
    sections = {"mesh": {"tensor": 2}, "tensor_parallel": {"plan": SEQUENCE_PLAN}}
    assert worst(2, with_("AdamW", 1, **sections)) <= 1e-12


@pytest.mark.slow
def test_sequence_plan_compiled() -> None:
    sections = {"mesh": {"tensor": 2}, "tensor_parallel": {"plan": SEQUENCE_PLAN}, **COMPILED}
    assert worst(2, with_("AdamW", 1, **sections)) <= 1e-12


@pytest.mark.slow
def test_sequence_plan_sharded() -> None:
    sections = {"mesh": {"data": 2, "tensor": 2}, "tensor_parallel": {"plan": SEQUENCE_PLAN}}
    config = with_("AdamW", 2, wrapper={"type": "fsdp", "shard": ["Block"]}, **sections)
    assert worst(4, config) <= 1e-12


def test_copies_of_shards() -> None:
    config = with_("AdamW", 4, wrapper={"type": "fsdp"}, mesh={"replicate": 2, "shard": 2})
    assert worst(4, config) <= 1e-12


def test_built_on_the_meta_device() -> None:
    config = with_("AdamW", 2, "float32", wrapper={"type": "fsdp"}, init_device="meta")
    assert worst(2, config) <= 2e-6


@pytest.mark.slow
def test_split_and_built_on_the_meta_device() -> None:
    sections = {"mesh": {"data": 2, "tensor": 2}, "init_device": "meta", **TP}
    assert worst(4, with_("AdamW", 2, "float32", wrapper={"type": "fsdp"}, **sections)) <= 2e-6


CHECKPOINTED = {"activation_checkpointing": ["Block"]}
COMPILED = {"compile": {"blocks": ["Block"], "backend": "aot_eager", "fullgraph": False}}
# The number of ranks, the size of the data axis, and sections.
FORMS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "single": (1, 1, {"wrapper": {"type": "single"}}),
    "dp": (1, 1, {"wrapper": {"type": "dp", "device_ids": ["cpu", "cpu"]}}),
    "ddp": (2, 2, {"wrapper": {"type": "ddp"}}),
    "separate": (2, 2, {"wrapper": {"type": "separate"}}),
    "fsdp": (2, 2, {"wrapper": {"type": "fsdp", "shard": ["Block"]}}),
    "tensor": (2, 1, {"mesh": {"tensor": 2}, **TP}),
    "ddp x tensor": (4, 2, {"mesh": {"data": 2, "tensor": 2}, **TP}),
}


def prepared(form: str, **sections: Any) -> tuple[int, Any]:
    """Return the number of ranks and the config of a form with further sections."""
    ranks, data_size, form_sections = FORMS[form]
    return ranks, with_("AdamW", data_size, **form_sections, **sections)


@pytest.mark.parametrize("form", ["single", "fsdp", *slow("ddp")])
@pytest.mark.parametrize(
    "section",
    [
        CHECKPOINTED,
        COMPILED,
        *slow(
            {"activation_checkpointing": {"blocks": ["net.blocks.*"], "preserve_rng_state": False}},
            {"compile": {"backend": "eager", "dynamic": False}},
            {**CHECKPOINTED, "compile": {"backend": "aot_eager"}},
        ),
    ],
)
def test_prepared_models(form: str, section: dict[str, Any]) -> None:
    assert worst(*prepared(form, **section)) <= 1e-12


@pytest.mark.parametrize("form", ["separate", "tensor", *slow("ddp x tensor")])
@pytest.mark.parametrize("section", [CHECKPOINTED, COMPILED, *slow({**CHECKPOINTED, **COMPILED})])
@pytest.mark.slow
def test_prepared_models_in_parts(form: str, section: dict[str, Any]) -> None:
    assert worst(*prepared(form, **section)) <= 1e-12


def test_checkpointed_copies() -> None:
    assert worst(*prepared("dp", **CHECKPOINTED)) <= 1e-12


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    config = with_("AdamW", 1, compile=True)
    assert apart(trained(config), train_plainly(config)) <= 1e-12


@pytest.mark.parametrize(
    "form", ["single", "fsdp", "tensor", *slow("dp", "ddp", "separate", "ddp x tensor")]
)
def test_frozen_parameters_stay(form: str) -> None:
    patterns = ["net.embed", "net.blocks.*.norm1.*", "net.blocks.0.up", "net.head.bias"]
    ranks, config = prepared(form, freeze=patterns)
    torch.manual_seed(0)
    start = Transformer(dtype="float64").named_parameters()
    before = {f"net.{name}": value for name, value in start}
    expected = train_plainly(config)
    for weights in run_ranks(trained, ranks, config):
        assert apart(weights, expected) <= 1e-12
        stayed = {name for name, value in weights.items() if torch.equal(value, before[name])}
        norms = {f"net.blocks.{i}.norm1.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
        layer = {"net.blocks.0.up.weight", "net.blocks.0.up.bias"}
        assert stayed == {"net.embed.weight", "net.head.bias", *norms, *layer}


def _facts(config: dict[str, Any]) -> tuple[Any, ...]:
    runner = Runner.from_config(config)
    wrapper = runner.state.model
    loader: Any = runner._train_loop.dataloader
    batch = next(iter(loader))[0]
    return type(wrapper), torch.rand(()).item(), batch.sum().item(), len(batch)


def test_ranks_of_a_tensor_group_see_and_draw_the_same() -> None:
    config = settings(2, mesh={"data": 2, "tensor": 2}, **TP)
    rank_0, second, third, fourth = run_ranks(_facts, 4, config)
    assert rank_0 == second
    assert third == fourth
    assert rank_0[0] is StepDistributedDataParallel
    assert rank_0[1:3] != third[1:3]
    assert rank_0[3] == third[3] == 4


@pytest.mark.parametrize(
    ("memory_gib", "ranks", "expected"),
    [
        (1e-9, 1, SingleDevice),
        (1.0, 2, StepDistributedDataParallel),
        (1e-9, 2, StepFullyShardedDataParallel),
        *slow((None, 2, StepDistributedDataParallel)),
    ],
)
def test_chosen_by_size(memory_gib: float | None, ranks: int, expected: type) -> None:
    tables = {"fsdp": {"shard": ["Block"]}, "ddp": {"gradient_as_bucket_view": True}}
    config = settings(ranks, wrapper={"type": "auto", "memory_gib": memory_gib, **tables})
    assert {facts[0] for facts in run_ranks(_facts, ranks, config)} == {expected}


def test_dropout_is_the_same_on_all_ranks_of_a_tensor_group() -> None:
    config = settings(1, mesh={"tensor": 2}, **TP)
    config["model"]["net"]["dropout"] = 0.3
    rank_0, second = run_ranks(trained, 2, config)
    assert apart(rank_0, second) == 0
    assert apart(rank_0, train_plainly(settings())) > 1e-3


class _Open:
    """Take an argument, and pass all others on."""

    def __init__(self, *args: Any, gamma: float = 1.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gamma = gamma


class _Closed:
    """Take an argument, and set the options of the base class."""

    options: ClassVar[dict[str, Any]] = {"detect_anomalous_params": False}

    def __init__(self, module: torch.nn.Module, gamma: float = 1.0) -> None:
        super().__init__(module, **self.options)  # type: ignore[call-arg]
        self.gamma = gamma


class OpenSingle(_Open, SingleDevice):
    pass


class ClosedSingle(_Closed, SingleDevice):
    pass


class OpenData(_Open, StepDataParallel):
    pass


class ClosedData(_Closed, StepDataParallel):
    pass


class OpenDistributed(_Open, StepDistributedDataParallel):
    pass


class ClosedDistributed(_Closed, StepDistributedDataParallel):
    pass


class OpenSeparate(_Open, SeparateDistributedDataParallel):
    pass


class ClosedSeparate(_Closed, SeparateDistributedDataParallel):
    options: ClassVar[dict[str, Any]] = {"bucket_cap_mb": 3}


class OpenSharded(_Open, StepFullyShardedDataParallel):
    pass


class ClosedSharded(_Closed, StepFullyShardedDataParallel):
    pass


IN_ONE_PROCESS = [OpenSingle, ClosedSingle, OpenData, ClosedData]
AVERAGING = [
    *(OpenDistributed, ClosedDistributed, OpenSeparate, ClosedSeparate, OpenSharded, ClosedSharded),
]


def _gammas(wrappers: list[Any], config: dict[str, Any]) -> list[float]:
    values = []
    for wrapper in wrappers:
        values.append(wrapper(build_model(), gamma=3.0).gamma)
        runner = Runner.from_config({**config, "wrapper": {"type": wrapper, "gamma": 2.0}})
        values.append(runner.state.model.gamma)
    return values


def build_model() -> SupervisedModel:
    return SupervisedModel(torch.nn.Linear(2, 2), torch.nn.MSELoss())


def test_a_subclass_of_any_wrapper_takes_its_own_argument() -> None:
    assert _gammas(IN_ONE_PROCESS, settings(1)) == [3.0, 2.0] * 4
    assert run_ranks(_gammas, 2, AVERAGING, settings(2)) == [[3.0, 2.0] * 6] * 2
