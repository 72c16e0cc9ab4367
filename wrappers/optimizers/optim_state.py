"""Save and load optimizer state, which can be loaded under any other kind of parallelism.

The state has the format of torch's ``Optimizer.state_dict()``. It contains whole tensors, and
``DTensor``s if each rank holds only a part. For ``ZeroRedundancyOptimizer`` and
``PostLocalSGDOptimizer`` it is the state of their inner optimizer. These two are recognised by
their attributes, because importing their classes takes half a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from ..layout import (
    as_global,
    get_layout,
    get_parameters,
    has_placed_parameters,
    is_dtensor,
    is_dtensor_or_localised,
    take_part,
)
from .optimizer_fit import IMPLEMENTATIONS, align_fused_state

# Torch's key for the names of a group's parameters, if an optimizer gets named parameters.
NAMES = "param_names"
# Entries of the state of torch's optimizers that have the shape of their parameter.
_SHAPED = (
    *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg"),
    *("grad_avg", "acc_delta", "sum", "prev", "step_size", "ax"),
)

# By id of a parameter, its names; several if modules share it.
Names: TypeAlias = Mapping[int, Sequence[str]]


@dataclass
class NamedState:
    """A saved state, matched by name with the parameters of an optimizer.

    Attributes:
        content: the state in the order of the optimizer's parameters.
        stateless: names of the optimizer's parameters that the saved state does not contain.
        unused: names in the saved state that the optimizer does not contain.
        regrouped: whether the saved groups replaced groups with other parameters.
    """

    content: dict[str, Any]
    stateless: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    regrouped: bool = False


def get_kind(optimizer: Optimizer) -> str:
    """Return the class name of the optimizer, or of its inner optimizer if it has one."""
    return type(_inner(optimizer)).__name__


def has_sharded_state(optimizer: Optimizer) -> bool:
    """Return whether the state of ``optimizer`` is sharded over ranks."""
    if _is_zero_redundancy(optimizer):
        return True
    return any(
        get_layout(p).sharded_over for p in get_parameters(optimizer) if is_dtensor_or_localised(p)
    )


def get_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state, with parts of tensors as ``DTensor``s.

    With ``ZeroRedundancyOptimizer`` every rank must call this. Only the first rank of its process
    group gets the state of the parameters; the others get only the settings of parameter groups.
    """
    state = dict(
        _consolidated(optimizer) if _is_zero_redundancy(optimizer) else optimizer.state_dict()
    )
    if has_placed_parameters(optimizer):
        owners = dict(enumerate(get_parameters(optimizer)))
        state["state"] = {
            key: _as_dtensors(values, owners[key]) if key in owners else values
            for key, values in state["state"].items()
        }
    return state


def load_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state that ``get_state`` returned under any kind of parallelism.

    Each tensor in the state is a ``DTensor``, a whole tensor, or an object with the ``shape`` of
    the whole tensor that can be sliced like it.

    Parameters and states are paired by position; see ``match_by_name``.

    Raises:
        ValueError: the state belongs to another model.
    """
    state = dict(state)
    groups = state["param_groups"]
    pairs = zip(groups, optimizer.param_groups, strict=False)
    state["param_groups"] = [
        # Keeps this optimizer's implementation ("fused", "foreach"): the saved one may not support
        # this device or sharding.
        {
            **saved,
            **{
                name: current[name] for name in IMPLEMENTATIONS if name in saved and name in current
            },
        }
        for saved, current in pairs
    ] + list(groups[len(optimizer.param_groups) :])
    keys = chain.from_iterable(group["params"] for group in groups)
    owners = dict(zip(keys, get_parameters(optimizer), strict=False))
    local = {id(p) for p in get_parameters(_inner(optimizer))}
    if type(_inner(optimizer)).__module__.startswith("torch."):
        _check_shapes(state["state"], owners)
    state["state"] = {
        key: _take_local(values, owners[key]) if key in owners else values
        for key, values in state["state"].items()
        if key not in owners or id(owners[key]) in local
    }
    if hasattr(optimizer, "averager"):
        # PostLocalSGDOptimizer warns if the state has no step.
        state.setdefault("step", optimizer.averager.step)
    optimizer.load_state_dict(state)
    _restore_dtypes(_inner(optimizer), state["state"], owners)
    align_fused_state(_inner(optimizer))


def has_names(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each group has a name for each of its parameters."""
    return all(len(group.get(NAMES, ())) == len(group["params"]) for group in groups)


