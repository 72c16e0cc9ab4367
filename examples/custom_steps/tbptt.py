"""Truncated backpropagation through time: each batch continues where the last one ended.

The state carries over to the next batch, the gradient does not (Williams and Peng 1990).
See streams.py for data and model.
Run it: stepwrap train examples/custom_steps/tbptt.yaml
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import OptimWrapper, StepDistributedDataParallel


@MODEL_WRAPPERS.register_module()
class TruncatedDDP(StepDistributedDataParallel):
    """Keeps the state of each row between batches and in checkpoints."""

    state: Tensor | None = None
    rows: Tensor | None = None

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        characters, target, positions = self.module.data_preprocessor(data, training=True)
        rows, block = positions.unbind(1)
        if self.rows is not None and not torch.equal(rows, self.rows):
            raise ValueError(
                "streams must be batch_size * ranks, with drop_last and without shuffle"
            )
        state = None if self.state is None else self.state * (block > 0)[:, None]
        with optim_wrapper.optim_context(self):
            logits, state = self(characters, state)
            loss = cross_entropy(logits.flatten(0, 1), target.flatten())
        self.rows, self.state = rows, state.detach()
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}

    def step_state(self) -> dict[str, Any]:
        return {} if self.state is None else {"state": self.state, "rows": self.rows}

    def load_step_state(self, state: dict[str, Any]) -> None:
        device = next(self.parameters()).device  # the loaded tensors are on the CPU
        self.state, self.rows = state["state"].to(device), state["rows"].to(device)
