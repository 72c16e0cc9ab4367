"""Optimizers, their wrappers and schedules for a model that steps itself under the Trainer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from types import MethodType
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...collectives import all_gather_object, get_rank, get_world_size
from ...registry import OPTIM_WRAPPERS, OPTIMIZERS, PARAM_SCHEDULERS, build_tree
from ...wrappers import OptimWrapperDict, SingleDevice, build_optimizer

logger = logging.getLogger(__name__)

# What Lightning saves by itself.
_TORCH_KEYS = ("state", "param_groups")
# Beside the members of the optimizer wrapper, whose names are arguments.
_CARRIED = "step_state of all ranks"


class Schedule(NamedTuple):
    """A scheduler, when it is stepped and the metric that it watches, if any."""

    scheduler: Any
    by: Literal["step", "epoch"]
    metric: str | None

    def step(self, *measured: Any) -> None:
        """Step, also where a loss scaler has skipped the update: a rate depends on its number."""
        with warnings.catch_warnings():
            # It knows nothing of skipped updates (pytorch/pytorch#44511).
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)`")
            self.scheduler.step(*measured)


def check_optim_wrapper(given: Any) -> None:
    """Raise TypeError for what can never become an optimizer wrapper."""
    is_one = hasattr(given, "update_params") and hasattr(given, "state_dict")
    makes_one = callable(given) and not isinstance(given, type)
    if given is None or is_one or makes_one or isinstance(given, Mapping):
        return
    found = given.__name__ if isinstance(given, type) else type(given).__name__
    raise TypeError(
        "optim_wrapper must be an OptimWrapper, a config, or a function of the wrapped model "
        f"that returns one, got {found}; as in lambda model: OptimWrapper(AdamW("
        "model.parameters()))"
    )


def build_optim_wrapper(given: Any, wrapped: nn.Module) -> Any:
    """Return the optimizer wrapper: ``given`` itself, what it returns, or what it describes."""
    if isinstance(given, Mapping) and "type" not in given and "optimizer" not in given:
        if isinstance(given, OptimWrapperDict):
            return given
        raise TypeError(
            "optim_wrapper as a config needs the key optimizer, as in {'optimizer': {'type': "
            f"'AdamW', 'lr': 1e-3}}}}, got the keys {', '.join(map(repr, given)) or 'none'}"
        )
    if isinstance(given, Mapping) and not isinstance(given, OptimWrapperDict):
        return _from_config(given, wrapped)
    if callable(given):
        given = given(wrapped)
    if not hasattr(given, "update_params") or not hasattr(given, "state_dict"):
        raise TypeError(
            "optim_wrapper must be an OptimWrapper, a config, or a function of the wrapped model "
            f"that returns one, got {type(given).__name__}"
        )
    return given


def _from_config(given: Mapping[str, Any], wrapped: nn.Module) -> Any:
    settings = {"type": "OptimWrapper", **given}
    optimizer = settings.pop("optimizer", None)
    if not isinstance(optimizer, Mapping) or "type" not in optimizer:
        raise TypeError(
            "optim_wrapper as a config holds one optimizer with a type, as in {'optimizer': "
            "{'type': 'AdamW', 'lr': 1e-3}}; for several give a function of the model that "
            "returns an OptimWrapperDict"
        )
    fastest = partial(build_optimizer, OPTIMIZERS.resolve(optimizer["type"]))
    parameters = {"params": list(wrapped.parameters())}
    built = build_tree({**optimizer, "type": fastest}, OPTIMIZERS, parameters)
    return build_tree(settings, OPTIM_WRAPPERS, {"optimizer": built})


def members(optim_wrapper: Any) -> dict[str, Any]:
    """The optimizer wrappers by name; a single one is called ``""``."""
    return dict(optim_wrapper) if isinstance(optim_wrapper, Mapping) else {"": optim_wrapper}


def build_schedules(given: Sequence[Any], optim_wrapper: Any) -> list[Schedule]:
    """Build the schedulers, each of the optimizer that its config names."""
    optimizers = {name: one.optimizer for name, one in members(optim_wrapper).items()}
    return [_schedule(one, optimizers) for one in given]


def _schedule(given: Any, optimizers: Mapping[str, Optimizer]) -> Schedule:
    settings = dict(given) if isinstance(given, Mapping) else {"type": given}
    by, metric = settings.pop("by", "epoch"), settings.pop("metric", None)
    name = settings.pop("optimizer", next(iter(optimizers)) if len(optimizers) == 1 else None)
    if by not in ("step", "epoch"):
        raise ValueError(f"a schedule's by must be 'step' or 'epoch', got {by!r}")
    if name not in optimizers:
        known = ", ".join(map(repr, optimizers))
        raise ValueError(f"a schedule's optimizer must be one of {known}, got {name!r}")
    if isinstance(given, Mapping):
        scheduler = build_tree(settings, PARAM_SCHEDULERS, {"optimizer": optimizers[name]})
    else:
        scheduler = given(optimizers[name])
    watches = isinstance(scheduler, ReduceLROnPlateau)
    if watches and metric is None:
        raise ValueError("ReduceLROnPlateau needs metric, the name of a logged value to watch")
    if metric is not None and not (watches and by == "epoch"):
        raise ValueError(
            f"metric={metric!r} is for ReduceLROnPlateau by epoch, got "
            f"{type(scheduler).__name__} by {by}"
        )
    return Schedule(scheduler, by, metric)


def further_state(optim_wrapper: Any, carried: Mapping[str, Any] | None) -> dict[str, Any]:
    """What Lightning does not save: counts, the loss scale, and what each rank's step carries.

    Every rank must call this where anything is carried.
    """
    state: dict[str, Any] = {
        name: {key: value for key, value in one.state_dict().items() if key not in _TORCH_KEYS}
        for name, one in members(optim_wrapper).items()
    }
    if carried is not None:
        state[_CARRIED] = all_gather_object(carried)
    return state


def load_further_state(optim_wrapper: Any, wrapped: Any, state: Mapping[str, Any]) -> None:
    """Restore ``further_state()``; the optimizers have theirs already."""
    for name, one in members(optim_wrapper).items():
        if name in state:
            one.load_state_dict({**one.state_dict(), **state[name]})
    if not _carries(wrapped):
        return
    by_rank = state.get(_CARRIED, ())
    if len(by_rank) == get_world_size():
        wrapped.load_step_state(by_rank[get_rank()])
        return
    logger.warning(
        "the checkpoint has what the steps of %d ranks carry from batch to batch, here are %d: "
        "they start with an empty state",
        len(by_rank),
        get_world_size(),
    )


def carried_by(wrapped: Any) -> dict[str, Any] | None:
    """What a step of one's own carries from batch to batch; None, on all ranks, if it does not."""
    return wrapped.step_state() if _carries(wrapped) else None


def _carries(wrapped: Any) -> bool:
    own = getattr(type(wrapped), "step_state", SingleDevice.step_state)
    return own is not SingleDevice.step_state


def step_through(optimizer: Any, lightning_optimizer: Any) -> Callable[[], None]:
    """Let Lightning see every step of ``optimizer``, whoever asks for it; returns the way back.

    It counts them, and calls its hooks, only where its own object around the optimizer is stepped.
    """
    before = vars(optimizer).get("step")
    plain = optimizer.step
    is_inside = False

    # With its attributes: torch's schedulers look there for their own mark.
    @wraps(plain)
    def step(self: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return plain(closure, **kwargs)
        is_inside = True
        try:
            return lightning_optimizer.step(closure, **kwargs)
        finally:
            is_inside = False

    # Bound, as torch's schedulers expect it of a step that they have not marked yet.
    optimizer.step = MethodType(step, optimizer)

    def undo() -> None:
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before

    return undo


def walk_logged(logs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of what a step returned that are numbers."""
    for name, value in logs.items():
        if isinstance(value, (int, float)) or getattr(value, "numel", lambda: 0)() == 1:
            yield name, value
