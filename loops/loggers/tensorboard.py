"""Write TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...registry import HOOKS
from ..state import LoopState
from .logger import LoggerHook, Package, Setting

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@HOOKS.register_module()
class TensorBoardHook(LoggerHook):
    """Write ``train/...``, ``val/...`` and ``test/...`` scalars into ``<run_dir>/tensorboard``.

    Images, figures and texts are written too. At the end of the run, the settings and the last
    metrics are written for the tab HPARAMS. The horizontal axis is the optimizer update. A resumed
    run hides the values that were written after the restored checkpoint. Only rank 0 writes;
    nothing is written if ``state.run_dir`` is None.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    order = 72
    package = Package("tensorboard", "TensorBoard", "tensorboard")

    def __init__(self) -> None:
        super().__init__()
        self._writer: SummaryWriter | None = None

    def on_train_start(self, state: LoopState) -> None:
        if self._attach(state):
            # Only training hides later values: an evaluation may read an earlier checkpoint.
            self.close(failed=False)
            self._open(state, purge_step=state.step + 1)
        super().on_train_start(state)

    def scalars(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        writer = self._open(state)
        for name, value in values.items():
            writer.add_scalar(f"{phase}/{name}", value, state.step)
        writer.flush()

    def settings(
        self, state: LoopState, settings: Mapping[str, Setting], metrics: Mapping[str, float]
    ) -> None:
        writer = self._open(state)
        if settings and metrics:
            from torch.utils.tensorboard.summary import hparams

            # `add_hparams` would write all metrics again, into another folder.
            file: Any = writer.file_writer
            for summary in hparams(dict(settings), dict(metrics)):  # type: ignore[no-untyped-call]
                file.add_summary(summary)

    def media(self, state: LoopState, name: str, item: Any) -> None:
        writer = self._open(state)
        if isinstance(item, str):
            writer.add_text(name, item, state.step)
        elif hasattr(item, "savefig"):
            writer.add_figure(name, item, state.step, close=False)
        else:
            writer.add_image(name, item, state.step, dataformats="HWC" if item.ndim == 3 else "HW")

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, state: LoopState, purge_step: int | None = None) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = f"{state.run_dir}/tensorboard"
            self._writer = SummaryWriter(folder, purge_step=purge_step)
        return self._writer
