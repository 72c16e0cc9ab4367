"""The strategy under the real Trainer on two ranks, compared with Lightning's ddp."""

import re
from typing import Any

import pytest
import torch
from lightning_parts import QUIET, Automatic, Manual, join_lightning, loader, make_trainer
from lightning_runs import (
    DDP_OPTIONS,
    SETTINGS,
    WRAPPERS,
    Messages,
    compare,
    plain_epoch,
    sent,
    whole_weights,
)
from lightning_shards import unusual_modules
from marks import selected, slow
from ranks import run_ranks

from stepwrap.plugins.lightning import StepStrategy
from stepwrap.wrappers import StepDistributedDataParallel

KINDS = {"reduced": "c10d::allreduce_", "scattered": "c10d::_reduce_scatter_base_"}
pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in QUIET]


QUICK = ("automatic", "manual", "accumulation", "norm")
ROWS = [*QUICK, *slow(*(setting for setting in SETTINGS if setting not in QUICK))]


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], Any]]:
    return compare(sorted(selected(request, "setting")))


@pytest.mark.parametrize("setting", ROWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weights_and_logs_equal_lightnings_ddp(
    wrapper: str, setting: str, compared: list[dict[tuple[str, str], Any]]
) -> None:
    for rank in compared:
        weights, logs, same_names_and_steps = rank[setting, wrapper]
        assert weights <= 1e-6
        assert logs <= 1e-6
        assert same_names_and_steps


@pytest.mark.parametrize("setting", ROWS)
@pytest.mark.parametrize("option", DDP_OPTIONS)
def test_options_of_ddp_change_no_weights(
    option: str, setting: str, compared: list[dict[tuple[str, str], Any]]
) -> None:
    for rank in compared:
        assert rank[setting, option] <= 1e-6


class Holding(Manual):
    """Accumulate two batches by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            super().training_step(batch, batch_idx)
            return
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))


def _collectives_sent(cls: type[Automatic], wrapper: str, every: int = 1) -> int:
    """Return how often gradients are sent in an epoch."""
    join_lightning()
    options: dict[str, Any] = {"accumulate_grad_batches": every, "limit_val_batches": 0}
    trainer = make_trainer(StepStrategy(wrapper), **options)
    module = cls()
    # Logging with `sync_dist` would be counted as well.
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return sum(sent(lambda: trainer.fit(module, loader()), KINDS).values())


def _traffic(wrapper: str) -> list[tuple[int, int]]:
    """Count collectives for windows of one and two batches, by the Trainer and by hand."""
    return [
        (_collectives_sent(Automatic, wrapper), _collectives_sent(Automatic, wrapper, 2)),
        (_collectives_sent(Manual, wrapper), _collectives_sent(Holding, wrapper)),
    ]


@pytest.mark.parametrize("wrapper", ["fsdp", *slow("ddp", "separate")])
def test_accumulation_sends_nothing_before_its_window_ends(wrapper: str) -> None:
    for per_step, accumulated in run_ranks(_traffic, 2, wrapper)[0]:
        # Two updates of four batches instead of four.
        assert 1 < per_step - accumulated <= per_step / 2


def _other_options() -> dict[str, Any]:
    join_lightning()
    results: dict[str, Any] = {}
    for wrapper in WRAPPERS:
        trainer = make_trainer(StepStrategy(wrapper, sync_batchnorm=True))
        module = Automatic(norm=True, sgd=True)
        trainer.fit(module, loader())
        net = plain_epoch(batch=16, norm=True).state_dict()
        ours = whole_weights(trainer)
        ours = {name: ours[f"net.{name}"] for name in net}
        results["batchnorm", wrapper] = max(
            (ours[k] - v).abs().max().item() for k, v in net.items()
        )
        results["kept", wrapper] = type(module.net[2]).__name__
    for wrapper in ("ddp", "fsdp"):
        unused = {"find_unused_parameters": True} if wrapper == "ddp" else {}
        strategy = StepStrategy(wrapper, detect_anomalous_params=True, **unused)
        with Messages("stepwrap.wrappers.steps.step_checks") as texts:
            make_trainer(strategy).fit(Automatic(spare=True), loader())
        results["anomalies", wrapper] = texts
    calls: list[int] = []

    def clear(state: Any, bucket: Any) -> Any:
        calls.append(1)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer() * 0)
        return future

    module = Automatic(sgd=True)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    make_trainer(StepStrategy(comm_hook=clear)).fit(module, loader())
    results["hook"] = len(calls)
    results["unchanged"] = all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    return results


@pytest.fixture(scope="module")
def other_options() -> list[dict[str, Any]]:
    return run_ranks(_other_options, 2)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_sync_batchnorm_trains_as_one_process_on_the_whole_batch(
    wrapper: str, other_options: list[dict[str, Any]]
) -> None:
    for rank in other_options:
        assert rank["batchnorm", wrapper] <= 1e-6
        layer_name = "SynchronizedBatchNorm1d" if wrapper == "fsdp" else "BatchNorm1d"
        assert rank["kept", wrapper] == layer_name


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_parameters_that_the_loss_does_not_reach_are_logged(
    wrapper: str, other_options: list[dict[str, Any]]
) -> None:
    for rank in other_options:
        texts = " ".join(rank["anomalies", wrapper])
        assert "spare.weight" in texts
        assert "spare.bias" in texts
        assert "net." not in texts


def test_comm_hook_combines_the_gradients(other_options: list[dict[str, Any]]) -> None:
    for rank in other_options:
        assert rank["hook"] >= 4
        assert rank["unchanged"]


def test_modules_that_sharding_does_not_support_raise_errors() -> None:
    for rank in run_ranks(unusual_modules, 2):
        assert rank["own, called"] <= 1e-6
        assert re.search("RuntimeError: .*manual training_step .*fsdp", rank["own, not called"])
        assert rank["toggled"] <= 1e-6
        assert rank["thawed"] <= 1e-6
        assert "StochasticWeightAveraging copies full weights" in rank["averaged"]
        assert re.search("same number of batches .*predict", rank["unequal"])
        assert re.search("same number of batches .*validate", rank["unequal at first"])
        assert "Automatic is sharded already" in rank["left by another"]
        assert "[[3], [2]]" in rank["unequal"]
        assert rank["unequal by ddp"] == "no error"


def _fit_with_a_custom_step() -> None:
    join_lightning()

    class Unused(StepDistributedDataParallel):
        def train_step(self, data: Any, optim_wrapper: Any) -> Any:
            raise AssertionError

    trainer = make_trainer(StepStrategy(Unused))
    trainer.validate(Automatic(), loader("val"), verbose=False)
    with pytest.raises(TypeError, match="Unused has a custom train_step.*StepLightningModule"):
        trainer.fit(Automatic(), loader())


def test_a_wrappers_own_step_that_would_not_be_called_is_an_error() -> None:
    run_ranks(_fit_with_a_custom_step, 2)


class Unaveraged(Manual):
    """Run backward without Lightning, which prepares the averaging in `manual_backward`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def _error_text(cls: type[Automatic]) -> str:
    join_lightning()
    try:
        make_trainer(StepStrategy("ddp"), limit_val_batches=0).fit(cls(), loader())
    except RuntimeError as error:
        return str(error)
    return ""


def test_gradients_that_are_not_averaged_are_noticed() -> None:
    for text in run_ranks(_error_text, 2, Unaveraged):
        assert "different gradients" in text
    assert run_ranks(_error_text, 2, Manual) == ["", ""]


class Centred(Automatic):
    """Subtract a running mean, which each rank updates from its own batches."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__(sgd=True)
        self.register_buffer("mean", torch.zeros(64))

    def loss(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        pixels = images.flatten(1)
        if self.training:
            self.mean.mul_(0.9).add_(pixels.mean(0), alpha=0.1)
        return torch.nn.functional.cross_entropy(self.net(pixels - self.mean), labels)


def _weights_with(val_batches: int) -> torch.Tensor:
    join_lightning()
    options: dict[str, Any] = {"limit_val_batches": val_batches, "val_check_interval": 2}
    trainer = make_trainer(StepStrategy(broadcast_buffers=False), **options)
    module = Centred()
    trainer.fit(module, loader(), loader("val"))
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def _distances() -> float:
    return (_weights_with(0) - _weights_with(1)).abs().max().item()


def test_validations_do_not_change_the_training_with_own_buffers() -> None:
    assert run_ranks(_distances, 2) == [0.0, 0.0]


class Skipping(Manual):
    """Accumulate two batches by hand, of which only the first one uses the first layers."""

    def loss(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        hidden = self.first(images) if self.is_first else torch.ones(len(images), 12)
        return torch.nn.functional.cross_entropy(self.last(hidden), labels)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.is_first = batch_idx % 2 == 0
        if self.is_first:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss(batch))
            return
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def _weights_of_layers(wrapper: str) -> dict[str, torch.Tensor]:
    join_lightning()
    trainer = make_trainer(StepStrategy(wrapper), limit_val_batches=0)
    trainer.fit(Skipping(), loader())
    return whole_weights(trainer)


def test_layers_that_only_earlier_batches_of_a_window_use() -> None:
    rank_0, rank_1 = run_ranks(_weights_of_layers, 2, "separate")
    sharded, _ = run_ranks(_weights_of_layers, 2, "fsdp")
    for name, value in rank_0.items():
        assert torch.equal(value, rank_1[name])
        torch.testing.assert_close(value, sharded[name], rtol=0, atol=1e-6)
