"""L-BFGS, whose line search computes the loss of a batch several times (Liu and Nocedal 1989).

Run it: stepwrap train examples/custom_steps/lbfgs.yaml
"""

from typing import Any

from torch import Tensor

from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import OptimWrapper, StepDistributedDataParallel, parse_losses


@MODEL_WRAPPERS.register_module()
class ClosureDDP(StepDistributedDataParallel):
    """Passes the optimizer a closure that computes the loss of the batch."""

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        data = self.module.data_preprocessor(data, training=True)

        def closure() -> Tensor:
            return parse_losses(self(*data, mode="loss"))[0]

        # Clears gradients, runs backward, and returns the mean loss of all ranks to the optimizer.
        return {"loss": optim_wrapper.update_by_closure(closure, self)}
