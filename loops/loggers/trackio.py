"""Log a run to Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any
from uuid import uuid4

from ...registry import HOOKS
from ..state import LoopState
from .logger import LoggerHook, Package, Setting, run_id


@HOOKS.register_module()
class TrackioHook(LoggerHook):
    """Log records, metrics, settings and media to Trackio, which keeps them on this machine.

    ``trackio show`` opens the dashboard. The horizontal axis is the optimizer update. A resumed run
    continues the same run of Trackio, whose name is in ``<run_dir>/trackio_id.txt``. Only rank 0
    logs; nothing is logged if ``state.run_dir`` is None.

    Args:
        project: the project.
        name: the beginning of the run's name; default: the name of the run folder.
        group: a name that several runs share.
        space: a Hugging Face Space that gets the records, too, such as "user/space".

    Raises:
        ImportError: trackio is not installed.
    """

    order = 73
    package = Package("trackio", "Trackio", "trackio")

    def __init__(
        self,
        *,
        project: str = "stepwrap",
        name: str | None = None,
        group: str | None = None,
        space: str | None = None,
    ) -> None:
        super().__init__()
        self._name = name
        self._options: dict[str, Any] = {
            "project": project,
            "group": group,
            "space_id": space,
        }
        self._run: Any = None

    def scalars(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        named = {f"{phase}/{name}": value for name, value in values.items()}
        self._open(state).log(named, step=state.step)

    def settings(
        self, state: LoopState, settings: Mapping[str, Setting], metrics: Mapping[str, float]
    ) -> None:
        # Trackio takes settings only when it opens a run.
        self._open(state, settings)

    def media(self, state: LoopState, name: str, item: Any) -> None:
        import trackio

        shown: Any
        if isinstance(item, str):
            shown = trackio.Markdown(f"```\n{item}\n```")
        elif hasattr(item, "savefig"):
            shown = trackio.Image(_picture(item))
        else:
            # Images have three dimensions there.
            shown = trackio.Image(item if item.ndim == 3 else item[:, :, None].repeat(3, axis=2))
        self._open(state).log({name: shown}, step=state.step)

    def close(self, failed: bool) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _open(self, state: LoopState, settings: Mapping[str, Setting] | None = None) -> Any:
        if self._run is None:
            import trackio

            assert state.run_dir is not None
            title = self._name or state.run_dir.name
            self._run = trackio.init(
                name=run_id(state, "trackio", lambda: f"{title}-{uuid4().hex[:6]}"),
                config=dict(settings or {}),
                resume="allow",
                embed=False,
                **self._options,
            )
        return self._run


def _picture(figure: Any) -> Any:
    from PIL import Image

    data = BytesIO()
    figure.savefig(data, format="png")
    return Image.open(data)
