"""Save and restore the state of optimizers by the names of their parameters in the user's model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ...collectives import get_rank
from ...wrappers.optimizers.optim_state import (
    NAMES,
    Names,
    add_names,
    complete_names,
    has_names,
    match_by_name,
)
from ...wrappers.optimizers.param_groups import parameter_names

logger = logging.getLogger(__name__)

_SHOWN = 8
_UNNAMED = (
    "it was saved by a version that did not store the names of parameters, and {}, so it is "
    "unknown which state belongs to which parameter; restore the order and the groups of the saved "
    "run, or start a new run from its weights with load_from"
)


@dataclass
class NameOrders:
    """The names of a model's weights in the order of a checkpoint and in the current order."""

    saved: Sequence[str]
    now: Sequence[str]


@dataclass
class _Report:
    """The parameters and groups that differ from the checkpoint."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    regrouped: bool = False

    def log(self, path: Any) -> None:
        if get_rank() != 0:
            return
        if self.regrouped:
            logger.warning(
                "the optimizer has other parameter groups than %s: the groups in the checkpoint, "
                "with their parameters and settings, are used",
                path,
            )
        if self.rows:
            titles = ("not loaded", "parameter", "in the run", "in the checkpoint")
            logger.warning(
                "the optimizer's state in %s does not fit; parameters without a state in the "
                "checkpoint start with a new one\n\n%s\n",
                *(path, text_table(titles, self.rows)),
            )


def add_parameter_names(content: Any, model: nn.Module, optim_wrapper: Any) -> Any:
    """Return the state of an optimizer wrapper with the names of all parameters in its groups."""
    names = parameter_names(model)

    def name(member: Any, state: Any) -> Any:
        groups = _groups(member)
        fits = _has_groups(state) and len(state["param_groups"]) == len(groups)
        return add_names(_optimizer(member), state, names) if fits else state

    if isinstance(optim_wrapper, Mapping):
        return {label: name(optim_wrapper.get(label), state) for label, state in content.items()}
    return name(optim_wrapper, content)


def fit_to_run(
    content: Any, model: nn.Module, optim_wrapper: Any, orders: NameOrders, path: Any
) -> Any:
    """Return the saved state in the order of the optimizer's parameters; log what does not fit.

    Raises:
        ValueError: the state cannot be divided among the parameters.
    """
    names, report = parameter_names(model), _Report()

    def match(member: Any, state: Any, label: str) -> Any:
        groups = _groups(member)
        if not _has_groups(state) or not groups:
            return state
        if not has_names(state["param_groups"]):
            complete = complete_names(_optimizer(member), names)
            guessed = _guessed_names(state["param_groups"], groups, complete, orders)
            pairs = zip(state["param_groups"], guessed, strict=True)
            state = {**state, "param_groups": [{**saved, NAMES: n} for saved, n in pairs]}
        paired = match_by_name(_optimizer(member), state, names)
        run = label or "yes"
        report.rows += [("without state", name, run, "-") for name in paired.stateless]
        report.rows += [("unused", name, "-", run) for name in paired.unused]
        report.regrouped = report.regrouped or paired.regrouped
        return paired.content

    if isinstance(optim_wrapper, Mapping) and isinstance(content, Mapping):
        fitted = {
            label: match(optim_wrapper[label], state, label) if label in optim_wrapper else state
            for label, state in content.items()
        }
        absent = [label for label in optim_wrapper if label not in content]
        report.rows += [("without state", "all parameters", label, "-") for label in absent]
    else:
        fitted = match(optim_wrapper, content, "")
    report.log(path)
    return fitted


def text_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of at most 80 columns; rows beyond eight with one first cell are counted."""
    # Imported here, because most runs print no such table.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    kinds: dict[str, list[Sequence[str]]] = {}
    for row in rows:
        kinds.setdefault(row[0], []).append(row)
    for kind, alike in kinds.items():
        for row in alike[:_SHOWN]:
            table.add_row(*row)
        if len(alike) > _SHOWN:
            table.add_row(kind, f"and {len(alike) - _SHOWN} more")
    console = Console(width=80, color_system=None, force_terminal=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def _optimizer(member: Any) -> Any:
    return getattr(member, "optimizer", member)


def _groups(member: Any) -> list[dict[str, Any]]:
    return list(getattr(_optimizer(member), "param_groups", ()))


def _has_groups(state: Any) -> bool:
    """Return whether a state has the form of torch's; optimizer wrappers may save other forms."""
    return isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys()


def _guessed_names(
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    names: Names,
    orders: NameOrders,
) -> list[list[str]]:
    """Return the names of a state without names, from the order of the weights in the checkpoint.

    Raises:
        ValueError: the groups differ, or the order has changed and does not decide.
    """
    titles = [group.get("name") for group in saved]
    if len(set(titles)) == len(titles) and set(titles) == {group.get("name") for group in groups}:
        groups = sorted(groups, key=lambda group: titles.index(group.get("name")))
    if titles != [group.get("name") for group in groups]:
        raise ValueError(_UNNAMED.format("the parameter groups have other names now"))
    sizes = [len(group["params"]) for group in saved]
    if sizes != [len(group["params"]) for group in groups]:
        raise ValueError(_UNNAMED.format("the parameter groups have other sizes now"))
    if list(orders.saved) == list(orders.now):
        return [[names[id(p)][0] for p in group["params"]] for group in groups]
    return [list(_in_saved_order(group["params"], names, orders)) for group in groups]


def _in_saved_order(params: Sequence[Tensor], names: Names, orders: NameOrders) -> Iterator[str]:
    """Yield the names of a group in the order that it had when it was saved."""
    ranks = []
    for order in (orders.now, orders.saved):
        ranking = {name: at for at, name in enumerate(order)}
        ranks.append(
            [min((ranking[n] for n in names[id(p)] if n in ranking), default=-1) for p in params]
        )
    now, before = ranks
    if -1 in now or now != sorted(now):
        raise ValueError(_UNNAMED.format("the order of the model's layers has changed"))
    for at in sorted(range(len(params)), key=before.__getitem__):
        yield names[id(params[at])][0]
