"""StepLightningModule: the wrapper's step under the Trainer equals the runner's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_parts import QUIET, lightning, loader, make_trainer, weights
from marks import selected, slow
from ranks import RanksError, run_ranks
from stepped_runs import (
    CASES,
    RESUMED,
    TwoPlayers,
    accumulating,
    both_ways,
    evaluated,
    plain,
    resumed,
    supervised,
    two,
    watched,
)
from torch.utils.data import DataLoader
from weights import apart

from stepwrap.configs.digits import Digits
from stepwrap.plugins.lightning import StepLightningModule
from stepwrap.wrappers import OptimWrapper

pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in QUIET]


QUICK = ("custom step", "accumulation", "fp16", "fsdp", "separate")
ROWS = [*QUICK, *slow(*(case for case in CASES if case not in QUICK))]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(both_ways, 2, sorted({*QUICK, *selected(request, "case")}))


@pytest.mark.parametrize("case", ROWS)
def test_the_trainer_reaches_the_runners_weights(case: str, results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank[case]["distance"] <= 1e-6
        assert rank[case]["wrapped"] == []
        assert "loss" in rank[case]["logged"]


def test_lightning_counts_the_steps(results: list[dict[str, Any]]) -> None:
    # Eight batches; windows of three with accumulation; two optimizers with separate.
    assert results[0]["custom step"]["steps"] == 8
    assert results[0]["accumulation"]["steps"] == 3
    assert results[0]["separate"]["steps"] == 16
    # Updates that the loss scaler skips are not counted.
    assert 0 < results[0]["fp16"]["steps"] < 8


@pytest.fixture(scope="module")
def resumptions(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(resumed, 2, str(tmp_path_factory.mktemp("resumed")))


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(
    case: str, resumptions: list[dict[str, Any]]
) -> None:
    for rank in resumptions:
        result = rank[case]
        assert result["distance"] == 0
        assert not result["from within"]
        assert result["steps"][0] == result["steps"][1]
        assert result["rates"][0] == result["rates"][1]
        assert result["rates"][0] == pytest.approx(0.01 if case == "separate" else 0.01 / 8)
        assert result["optimizers"] == (2 if case == "separate" else 1)
        assert result["schedules"] == (0 if case == "separate" else 2)
        assert result["names"]


def test_metrics_equal_the_runners() -> None:
    for rank in run_ranks(evaluated, 2):
        for result in rank.values():
            assert result["accuracies"] == pytest.approx([result["runner"]] * 4, abs=1e-6)
            assert result["losses"] == pytest.approx([result["losses"][0]] * 3, abs=1e-6)
            assert result["prediction"] <= 1e-6
            assert result["predictions"] == 20


def test_alone_on_one_device_it_steps_itself() -> None:
    module = StepLightningModule(supervised(), optim_wrapper=plain)
    make_trainer("auto").fit(module, loader())
    other = supervised()
    optim = plain(other)
    for batch in loader():
        other.train_step(batch, optim)
    assert apart(weights(module.model), weights(other)) <= 1e-6


CONFIG: dict[str, Any] = {
    "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9},
    "clip_grad": {"max_norm": 1.0},
    "accumulative_counts": 2,
}


def test_configs_build_both_and_checkpoints_hold_them(tmp_path: Path) -> None:
    model = {
        "type": "SupervisedModel",
        "net": {"type": "SmallCNN", "width": 2, "dropout": 0.0},
        "loss": {"type": "torch.nn.CrossEntropyLoss"},
    }
    module = StepLightningModule(model, optim_wrapper=CONFIG)
    trainer = make_trainer("auto")
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    again = StepLightningModule.load_from_checkpoint(tmp_path / "file.ckpt")
    assert apart(weights(module), weights(again)) == 0
    assert trainer.global_step == 4
    state = torch.load(tmp_path / "file.ckpt", weights_only=False)
    assert state["stepwrap"][""]["stepwrap.inner_count"] == 8


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"callbacks": [lightning.callbacks.StochasticWeightAveraging(0.1)]},
            "schedules that are not stepped",
        ),
        ({"accumulate_grad_batches": 2}, "accumulative_counts"),
        ({"gradient_clip_val": 0.5}, "clip_grad"),
        ({"precision": "bf16-mixed"}, "AmpOptimWrapper"),
    ],
)
def test_trainer_options_that_belong_to_the_optimizer_wrapper_are_refused(
    options: dict[str, Any], text: str
) -> None:
    module = StepLightningModule(supervised(), optim_wrapper=plain)
    with pytest.raises(ValueError, match=text):
        make_trainer("auto", **options).fit(module, loader())


def test_a_converted_model_is_trained() -> None:
    module = StepLightningModule(supervised(), optim_wrapper=plain)
    data = DataLoader(Digits(dtype="float64"), batch_size=400)
    make_trainer("auto", precision="64-true").fit(module, data)
    assert module.model.net[1].weight.dtype is torch.float64


def _under_lightnings_ddp() -> None:
    from lightning_parts import join_lightning

    join_lightning()
    make_trainer("ddp").fit(StepLightningModule(supervised(), optim_wrapper=plain), loader())


def test_another_distributed_strategy_is_an_error() -> None:
    with pytest.raises(RanksError, match='strategy="stepwrap"'):
        run_ranks(_under_lightnings_ddp, 2)


@pytest.mark.parametrize(
    ("optim", "text"),
    [
        (None, "needs an optim_wrapper"),
        ({"lr": 0.1}, "needs the key optimizer"),
        ({"optimizer": {"lr": 0.1}}, "one optimizer with a type"),
        (lambda model: model, "must be an OptimWrapper"),
    ],
)
def test_no_optimizer_wrapper_is_an_error(optim: Any, text: str) -> None:
    module = StepLightningModule(supervised(), optim_wrapper=optim)
    with pytest.raises(TypeError, match=text):
        make_trainer("auto").fit(module, loader())


@pytest.mark.parametrize("optim", [torch.optim.SGD, torch.optim.SGD([torch.ones(1)]), 3])
def test_a_wrong_optimizer_wrapper_is_an_error_at_construction(optim: Any) -> None:
    with pytest.raises(TypeError, match="must be an OptimWrapper.*got (SGD|int)"):
        StepLightningModule(supervised(), optim_wrapper=optim)


@pytest.mark.parametrize("metrics", [["accuracy"], {"accuracy": "accuracy"}])
def test_metrics_are_checked_at_once(metrics: Any) -> None:
    with pytest.raises(TypeError, match="torchmetrics by name"):
        StepLightningModule(supervised(), metrics=metrics)


def test_a_batch_that_is_one_tensor_is_not_taken_for_a_list_of_inputs() -> None:
    data = DataLoader([torch.ones(1, 8, 8)] * 4, batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"list, tuple or dict.*got Tensor"):
        make_trainer("auto").predict(StepLightningModule(supervised()), data)


def test_schedules_are_checked() -> None:
    cases = (
        ({"type": "StepLR", "by": "batch"}, "step"),
        (_plateau, "needs metric"),
        ({"type": "StepLR", "step_size": 1, "metric": "val_loss"}, "needs ReduceLROnPlateau"),
        ({"type": "ReduceLROnPlateau", "metric": "los"}, "not logged; logged values: loss"),
    )
    for schedule, text in cases:
        module = StepLightningModule(supervised(), optim_wrapper=plain, schedulers=[schedule])
        with pytest.raises(ValueError, match=text):
            make_trainer("auto").fit(module, loader())


def test_with_several_optimizers_a_schedule_names_its_own() -> None:
    def halving(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    remedy = "; instead of a function, give {'type': function, 'optimizer': 'first'}"
    cases = (
        (halving, f"got None{remedy}"),
        ({"type": halving}, "got None"),
        ({"type": halving, "optimizer": "third"}, "got 'third'"),
    )
    for schedule, text in cases:
        module = StepLightningModule(TwoPlayers(), optim_wrapper=two, schedulers=[schedule])
        with pytest.raises(ValueError, match="must .*'first', 'second', got") as error:
            module.configure_optimizers()
        assert str(error.value).endswith(text)
    chosen = {"type": halving, "optimizer": "second"}
    module = StepLightningModule(TwoPlayers(), optim_wrapper=two, schedulers=[chosen])
    (_, second), (scheduler,) = module.configure_optimizers()
    assert scheduler.optimizer is second


def _plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


def _still(model: Any) -> OptimWrapper:
    return OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.0))


def test_a_plateau_watches_a_logged_metric() -> None:
    plateau = {"type": "ReduceLROnPlateau", "metric": "val_loss", "patience": 0, "factor": 0.5}
    module = StepLightningModule(supervised(), optim_wrapper=_still, schedulers=[plateau])
    trainer = make_trainer("auto", max_epochs=3)
    trainer.fit(module, loader(), loader("val", 16))
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.last_epoch == 3
    assert scheduler.best == pytest.approx(trainer.callback_metrics["val_loss"].item())


def test_all_ranks_watch_the_same() -> None:
    (best, rank_0), (other_best, second) = run_ranks(watched, 2)
    assert rank_0 != second
    assert best == other_best == pytest.approx((rank_0 + second) / 2)


def _steps(module: StepLightningModule, epochs: int = 1, **options: Any) -> int:
    trainer = make_trainer("auto", max_epochs=epochs, **options)
    # Four batches in windows of three.
    trainer.fit(module, loader(batch=16))
    return trainer.global_step


def test_each_fit_counts_its_own_batches(tmp_path: Path) -> None:
    module = StepLightningModule(supervised(), optim_wrapper=accumulating)
    trainer = make_trainer("auto")
    trainer.fit(module, loader(batch=16))
    assert trainer.global_step == 2
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(batch=16))
    assert trainer.global_step == 4
    # The file's weights are loaded, but its training is not resumed.
    again = StepLightningModule(supervised(), optim_wrapper=accumulating)
    make_trainer("auto").validate(again, loader("val"), tmp_path / "file.ckpt", verbose=False)
    assert _steps(again) == 2
    assert _steps(again) == 2


class Interrupting(lightning.Callback):  # type: ignore[misc, name-defined]
    """Create a schedule in the middle of training, as some callbacks do, and raise."""

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        torch.optim.lr_scheduler.StepLR(trainer.optimizers[0], 1)
        raise ValueError("on purpose")


def test_after_an_error_the_optimizer_is_free_of_the_trainer() -> None:
    model = supervised()
    optim = plain(model)
    module = StepLightningModule(model, optim_wrapper=optim)
    with pytest.raises(ValueError, match="on purpose"):
        _steps(module, callbacks=[Interrupting()])
    assert _steps(module) == 4
    assert "step" not in vars(optim.optimizer)
