"""Log records and evaluations for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...collectives import get_rank
from ...registry import HOOKS
from ..hook import Hook
from ..state import LoopState

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@HOOKS.register_module()
class TensorBoardHook(Hook):
    """Writes `train/...`, `val/...` and `test/...` scalars into `<run_dir>/tensorboard`.

    Only rank 0 writes; nothing if `state.run_dir` is None. The horizontal
    axis is the optimizer update. A resumed run hides what an earlier one wrote
    after the restored checkpoint.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    order = 72

    def __init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise ImportError(
                "TensorBoardHook needs TensorBoard; install it with "
                "`pip install stepwrap[tensorboard]`"
            )
        self._writer: SummaryWriter | None = None

    def on_train_start(self, state: LoopState) -> None:
        self._open(state)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self._write(state, "train", record)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self._open(state)
        self._write(state, state.phase.value, metrics)

    def on_run_end(self, state: LoopState) -> None:
        self._close()

    def on_train_end(self, state: LoopState) -> None:
        self._close()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._close()

    def _open(self, state: LoopState) -> None:
        if self._writer is not None or state.run_dir is None or get_rank() != 0:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(state.run_dir / "tensorboard", purge_step=state.step + 1)

    def _write(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        for name, value in values.items():
            self._writer.add_scalar(f"{phase}/{name}", value, state.step)
        self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
