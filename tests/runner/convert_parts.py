"""Parts in plain torch that converted configs name."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from stepwrap.wrappers import BaseModel


class Ones(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(1), torch.ones(1)


class Line(BaseModel):
    """A linear model whose initial slope is set by mmengine's `init_cfg`."""

    def __init__(self, head: dict[str, Any], init_cfg: dict[str, float] | None = None) -> None:
        super().__init__()
        self.head = getattr(nn, head["type"])(1, 1)
        self.init_cfg = init_cfg

    def init_weights(self) -> None:
        if self.init_cfg is not None:
            nn.init.constant_(self.head.weight, self.init_cfg["val"])

    def forward(self, inputs: Tensor, target: Tensor | None = None, mode: str = "tensor") -> Any:
        output = self.head(inputs)
        if mode == "loss":
            return {"loss": (output - target).square().mean()}
        return list(output) if mode == "predict" else output


class Loaded(nn.Linear):
    """A net as of another library: pretrained weights, and a method that resets them."""

    def __init__(self, *, is_init: bool = False, init_cfg: Any = ...) -> None:
        super().__init__(1, 1)
        nn.init.constant_(self.weight, 7.0)
        self.is_init = is_init
        if init_cfg is not ...:
            self.init_cfg = init_cfg

    def init_weights(self) -> None:
        nn.init.zeros_(self.weight)


class Close:
    """A metric in mmengine's style: the share of outputs close to their targets."""

    def __init__(self, within: float) -> None:
        self._within = within
        self.results: list[Any] = []
        self.dataset_meta: Any = None

    def process(self, data_batch: Any, data_samples: list[Any]) -> None:
        for prediction, target in zip(data_samples, data_batch[1], strict=True):
            self.results.append(abs(float(prediction - target)) <= self._within)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"share": sum(results) / len(results), "of": len(results)}
