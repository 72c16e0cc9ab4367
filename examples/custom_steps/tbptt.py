"""Truncated backpropagation through time: each batch goes on where the one before ended.

The state is carried on, the gradient is not (Williams and Peng 1990); data and model: streams.py.
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
    """Keeps the state of each row, also in checkpoints."""

    state: Tensor | None = None
    rows: Tensor | None = None

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        characters, target, places = self.module.data_preprocessor(data, training=True)
        rows, goes_on = places.unbind(1)
        if self.rows is not None and not torch.equal(rows, self.rows):
            raise ValueError("streams must be batch_size times the ranks, unshuffled, drop_last")
        state = None if self.state is None else self.state * (goes_on > 0)[:, None]
        with optim_wrapper.optim_context(self):
            logits, state = self(characters, state)
            loss = cross_entropy(logits.flatten(0, 1), target.flatten())
        self.rows, self.state = rows, state.detach()
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}

    def step_state(self) -> dict[str, Any]:
        return {} if self.state is None else {"state": self.state, "rows": self.rows}

    def load_step_state(self, state: dict[str, Any]) -> None:
        where = next(self.parameters()).device  # they come from a file, on the CPU
        self.state, self.rows = state["state"].to(where), state["rows"].to(where)
