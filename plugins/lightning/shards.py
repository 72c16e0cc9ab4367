"""Weights and optimizer states that are spread over the ranks, whole for Lightning's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...collectives import all_gather_object
from ...wrappers import AmpOptimWrapper, OptimWrapper
from ...wrappers.sharding.layout import is_dtensor, reshard, take_part
from .tree import DDPStrategy, LightningModule, Trainer

# Of Lightning's callbacks, those that copy weights between a module and one that is not sharded.
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")


def holds_shards(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it is sharded by FSDP2, even over a single rank."""
    # Not by the parameters: where a forward has raised, they are whole. The name of the method is
    # enough, as importing FSDP2 takes as long as half of torch.
    return any(hasattr(one, "set_reshard_after_forward") for one in module.modules())


def whole(state: Any) -> Any:
    """``state`` with whole tensors on the CPU in place of DTensors; every rank must call this."""
    if is_dtensor(state):
        return state.full_tensor().cpu()
    if isinstance(state, Mapping):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(whole(value) for value in state)
    return state


def keep_whole(module: nn.Module) -> None:
    """Let ``module.state_dict()`` be whole from now on; every rank must call that then."""

    def make_whole(owner: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            state[name] = whole(state[name])

    module.register_state_dict_post_hook(make_whole)  # type: ignore[no-untyped-call]


def agree_on_scale(plugin: Any, optimizers: Sequence[Optimizer]) -> None:
    """Let a precision plugin skip an update on all ranks as soon as one sees an infinity.

    Each rank sees its parts of the gradients only, and torch's ordinary scaler asks no other.
    """
    scaler = getattr(plugin, "scaler", None)
    if type(scaler) is not torch.amp.GradScaler or not optimizers:
        return
    amp = AmpOptimWrapper(optimizers[0], dtype="float16", use_fsdp=True, device=plugin.device)
    amp.loss_scaler.load_state_dict(scaler.state_dict())
    plugin.scaler = amp.loss_scaler
    for optimizer in optimizers:
        # Fused ones unscale by themselves, and would ask no other rank either.
        vars(optimizer)["_step_supports_amp_scaling"] = False


class WholeStates(DDPStrategy):
    """Lightning's DDP strategy, whose checkpoints hold whole tensors also of sharded modules."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights, whole and under the names of the module; every rank must call this."""
        module = own_module(self)
        if not holds_shards(module):
            return module.state_dict()
        reshard(module)
        return {name: whole(value) for name, value in module.state_dict().items()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights, each rank its parts where the module is sharded."""
        module = own_module(self)
        if not holds_shards(module):
            super().load_model_state_dict(checkpoint, strict)
            return
        reshard(module)
        own = module.state_dict()
        parts = {
            name: take_part(value, own[name]) if is_dtensor(own.get(name)) else value
            for name, value in checkpoint["state_dict"].items()
        }
        module.load_state_dict(parts, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of ``optimizer`` over whole tensors; every rank must call this."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return whole(state) if holds_shards(own_module(self)) else state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers from states over whole tensors."""
        if not holds_shards(own_module(self)):
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            OptimWrapper(optimizer).load_state_dict(state)


def own_module(strategy: DDPStrategy) -> LightningModule:
    """The module that the strategy trains."""
    assert strategy.lightning_module is not None
    return strategy.lightning_module


@contextmanager
def explained() -> Iterator[None]:
    """Add the remedy to the error of a manual step that meets shards."""
    try:
        yield
    except RuntimeError as error:
        if "DTensor" not in str(error):
            raise
        raise RuntimeError(
            "a manual training_step under fsdp has used parameters where they are shards: call "
            "children of the module there, or self(...) where the module has parameters of its "
            "own; a step that does otherwise runs under the wrapper ddp"
        ) from error


def refuse_averaging(callbacks: Iterable[Any]) -> None:
    """Raise ValueError for callbacks that average weights, which they would find in shards."""
    for one in callbacks:
        if any(kind.__name__ in _AVERAGING for kind in type(one).__mro__):
            raise ValueError(
                f"{type(one).__name__} copies whole weights, and fsdp has them in shards: leave it "
                "out, or use the wrapper ddp"
            )


def refuse_shards(module: nn.Module) -> None:
    """Raise ValueError where ``module`` has been sharded before it is wrapped."""
    if holds_shards(module):
        raise ValueError(
            f"{type(module).__name__} is sharded already, as fsdp leaves a module after a run: go "
            "on with the same Trainer, or load the checkpoint into a new module"
        )


def refuse_unequal(trainer: Trainer) -> None:
    """Raise ValueError where ranks have different numbers of batches; every rank must call this.

    All of them gather the blocks together, and the last batch of one would wait for ever.
    """
    found = {
        "predict": trainer.predicting and trainer.num_predict_batches,
        "test": trainer.testing and trainer.num_test_batches,
        "validate": trainer.validating and trainer.num_val_batches,
    }
    stage, mine = next(((name, one) for name, one in found.items() if one), ("", None))
    counts = all_gather_object(mine)
    if any(one != counts[0] for one in counts):
        raise ValueError(
            f"fsdp gathers its blocks on all ranks together, so in {stage} they need equally many "
            f"batches, but by rank they have {counts}: choose another batch size or number of "
            "samples, or load the checkpoint into a new module and use the wrapper ddp for it"
        )
