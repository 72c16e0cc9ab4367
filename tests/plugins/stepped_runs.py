"""Train the same model by the runner and, as a StepLightningModule, by the Trainer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_parts import join_lightning, lightning, loader, make_trainer, small_net
from lightning_runs import whole_weights
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from weights import apart

from stepwrap.loops import EpochTrainLoop, ValLoop
from stepwrap.plugins.lightning import StepLightningModule, StepStrategy
from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.runner import Runner
from stepwrap.wrappers import (
    AmpOptimWrapper,
    BaseModel,
    OptimWrapper,
    OptimWrapperDict,
    StepDistributedDataParallel,
    SupervisedModel,
    parse_losses,
    wrap_model,
)


@MODEL_WRAPPERS.register_module()
class NormPenalised(StepDistributedDataParallel):
    """A wrapper whose step adds a penalty on the squared weights."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            losses = self(*self.module.data_preprocessor(data, True), mode="loss")
        losses["loss_norm"] = 0.01 * sum(param.square().sum() for param in self.parameters())
        total, logs = parse_losses(losses)
        optim_wrapper.update_params(total)
        return logs


class Carrying(StepDistributedDataParallel):
    """A wrapper whose step carries state from batch to batch."""

    before: Any = None

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        images, labels = self.module.data_preprocessor(data, True)
        mixed = images if self.before is None else (images + self.before) / 2
        with optim_wrapper.optim_context(self):
            loss = self(mixed, labels, mode="loss")["loss"]
        optim_wrapper.update_params(loss)
        self.before = images
        return {"loss": loss.detach()}

    def step_state(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_step_state(self, state: dict[str, Any]) -> None:
        self.before = state["before"]


class TwoPlayers(BaseModel):
    """Two networks that are trained one after the other, each by its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = small_net(), small_net()

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        images, labels = self.data_preprocessor(data, True)
        loss = nn.functional.cross_entropy(self.first(images), labels)
        optim_wrapper["first"].update_params(loss)
        target = self.first(images).detach().softmax(1)
        other = nn.functional.cross_entropy(self.second(images), target)
        optim_wrapper["second"].update_params(other)
        return {"loss": loss.detach(), "other": other.detach()}

    def forward(self, image: Tensor, label: Any = None, mode: str = "tensor") -> Any:
        scores = self.second(image)
        return list(scores) if mode == "predict" else scores


def supervised(norm: bool = False) -> SupervisedModel:
    return SupervisedModel(small_net(norm), nn.CrossEntropyLoss())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def plain(model: nn.Module) -> OptimWrapper:
    return OptimWrapper(adam(model))


def accumulating(model: nn.Module) -> OptimWrapper:
    """Accumulate 3 batches; with 4 batches per epoch the last window of two epochs has 2."""
    return OptimWrapper(adam(model), accumulative_counts=3, clip_grad={"max_norm": 0.1})


def mixed(model: nn.Module) -> AmpOptimWrapper:
    return AmpOptimWrapper(adam(model), dtype="bfloat16")


def scaled(model: nn.Module) -> AmpOptimWrapper:
    """Return a wrapper whose initial loss scale is too large, so that some updates are skipped."""
    return AmpOptimWrapper(adam(model), dtype="float16", loss_scale={"init_scale": 2.0**20})


def two(model: Any) -> OptimWrapperDict:
    names = ("first", "second")
    return OptimWrapperDict(**{n: OptimWrapper(adam(getattr(model.module, n))) for n in names})


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    wrapper: Any
    optim: Callable[[Any], Any]
    options: dict[str, Any] = {}


CASES = {
    "custom step": Case(supervised, NormPenalised, plain),
    "accumulation": Case(supervised, "ddp", accumulating),
    "custom, accumulating": Case(supervised, "NormPenalised", accumulating),
    "bf16": Case(supervised, "ddp", mixed),
    "fp16": Case(supervised, "ddp", scaled),
    "fsdp": Case(supervised, "fsdp", accumulating),
    "fsdp fp16": Case(supervised, "fsdp", scaled),
    "separate": Case(TwoPlayers, "separate", two),
    "auto": Case(supervised, "auto", plain),
    "carrying": Case(supervised, Carrying, plain),
}
EPOCHS = 2


def train_with_runner(case: Case) -> dict[str, Tensor]:
    strategy = StepStrategy(case.wrapper, **case.options)
    model: Any = wrap_model(strategy.wrapper, case.model(), **case.options)
    loop = EpochTrainLoop(loader(), max_epochs=EPOCHS)
    Runner(model=model, train_loop=loop, optim_wrapper=case.optim(model)).train()
    state = model.module.state_dict()
    full = {
        k: getattr(value, "full_tensor", lambda value=value: value)() for k, value in state.items()
    }
    return {f"model.{name}": tensor.detach().clone() for name, tensor in full.items()}


def train_with_trainer(case: Case, **options: Any) -> tuple[Any, StepLightningModule]:
    module = StepLightningModule(case.model(), optim_wrapper=case.optim)
    trainer = make_trainer(
        StepStrategy(case.wrapper, **case.options), **{"max_epochs": EPOCHS, **options}
    )
    trainer.fit(module, loader())
    return trainer, module


def both_ways(names: list[str]) -> dict[str, Any]:
    join_lightning()
    results: dict[str, Any] = {}
    for name in names:
        case = CASES[name]
        runner = train_with_runner(case)
        trainer, module = train_with_trainer(case)
        names = [type(module_child).__name__ for module_child in module.model.modules()]
        results[name] = {
            "distance": apart(whole_weights(trainer), runner),
            "steps": trainer.global_step,
            "logged": sorted(trainer.callback_metrics),
            "wrapped": [name for name in names if "Distributed" in name or name == "_Child"],
        }
    return results


RESUMED = ("accumulation", "fp16", "fsdp", "separate", "carrying")


def resumed(folder: str) -> dict[str, Any]:
    """Compare runs resumed after an epoch, or within one, with a whole run."""
    join_lightning()
    results: dict[str, Any] = {}
    schedules = [
        {"type": "StepLR", "step_size": 1, "gamma": 0.5},
        {"type": "LinearLR", "by": "step", "total_iters": 6},
    ]
    for name in RESUMED:
        case = CASES[name]
        case_schedules = [] if name == "separate" else schedules

        def module(case: Case = case, case_schedules: Any = case_schedules) -> StepLightningModule:
            return StepLightningModule(
                case.model(), optim_wrapper=case.optim, schedulers=case_schedules
            )

        def trainer(epochs: int, case: Case = case, **options: Any) -> Any:
            return make_trainer(StepStrategy(case.wrapper), max_epochs=epochs, **options)

        # Save a file after the last batch of each epoch, but before the end of the epoch.
        every = 2 if case.optim is accumulating else 6
        saves = lightning.callbacks.ModelCheckpoint(
            f"{folder}/{name}", "{epoch}", every_n_train_steps=every, save_top_k=-1
        )
        uninterrupted = trainer(3, callbacks=[saves], enable_checkpointing=True)
        uninterrupted.fit(module(), loader(samples=96))
        start = trainer(1)
        start.fit(module(), loader(samples=96))
        path = f"{folder}/{name}.ckpt"
        start.save_checkpoint(path)
        second = trainer(3)
        second.fit(module(), loader(samples=96), ckpt_path=path)
        third = trainer(3)
        # Lightning 2.4 itself reads one batch too many after such a file.
        if name not in ("fp16", "separate") and hasattr(third.fit_loop, "restarted_mid_epoch"):
            third.fit(module(), loader(samples=96), ckpt_path=f"{folder}/{name}/epoch=0.ckpt")
        state = torch.load(path, weights_only=False)
        results[name] = {
            "distance": apart(whole_weights(uninterrupted), whole_weights(second)),
            "from within": third.model
            and apart(whole_weights(uninterrupted), whole_weights(third)),
            "steps": (uninterrupted.global_step, second.global_step),
            "optimizers": len(state["optimizer_states"]),
            "schedules": len(state["lr_schedulers"]),
            "names": sorted(state["state_dict"]) == sorted(whole_weights(uninterrupted)),
            "rates": [run.optimizers[0].param_groups[0]["lr"] for run in (uninterrupted, second)],
        }
    return results


def evaluated() -> dict[str, Any]:
    """Return metrics and predictions of the runner and of the Trainer, in a fit and alone."""
    join_lightning()
    results: dict[str, Any] = {}
    for wrapper in ("ddp", "fsdp"):
        # A new metric, because our loops switch off a metric's own synchronisation.
        metrics = {"accuracy": MulticlassAccuracy(num_classes=10, average="micro")}
        data = loader("val", 40)
        module = StepLightningModule(supervised(True), optim_wrapper=plain, metrics=metrics)
        trainer = make_trainer(StepStrategy(wrapper))
        trainer.fit(module, loader(), data)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        (validated,) = trainer.validate(module, data, verbose=False)
        (tested,) = trainer.test(module, data, verbose=False)
        predicted = trainer.predict(module, data)
        state = {k.removeprefix("model."): value for k, value in whole_weights(trainer).items()}
        model = supervised(True).eval()
        model.load_state_dict(state)
        runner = Runner(model=model, val_loop=ValLoop(loader("val", 40), metrics))
        alone = StepLightningModule(model, metrics=metrics)
        (bare,) = make_trainer(StepStrategy(wrapper)).validate(alone, data, verbose=False)
        with torch.no_grad():
            mine = model(data.dataset[dist.get_rank()][0][None])[0]
        results[wrapper] = {
            "runner": runner.validate()["accuracy"],
            "accuracies": [
                logged["val_accuracy"],
                validated["val_accuracy"],
                tested["test_accuracy"],
                bare["val_accuracy"],
            ],
            "losses": [logged["val_loss"], validated["val_loss"], tested["test_loss"]],
            "prediction": (predicted[0][0] - mine).abs().max().item(),
            "predictions": sum(map(len, predicted)),
        }
    return results


def watched() -> list[float]:
    """Return the value that the schedule watched, and this rank's last loss."""
    join_lightning()
    watching = {"type": "ReduceLROnPlateau", "metric": "loss"}
    module = StepLightningModule(supervised(), optim_wrapper=plain, schedulers=[watching])
    trainer = make_trainer(StepStrategy())
    trainer.fit(module, loader())
    best: float = trainer.lr_scheduler_configs[0].scheduler.best
    return [best, trainer.callback_metrics["loss"].item()]
