"""The events of a run, and the hooks that listen to them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from ..registry import did_you_mean
from .state import LoopState, Stateful

logger = logging.getLogger(__name__)

Scalars = dict[str, "Tensor | float"]
Listener: TypeAlias = Callable[..., None]


class Hook:
    """Base class of objects that listen to the events of a run.

    Override the events you need. Only overridden events are called, in ascending ``order``; hooks
    of equal order keep the order in which they were given. A run calls the events in this order:

        on_run_start
          on_train_start
            on_epoch_start
              on_batch_start, on_batch_end, [on_update, [collect_logs, on_log],
                [evaluation], on_save_point]  for each batch
            on_epoch_end, [evaluation], on_save_point
          [collect_logs, on_log], on_train_end
        on_run_end

    Events in brackets occur when they are due. An evaluation is on_eval_start, on_eval_batch_start
    and on_eval_batch_end for each batch, and on_eval_end. In the iteration loop, on_epoch_start and
    on_epoch_end surround the whole run. A resumed run calls on_train_start and on_epoch_start
    again.

    The model is put into training mode before on_epoch_start, so a hook can put modules into eval
    mode there. They stay in it until the next on_epoch_start, also after an evaluation.

    Other methods must not be named ``on_...``, ``before_...`` or ``after_...``, so that a misspelt
    event is noticed: name a helper ``_on_...``.

    Other objects with methods of these names work as well; ``order`` is optional for them. A hook
    with ``state_dict`` and ``load_state_dict`` is saved in checkpoints, and belongs to one run.
    """

    order: int = 50

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_events(cls, vars(cls))

    def ignores(self) -> Collection[str]:
        """Return overridden events that need no call; a ``HookList`` asks when it is built."""
        return ()

    def around(self, event: str, hook: Any, listener: Listener) -> Listener:
        """Return ``listener``, or a function that wraps it and is called at ``event`` instead.

        ``listener`` is a method of ``hook``. Called for all listeners of other hooks whenever a
        ``HookList`` is built. The function must call ``listener`` with its arguments.
        """
        return listener

    def on_run_start(self, state: LoopState) -> None:
        """All parts are built; no checkpoint has been restored yet."""

    def on_run_end(self, state: LoopState) -> None:
        """The run is over; not called after an error."""

    def on_train_start(self, state: LoopState) -> None:
        """Training starts, or continues after a resume; the counters are restored."""

    def on_train_end(self, state: LoopState) -> None:
        """Training has ended or was stopped: see ``state.stop_reason``, ``state.signal``."""

    def on_epoch_start(self, state: LoopState) -> None:
        """A pass over the data starts, in training mode; ``state.epoch`` is its index."""

    def on_epoch_end(self, state: LoopState) -> None:
        """A pass over the data is done; ``state.epoch`` is still its index."""

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        """A training batch was read; ``state.iteration`` is its index."""

    def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Tensor]) -> None:
        """A training step is done; ``logs`` are detached tensors on the device."""

    def on_update(self, state: LoopState) -> None:
        """An update is done, or was skipped (``state.skipped``); ``state.step`` counts it."""

    def collect_logs(self, state: LoopState, scalars: Scalars) -> None:
        """Add this rank's scalars to ``scalars`` before they are averaged over the ranks.

        Called on every rank at the same update; 0-d tensors may stay on the device.
        """

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        """A log record is complete: means over interval and ranks, equal on every rank."""

    def on_save_point(self, state: LoopState) -> None:
        """The state can be saved: the log record and validation that were due are done.

        Called after each update, and once more after each pass over the data (``state.batch`` is 0
        then).
        """

    def on_eval_start(self, state: LoopState) -> None:
        """An evaluation starts; ``state.phase`` is VAL, TEST or PREDICT."""

    def on_eval_batch_start(self, state: LoopState, batch: Any) -> None:
        """An evaluation batch was read."""

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        """An evaluation step is done; gradients are disabled."""

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        """An evaluation has ended; ``metrics`` are equal on every rank.

        Called exactly once for each ``on_eval_start`` unless an error was raised. ``metrics`` is
        empty if the loop has no metrics, or if a request to stop interrupted the evaluation
        (``state.stop_reason`` is set then).
        """

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        """A loop failed with ``error``, possibly on this rank only, so do not communicate here."""


EVENTS: tuple[str, ...] = tuple(
    name for name in vars(Hook) if name.startswith("on_") or name == "collect_logs"
)


def _check_events(cls: type, names: Iterable[str]) -> None:
    """Raise TypeError if a method has a name like an event but is none: it may be misspelt."""
    for name in names:
        is_like_event = name.startswith(("on_", "before_", "after_")) and name not in EVENTS
        if is_like_event and callable(getattr(cls, name)):
            raise TypeError(
                f"{cls.__name__}.{name} would never be called, since it is not an event"
                f"{did_you_mean(name, EVENTS)}. Methods named on_..., before_... and after_... are "
                "reserved for events, so that a misspelt one is noticed: give a helper another "
                f"name, such as _{name}. The events are {', '.join(EVENTS)}"
            )


def _require_hook(hook: Any) -> Any:
    """Return ``hook``; raise TypeError if it is not a Hook and has none of the events."""
    if isinstance(hook, type):
        raise TypeError(f"a hook must be an object, got the class; write {hook.__name__}()")
    if not isinstance(hook, Hook):
        _check_events(type(hook), dir(type(hook)))
        if not any(hasattr(hook, event) for event in EVENTS):
            raise TypeError(
                f"a hook needs a method for an event, got a {type(hook).__name__} without any; "
                f"the events are {', '.join(EVENTS)}"
            )
    return hook


# The hooks with a state by their ids, and the runs that the state belongs to.
_RUNS: dict[int, tuple[weakref.ref[Any], weakref.ref[LoopState]]] = {}


def note_run(hook: Any, state: LoopState) -> None:
    """Note that the state of ``hook`` belongs to the run of ``state``."""

    def forget(_: Any, key: int = id(hook)) -> None:
        _RUNS.pop(key, None)

    _RUNS[id(hook)] = weakref.ref(hook, forget), weakref.ref(state)


class HookList:
    """Hooks in calling order.

    For each event, the attribute of that name is a tuple of the hooks' methods, its listeners.
    ``emit`` calls them. The training loop iterates over the tuples itself, which saves a call per
    event.
    """

    if TYPE_CHECKING:

        def __getattr__(self, event: str) -> tuple[Listener, ...]: ...

    def __init__(self, hooks: Iterable[Any] = ()) -> None:
        self._hooks: list[Any] = sorted(
            map(_require_hook, hooks), key=lambda hook: getattr(hook, "order", Hook.order)
        )
        ignored = [hook.ignores() if hasattr(hook, "ignores") else () for hook in self._hooks]
        for event in EVENTS:
            silent = getattr(Hook, event)
            pairs = zip(self._hooks, ignored, strict=True)
            methods = [
                (hook, getattr(hook, event, silent)) for hook, no in pairs if event not in no
            ]
            listeners = [
                self._surrounded(event, hook, method)
                for hook, method in methods
                if getattr(method, "__func__", method) is not silent
            ]
            setattr(self, event, tuple(listeners))

    def begin_training(self, state: LoopState) -> None:
        """Raise ValueError if a hook has the state of another run than ``state``."""
        for hook in self._hooks:
            if not isinstance(hook, Stateful) or not hasattr(hook, "__weakref__"):
                continue
            earlier = _RUNS.get(id(hook))
            if earlier is not None and earlier[0]() is hook and earlier[1]() is not state:
                name = type(hook).__name__
                raise ValueError(
                    f"this {name} has the state of another run, such as its best value or its "
                    f"averages: create a new {name} for each run. To continue with the state, call "
                    "load_state_dict(old.state_dict()) of the new one"
                )
            note_run(hook, state)

    def _surrounded(self, event: str, hook: Any, listener: Listener) -> Listener:
        for other in self._hooks:
            if isinstance(other, Hook) and other is not hook:
                listener = other.around(event, hook, listener)
        return listener

    def emit(self, event: str, *args: Any) -> None:
        """Call the listeners of an event, in order."""
        for listener in getattr(self, event):
            listener(*args)

    def emit_exception(self, state: LoopState, error: BaseException) -> None:
        """Call ``on_exception`` of every hook, even if one of them fails."""
        for on_exception in self.on_exception:
            try:
                on_exception(state, error)
            except Exception:
                logger.exception("a hook failed while handling %s", type(error).__name__)

    def without(self, *events: str) -> HookList:
        """Return a list of the same hooks without listeners for ``events``."""
        copied = copy(self)
        for event in events:
            setattr(copied, event, ())
        return copied

    def __iter__(self) -> Iterator[Any]:
        return iter(self._hooks)

    def __len__(self) -> int:
        return len(self._hooks)
