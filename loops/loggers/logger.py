"""The base class of loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

from ...collectives import get_rank
from ...registry.text.values import dotted, leaves
from ..hook import Hook
from ..skipping.rollback import Rollback
from ..state import LoopState, Phase
from .media import checked_media

Setting = bool | int | float | str


class Package(NamedTuple):
    """A package that a logger needs, its name in messages, and the extra that installs it."""

    module: str
    title: str
    extra: str


class LoggerHook(Hook):
    """Base class of hooks that log records, settings and media to a file or service.

    Override any of ``scalars``, ``settings`` and ``media``. They are called on rank 0 only, and
    only if ``state.run_dir`` is set. Override ``close`` if a file or connection stays open.

    A training that is stopped inside a log interval ends with a record of a part of the interval.
    Most services cannot remove a record, and the resumed run writes one of the whole interval, so
    ``scalars`` does not get the former.

    Attributes:
        package: the package that the logger needs, if stepwrap does not always install it.
        can_replace: whether ``scalars`` gets the record of a part of an interval, because the
            logger removes it when the training continues.

    Raises:
        ImportError: the package is not installed.
    """

    order = 71
    package: ClassVar[Package | None] = None
    can_replace: ClassVar[bool] = False

    def __init__(self) -> None:
        self.require_packages()
        # The last metrics of each phase, under names such as "val/accuracy".
        self._metrics: dict[str, float] = {}
        self._has_new_metrics = False

    @classmethod
    def require_packages(cls) -> None:
        """Raise ImportError if the package is missing; checking a config calls this too."""
        needed = cls.package
        if needed is not None and find_spec(needed.module) is None:
            raise ImportError(
                f"{cls.__name__} needs {needed.title}; install it with "
                f"`pip install stepwrap[{needed.extra}]`"
            )

    def scalars(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        """Write values at the update ``state.step``.

        Args:
            state: the state of the loop.
            phase: "train", "val" or "test".
            values: a log record or the metrics of an evaluation.
        """

    def settings(
        self, state: LoopState, settings: Mapping[str, Setting], metrics: Mapping[str, float]
    ) -> None:
        """Write the settings; called when training starts, and at the end if there are new metrics.

        Args:
            state: the state of the loop.
            settings: ``state.settings`` with names such as "optimizer.lr".
            metrics: names such as "val/accuracy" and the last values; empty when training starts.
        """

    def media(self, state: LoopState, name: str, item: Any) -> None:
        """Write an image, a figure or a text at the update ``state.step``.

        Args:
            state: the state of the loop.
            name: the name of the item, such as "weights" or "layer1/weights".
            item: an image as a ``uint8`` array (height, width) or (height, width, channels), a
                matplotlib figure, or a ``str``.
        """

    def close(self, failed: bool) -> None:
        """Close open files or connections; a later call of another method must open them again.

        Called on every rank, even if nothing is open.

        Args:
            failed: whether the run ended with an error.
        """

    def on_run_start(self, state: LoopState) -> None:
        self._attach(state)

    on_eval_start = on_run_start

    def on_train_start(self, state: LoopState) -> None:
        if self._attach(state):
            self.settings(state, dict(flat_settings(state.settings)), {})

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        is_whole = not state.stop_reason or state.step == state.recorded_at
        if self._attach(state) and (is_whole or self.can_replace):
            self.scalars(state, Phase.TRAIN.value, record)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        if metrics and self._attach(state):
            phase = state.phase.value
            self._metrics |= {f"{phase}/{name}": value for name, value in metrics.items()}
            self._has_new_metrics = True
            self.scalars(state, phase, metrics)

    def on_train_end(self, state: LoopState) -> None:
        if self._has_new_metrics:
            self._has_new_metrics = False
            self.settings(state, dict(flat_settings(state.settings)), dict(self._metrics))
        self.close(failed=False)

    # A separate evaluation has no `on_train_end`.
    on_run_end = on_train_end

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        # The training continues after a rollback.
        self.close(failed=not isinstance(error, Rollback))

    def _attach(self, state: LoopState) -> bool:
        """Subscribe to the media of ``state``, and return whether this rank writes."""
        if get_rank() != 0 or state.run_dir is None:
            return False
        if self._receive not in state.media_loggers:
            state.media_loggers.append(self._receive)
        return True

    def _receive(self, state: LoopState, kind: str, name: str, content: Any) -> None:
        self.media(state, name, checked_media(kind, name, content))


def flat_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, Setting]]:
    """Yield nested settings under names such as "optimizer.lr"; values of other types as text."""
    for path, value in leaves(settings, contents=_sections):
        if path:
            simple = isinstance(value, bool | int | float | str)
            yield dotted(path), value if simple else str(value)


def _sections(value: Any) -> Iterable[tuple[Any, Any]] | None:
    return value.items() if isinstance(value, Mapping) and value else None


def is_new_run(state: LoopState) -> bool:
    """Return whether training starts from the beginning, not from a checkpoint."""
    return state.phase is Phase.TRAIN and state.step == 0 and state.evaluated_at != 0


def run_id(state: LoopState, service: str, create: Callable[[], str]) -> str:
    """Return the id of this run at a service, so that a resumed run continues there.

    The id is stored in ``<run_dir>/<service>_id.txt``. A run that starts from the beginning gets a
    new id from ``create``.
    """
    folder = state.run_dir
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{service}_id.txt"
    if path.exists() and not is_new_run(state):
        return path.read_text(encoding="utf-8").strip()
    name = create()
    path.write_text(f"{name}\n", encoding="utf-8")
    return name