def add_names(optimizer: Optimizer, state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return the state of ``optimizer`` with the names of the parameters in its groups."""
    names = complete_names(optimizer, names)
    pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
    groups = [
        {**saved, NAMES: [names[id(p)][0] for p in group["params"]]} for saved, group in pairs
    ]
    return {**state, "param_groups": groups}


def complete_names(optimizer: Optimizer, names: Names) -> Names:
    """Return ``names`` with names for parameters of ``optimizer`` that do not belong to a model."""
    unnamed = [p for p in get_parameters(optimizer) if id(p) not in names]
    return {**names, **{id(p): [f"<outside the model: {n}>"] for n, p in enumerate(unnamed)}}


def match_by_name(optimizer: Optimizer, state: Mapping[str, Any], names: Names) -> NamedState:
    """Pair a saved state with the parameters of ``optimizer`` by their names.

    The groups of ``optimizer`` get the parameters of the saved groups, in the saved order, because
    the state of schedules belongs to these groups, and LBFGS joins its parameters in this order. A
    parameter that is not in a saved group stays with the other parameters of its group.

    Args:
        optimizer: the optimizer that will load the result.
        state: a state whose groups have names.
        names: the names of the parameters of a model.

    Raises:
        ValueError: a group has no parameter of a saved group; a saved group has parameters of the
            model, but none of the optimizer; or the optimizer is a ``ZeroRedundancyOptimizer``,
            whose groups cannot change, and they differ.
    """
    names = complete_names(optimizer, names)
    owners = {name: p for p in get_parameters(optimizer) for name in names[id(p)]}
    matched = NamedState({**state})
    groups: list[list[tuple[Any, Tensor]]] = []
    home: dict[int, int] = {}
    for at, group in enumerate(state["param_groups"]):
        groups.append([])
        for key, name in zip(group["params"], group[NAMES], strict=True):
            owner = owners.get(name)
            if owner is None or id(owner) in home:
                matched.unused.append(name)
                continue
            home[id(owner)] = at
            groups[at].append((key, owner))
    _require_all_groups(state["param_groups"], groups, names)
    for group in optimizer.param_groups:
        homes = Counter(home[id(p)] for p in group["params"] if id(p) in home)
        for parameter in [p for p in group["params"] if id(p) not in home]:
            name = names[id(parameter)][0]
            if not homes:
                raise ValueError(
                    f"no parameter of the group of {name!r} is in a group of the saved state; put "
                    "it into the group of another parameter"
                )
            matched.stateless.append(name)
            groups[homes.most_common(1)[0][0]].append((None, parameter))
    before = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
    matched.regrouped = before != [{id(p) for _, p in group} for group in groups]
    if _is_zero_redundancy(optimizer):
        if matched.regrouped:
            raise ValueError("ZeroRedundancyOptimizer needs the parameter groups of the state")
        # It has divided its parameters among the ranks already.
        for current, group in zip(optimizer.param_groups, groups, strict=True):
            position = {id(p): at for at, p in enumerate(current["params"])}
            group.sort(key=lambda pair: position[id(pair[1])])
    else:
        _arrange(optimizer, [[p for _, p in group] for group in groups])
    _renumber(matched.content, groups, optimizer)
    return matched


def _require_all_groups(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[Any]], names: Names
) -> None:
    """Raise ValueError if no parameter of a saved group was paired, but the model has them all."""
    in_model = set(chain.from_iterable(names.values()))
    for group, pairs in zip(saved, groups, strict=True):
        if group["params"] and not pairs and in_model.issuperset(group[NAMES]):
            raise ValueError(
                f"the saved optimizer has a group with {group[NAMES][0]!r} "
                f"({len(group[NAMES])} parameters), none of which this run's optimizer has. If a "
                "hook adds the group, let it do so in on_run_start, or give the optimizer all "
                "parameters from the start and freeze some with FreezeHook. To train without them, "
                "start a new run from the weights with load_from"
            )


def _arrange(optimizer: Optimizer, groups: Sequence[list[Tensor]]) -> None:
    """Move the parameters of ``optimizer`` to ``groups``, with the names that it has for them."""
    current = optimizer.param_groups
    titles = {
        id(p): name
        for group in current
        for p, name in zip(group["params"], group.get(NAMES, ()), strict=False)
    }
    template = {**current[0], "params": []}
    arranged = [*current, *({**template, "params": []} for _ in groups)][: len(groups)]
    for group, params in zip(arranged, groups, strict=True):
        # In place, because LBFGS keeps a reference to the list.
        group["params"][:] = params
        if titles:
            group[NAMES] = [titles[id(p)] for p in params]
    current[:] = arranged


def _renumber(
    content: dict[str, Any], groups: Sequence[list[tuple[Any, Tensor]]], optimizer: Optimizer
) -> None:
    """Make the parameters of a saved state consecutive numbers, in the order of ``groups``."""
    saved = content["state"]
    numbers = iter(range(sum(map(len, groups))))
    states, numbered = {}, []
    triples = zip(content["param_groups"], groups, optimizer.param_groups, strict=True)
    for former, group, current in triples:
        settings = {key: value for key, value in former.items() if key != NAMES}
        settings["params"] = [next(numbers) for _ in group]
        if NAMES in current:
            settings[NAMES] = list(current[NAMES])
        numbered.append(settings)
        pairs = zip(settings["params"], group, strict=True)
        states.update({number: saved[key] for number, (key, _) in pairs if key in saved})
    # Some optimizers have entries that belong to no parameter.
    keys = {key for group in content["param_groups"] for key in group["params"]}
    shared = {key: value for key, value in saved.items() if key not in keys}
    content["state"], content["param_groups"] = {**states, **shared}, numbered


def _check_shapes(states: Mapping[Any, Any], owners: Mapping[Any, Tensor]) -> None:
    """Raise ValueError if a state has another shape than the parameter at its position."""
    for key, owner in owners.items():
        entries: Any = states.get(key)
        for name in _SHAPED if isinstance(entries, Mapping) else ():
            shape = tuple(getattr(entries.get(name), "shape", ()))
            if shape and shape not in (get_layout(owner).shape, get_layout(owner).sizes):
                raise ValueError(
                    f"{name} of parameter {key} has shape {shape}, but the parameter at this "
                    f"position has shape {get_layout(owner).shape}: give the optimizer its "
                    "parameters in the saved order, or named_parameters() when saving "
                    "and loading, to pair them by name"
                )


def _is_zero_redundancy(optimizer: Optimizer) -> bool:
    return hasattr(optimizer, "consolidate_state_dict")


def _inner(optimizer: Any) -> Any:
    wraps = _is_zero_redundancy(optimizer) or hasattr(optimizer, "averager")
    return optimizer.optim if wraps else optimizer


def _consolidated(optimizer: Any) -> dict[str, Any]:
    optimizer.consolidate_state_dict(to=0)
    if optimizer.rank != 0:
        return {"state": {}, "param_groups": Optimizer.state_dict(optimizer)["param_groups"]}
    state: dict[str, Any] = optimizer.state_dict()
    # Frees the copy of all ranks' state, which the optimizer would keep until the next call.
    optimizer._all_state_dicts = []
    return state


def _as_dtensors(values: Any, owner: Tensor) -> Any:
    if not isinstance(values, Mapping):
        return values
    sizes = get_layout(owner).sizes
    return {
        name: as_global(value, owner)
        if isinstance(value, Tensor) and value.ndim and tuple(value.shape) == sizes
        else value
        for name, value in values.items()
    }


def _restore_dtypes(
    optimizer: Optimizer, states: Mapping[Any, Any], owners: Mapping[Any, Tensor]
) -> None:
    """Restore saved types, since torch converts all of a parameter's state to its own type.

    Torch's optimizers have their large state in the type of the parameter, which may be another one
    than in the saved run. Numbers, such as NAdam's products, and the state of other optimizers,
    such as weights in full precision, have their own type.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    is_torch = type(optimizer).__module__.startswith("torch.")
    for key in states.keys() & owners.keys():
        saved, loaded = states[key], optimizer.state.get(owners[key], {})
        for name in loaded.keys() & (saved.keys() if isinstance(saved, Mapping) else ()):
            value = saved[name]
            is_own = isinstance(value, Tensor) and not (is_torch and value.ndim)
            if is_own and loaded[name].dtype != value.dtype and name != "step":
                loaded[name] = value.to(owners[key].device)


def _take_local(value: Any, owner: Tensor) -> Any:
    """Return this rank's part of the state of a parameter."""
    if isinstance(value, Mapping):
        return {name: _take_local(entry, owner) for name, entry in value.items()}
    if isinstance(value, list):
        # LBFGS keeps lists of vectors of all parameters.
        return [_take_local(entry, owner) for entry in value]
    if not hasattr(value, "shape") or (
        isinstance(value, Tensor) and not is_dtensor_or_localised(owner)
    ):
        return value.full_tensor() if is_dtensor(value) else value
    if len(value.shape) and tuple(value.shape) == get_layout(owner).shape:
        return take_part(value, owner, keep_dtype=True)
    value = value if isinstance(value, Tensor) else value[...]
    if is_dtensor(owner) and value.ndim and not is_dtensor(value):
        # State with another shape than the parameter, such as Adafactor's rows, is not sharded.
        from torch.distributed.tensor import DTensor, Replicate

        everywhere = [Replicate()] * owner.device_mesh.ndim
        return DTensor.from_local(value, owner.device_mesh, everywhere, run_check=False)
    return value
