"""Types of the names that pages use without defining them: `GIVEN` of page_modules.py."""

import contextlib as contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch as torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as cross_entropy
from torch.nn.parallel import DistributedDataParallel as DistributedDataParallel
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from stepwrap.wrappers import BaseModel, OptimWrapper

batch: list[Tensor]
batches: list[list[Tensor]]
clean_loader: DataLoader[Any]
collator: Callable[[list[Any]], dict[str, Tensor]]
folder: Path
loader: DataLoader[tuple[Tensor, Tensor]]
loss: Tensor
lr_scheduler: LRScheduler
model: nn.Module
net: nn.Module
noisy_loader: DataLoader[Any]
observation: Tensor
optim: OptimWrapper
optimizer: Optimizer
other: Tensor
parts: list[Any]
policy: Any
samples: list[Tensor]
tensor: Tensor
train: Dataset[Any]
train_loader: DataLoader[Any]
val: Dataset[Any]
val_loader: DataLoader[Any]
value: Tensor

def function(*args: Any) -> Any: ...
def make_model() -> BaseModel: ...
def make_net() -> nn.Module: ...
def optim_of(model: nn.Module) -> OptimWrapper: ...
