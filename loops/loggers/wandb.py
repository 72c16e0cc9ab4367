"""Log a run to Weights & Biases."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from ...registry import HOOKS
from ..state import LoopState
from .logger import LoggerHook, Package, Setting, run_id


@HOOKS.register_module()
class WandbHook(LoggerHook):
    """Log records, metrics, settings and media to Weights & Biases.

    The horizontal axis is ``step``, the optimizer update. A resumed run continues the same run of
    W&B, whose id is in ``<run_dir>/wandb_id.txt``. Only rank 0 logs; nothing is logged if
    ``state.run_dir`` is None.

    Args:
        project: the project; default: the environment variable WANDB_PROJECT, or W&B's default.
        name: the name of the run; default: the name of the run folder.
        entity: the user or team; default: WANDB_ENTITY, or the logged-in user.
        group: a name that several runs share.
        tags: tags of the run.
        mode: "online", "offline" (writes into the run folder; ``wandb sync`` uploads it later) or
            "disabled". Default: WANDB_MODE, or "online".

    Raises:
        ImportError: wandb is not installed.
        ValueError: ``mode`` has another value.
    """

    order = 73
    package = Package("wandb", "Weights & Biases", "wandb")

    def __init__(  # noqa: PLR0913
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
    ) -> None:
        super().__init__()
        if mode not in (None, "online", "offline", "disabled"):
            raise ValueError(f"mode must be online, offline or disabled, got {mode!r}")
        self._name = name
        self._options: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "group": group,
            "mode": mode,
        }
        self._tags = list(tags)
        self._run: Any = None

    def scalars(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        named = {f"{phase}/{name}": value for name, value in values.items()}
        self._open(state).log({"step": state.step, **named})

    def settings(
        self, state: LoopState, settings: Mapping[str, Setting], metrics: Mapping[str, float]
    ) -> None:
        run = self._open(state)
        # A resumed run may have other settings.
        run.config.update(dict(settings), allow_val_change=True)
        run.summary.update(dict(metrics))

    def media(self, state: LoopState, name: str, item: Any) -> None:
        import wandb

        is_text = isinstance(item, str)
        shown = wandb.Html(f"<pre>{html.escape(item)}</pre>") if is_text else wandb.Image(item)
        self._open(state).log({"step": state.step, name: shown})

    def close(self, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
            self._run = None

    def _open(self, state: LoopState) -> Any:
        if self._run is None:
            import wandb

            assert state.run_dir is not None
            self._run = wandb.init(
                id=run_id(state, "wandb", lambda: uuid4().hex),
                resume="allow",
                # Do not continue a run that the user's own code has opened.
                reinit="create_new",
                dir=str(state.run_dir),
                name=self._name or state.run_dir.name,
                tags=self._tags,
                **self._options,
            )
            # wandb's own step must not decrease, but a test may evaluate an earlier checkpoint.
            self._run.define_metric("*", step_metric="step")
        return self._run
