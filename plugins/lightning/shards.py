"""Full weights and optimizer states of sharded modules, for Lightning's checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...collectives import all_gather_object
from ...wrappers import AmpOptimWrapper, OptimWrapper
from ...wrappers.layout import is_dtensor, reshard, take_part
from ...wrappers.optimizers.optim_state import add_names, has_names, match_by_name
from ...wrappers.optimizers.param_groups import parameter_names
from .tree import DDPStrategy, LightningModule, Trainer

logger = logging.getLogger(__name__)

# Lightning's callbacks that copy weights between the module and an unsharded copy of it.
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")


def holds_shards(module: nn.Module) -> bool:
    """Return whether FSDP2 shards ``module`` or a part of it, even over a single rank."""
    # Checks for a method and not for DTensors, because parameters are unsharded after a forward
    # that raised; and not for FSDP2's class, because importing it is slow.
    return any(hasattr(child, "set_reshard_after_forward") for child in module.modules())


def full_tensors(state: Any) -> Any:
    """Replace DTensors in ``state`` by full tensors on the CPU; every rank must call this."""
    if is_dtensor(state):
        return state.full_tensor().cpu()
    if isinstance(state, Mapping):
        return {name: full_tensors(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(full_tensors(value) for value in state)
    return state


def make_state_dict_full(module: nn.Module) -> None:
    """Make ``module.state_dict()`` return full tensors; every rank must then call that method."""

    def replace(owner: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            state[name] = full_tensors(state[name])

    module.register_state_dict_post_hook(replace)  # type: ignore[no-untyped-call]


def synchronize_loss_scaler(plugin: Any, optimizers: Sequence[Optimizer]) -> None:
    """Make a precision plugin skip an update on all ranks if any rank has an infinite gradient.

    This is necessary because each rank sees only its shards of the gradients, and torch's
    ``GradScaler`` does not communicate.
    """
    scaler = getattr(plugin, "scaler", None)
    if type(scaler) is not torch.amp.GradScaler or not optimizers:
        return
    amp = AmpOptimWrapper(optimizers[0], dtype="float16", use_fsdp=True, device=plugin.device)
    amp.loss_scaler.load_state_dict(scaler.state_dict())
    plugin.scaler = amp.loss_scaler
    for optimizer in optimizers:
        # A fused optimizer would otherwise unscale in its step, without communication.
        vars(optimizer)["_step_supports_amp_scaling"] = False


class FullStateStrategy(DDPStrategy):
    """Lightning's DDP strategy with full tensors in the checkpoints of sharded modules."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full weights under the module's names; every rank must call this."""
        module = get_module(self)
        if not holds_shards(module):
            return module.state_dict()
        reshard(module)
        return {name: full_tensors(value) for name, value in module.state_dict().items()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load full weights; each rank keeps its shards if the module is sharded."""
        module = get_module(self)
        if not holds_shards(module):
            super().load_model_state_dict(checkpoint, strict)
            return
        reshard(module)
        local_state = module.state_dict()
        shards = {
            name: take_part(value, local_state[name])
            if is_dtensor(local_state.get(name))
            else value
            for name, value in checkpoint["state_dict"].items()
        }
        module.load_state_dict(shards, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of ``optimizer`` with full tensors; every rank must call this."""
        module = get_module(self)
        state: dict[str, Any] = super().optimizer_state(optimizer)
        state = full_tensors(state) if holds_shards(module) else state
        inner = getattr(optimizer, "optimizer", optimizer)
        # Lightning returns {} on most ranks for an optimizer with a sharded state.
        return add_names(inner, state, parameter_names(module)) if state else state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers from states with full tensors, by the names of parameters."""
        module, states = get_module(self), []
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if has_names(state["param_groups"]):
                matched = match_by_name(optimizer, state, parameter_names(module))
                state = matched.content
                if matched.stateless or matched.unused:
                    logger.warning(
                        "the checkpoint has no optimizer state of %s, and the run has no %s",
                        *(matched.stateless or "-", matched.unused or "-"),
                    )
            states.append(state)
        if not holds_shards(module):
            super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
            return
        for optimizer, state in zip(self.optimizers, states, strict=True):
            OptimWrapper(optimizer).load_state_dict(state)


def get_module(strategy: DDPStrategy) -> LightningModule:
    """Return the module that the strategy trains."""
    assert strategy.lightning_module is not None
    return strategy.lightning_module


@contextmanager
def explain_shard_errors() -> Iterator[None]:
    """Raise a clearer error if a manual training step uses sharded parameters directly."""
    try:
        yield
    except RuntimeError as error:
        if "DTensor" not in str(error):
            raise
        raise RuntimeError(
            "a manual training_step under fsdp must not use sharded parameters directly: call "
            "children of the module, or self(...) if the module itself has parameters; or use the "
            "wrapper ddp"
        ) from error


def check_no_averaging(callbacks: Iterable[Any]) -> None:
    """Raise ValueError for callbacks that average weights, which do not support shards."""
    for callback in callbacks:
        if any(kind.__name__ in _AVERAGING for kind in type(callback).__mro__):
            raise ValueError(
                f"{type(callback).__name__} copies full weights, but fsdp shards them: remove it, "
                "or use the wrapper ddp"
            )


def check_not_sharded(module: nn.Module) -> None:
    """Raise ValueError if ``module`` is sharded before it is wrapped."""
    if holds_shards(module):
        raise ValueError(
            f"{type(module).__name__} is sharded already (a module stays sharded after a run with "
            "fsdp): continue with the same Trainer, or load the checkpoint into a new module"
        )


def check_equal_batches(trainer: Trainer) -> None:
    """Raise ValueError if ranks have different numbers of batches; every rank must call this.

    All ranks gather each block together, so a rank with more batches would wait forever.
    """
    batch_counts = {
        "predict": trainer.predicting and trainer.num_predict_batches,
        "test": trainer.testing and trainer.num_test_batches,
        "validate": (trainer.validating and trainer.num_val_batches)
        or (trainer.sanity_checking and trainer.num_sanity_val_batches),
    }
    stage, count = next(
        ((name, batches) for name, batches in batch_counts.items() if batches), ("", None)
    )
    counts = all_gather_object(count)
    if any(rank_count != counts[0] for rank_count in counts):
        raise ValueError(
            f"with fsdp all ranks need the same number of batches to {stage}, got {counts}: choose "
            "another batch size or number of samples, or load the checkpoint into a new module "
            "and use the wrapper ddp for it"
        )
