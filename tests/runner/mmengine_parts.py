"""A model, data, a metric and runs as a user of mmengine writes them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mmengine.config import Config
    from mmengine.evaluator import BaseMetric
    from mmengine.model import BaseModel
    from mmengine.optim import MultiStepLR, OptimWrapperDict, build_optim_wrapper
    from mmengine.registry import (
        DATASETS,
        METRICS,
        MODELS,
        OPTIM_WRAPPER_CONSTRUCTORS,
        PARAM_SCHEDULERS,
    )
    from mmengine.runner import Runner


from stepwrap import wrappers

__all__ = ["PARAM_SCHEDULERS", "note_rates", "note_values", "train_theirs"]


@MODELS.register_module(force=True)
class Backbone(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.LayerNorm(width)).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


@MODELS.register_module(force=True)
class NormedBackbone(Backbone):
    """A backbone with BatchNorm, whose running statistics differ between ranks."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.layers[2] = nn.BatchNorm1d(width).double()


@MODELS.register_module(force=True)
class Classifier(BaseModel):
    """A model that takes unstacked lists, as mmengine's default collate function returns."""

    def __init__(
        self, backbone: Any, classes: int, data_preprocessor: Any = None, init_cfg: Any = None
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        self.backbone = MODELS.build(backbone)
        self.head = nn.Linear(backbone["width"], classes).double()

    def forward(self, inputs: Any, target: Any = None, mode: str = "tensor") -> Any:
        inputs = torch.stack(list(inputs))
        scores = self.head(self.backbone(inputs))
        if mode == "loss":
            return {"loss": F.cross_entropy(scores, torch.as_tensor(target))}
        return list(scores.argmax(1)) if mode == "predict" else scores


class OwnBase(wrappers.BaseModel):
    """A model on stepwrap's base that gets images of mmengine's preprocessor."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.net = nn.Conv2d(3, 1, 1)
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor, data_samples: Any = None, mode: str = "tensor") -> Any:
        self.seen.append(inputs)
        return {"loss": self.net(inputs).mean()} if mode == "loss" else self.net(inputs)


@MODELS.register_module(force=True)
class Duel(BaseModel):
    """Two children with an optimizer each that are trained in turn, without random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()

    def forward(self, inputs: Any, target: Any = None, mode: str = "tensor") -> Any:
        return self.maker(torch.stack(list(inputs)))

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        real = torch.stack(list(data[0]))
        noise = real.flip(1)
        with optim_wrapper["judge"].optim_context(self.judge):
            judged = self.judge(torch.cat([real, self.maker(noise).detach()]))
            loss_judge = F.softplus(torch.cat([-judged[: len(real)], judged[len(real) :]])).mean()
        optim_wrapper["judge"].update_params(loss_judge)
        self.judge.requires_grad_(False)
        with optim_wrapper["maker"].optim_context(self.maker):
            loss_maker = F.softplus(-self.judge(self.maker(noise))).mean()
        optim_wrapper["maker"].update_params(loss_maker)
        self.judge.requires_grad_(True)
        return {"loss_judge": loss_judge.detach(), "loss_maker": loss_maker.detach()}


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class MultiOptimWrapperConstructor:
    """Build one optimizer for each child that the config names, as mmengine's users do."""

    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
        self._settings = optim_wrapper_cfg

    def __call__(self, model: nn.Module) -> OptimWrapperDict:
        settings = {name: dict(member) for name, member in self._settings.items() if name != "type"}
        return OptimWrapperDict(
            **{
                name: build_optim_wrapper(
                    model.get_submodule(name), {"type": "OptimWrapper", **member}
                )
                for name, member in settings.items()
            }
        )


@PARAM_SCHEDULERS.register_module(force=True)
class OwnSteps(MultiStepLR):
    """A user's custom schedule."""


@DATASETS.register_module(force=True)
class Points(Dataset[Any]):
    metainfo = {"classes": ("below", "above")}

    def __init__(self, size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(size, 4, dtype=torch.float64, generator=generator)
        self.targets = self.inputs.sum(1).gt(0).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], int(self.targets[index])


@METRICS.register_module(force=True)
class Accuracy(BaseMetric):
    default_prefix = "points"

    def process(self, data_batch: Any, data_samples: Any) -> None:
        for prediction, target in zip(data_samples, data_batch[1], strict=True):
            self.results.append(int(prediction) == int(target))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        assert self.dataset_meta["classes"][1] == "above"
        return {"top1": sum(results) / len(results)}


def note_rates(optimizer: Optimizer) -> list[list[float]]:
    """Return a list to which the rates of each update are appended."""
    rates: list[list[float]] = []
    optimizer.register_step_post_hook(
        lambda optimizer, *_: rates.append([group["lr"] for group in optimizer.param_groups])
    )
    return rates


def note_values(optimizer: Optimizer) -> list[list[float]]:
    """Return a list to which the rates and decays of each update are appended."""
    values: list[list[float]] = []
    optimizer.register_step_post_hook(
        lambda stepped, *_: values.append(
            [group[name] for group in stepped.param_groups for name in ("lr", "weight_decay")]
        )
    )
    return values


@contextmanager
def restore_after_mmengine() -> Iterator[None]:
    """Ignore mmengine's warnings, and restore the variables and thread count that it changes."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            torch.set_num_threads(threads)


def train_theirs(
    path: Path, note: Callable[[Optimizer], list[list[float]]] = note_rates
) -> tuple[Any, list[list[float]]]:
    """Train by mmengine's runner; return it and the rates of its updates, or what is noted."""
    with restore_after_mmengine():
        config = Config.fromfile(str(path))
        config.work_dir = str(path.parent / "theirs")
        config.experiment_name = f"{path.parent.name}_{path.stem}"
        config.log_level = "ERROR"
        if dist.is_initialized():
            config.launcher = "pytorch"
            os.environ["LOCAL_RANK"] = str(dist.get_rank())
        runner = Runner.from_cfg(config)
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        optimizer = getattr(runner.optim_wrapper, "optimizer", None)
        rates = [] if optimizer is None else note(optimizer)
        runner.train()
    return runner, rates
