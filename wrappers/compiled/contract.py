"""The contract of a program: everything that it assumes to be unchanged, checked before a call."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from ..steps.preprocess import MODULE_HOOKS
from .capture import Captured
from .trace import StepTensors

_ID, _VALUES = id, dict.values
_ADDRESS, _STRIDE, _DTYPE = Tensor.data_ptr, Tensor.stride, attrgetter("dtype")
_HOOKS, _LATE_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_FORWARD = attrgetter("forward")
# For classes of these modules only ``forward`` is compared; for other classes all methods are.
_KNOWN = ("torch.", "stepwrap.", "builtins", "typing", "abc")
_SAVED_TENSORS_HOOKS = torch._C._autograd._top_saved_tensors_default_hooks


class Contract:
    """The state of model, optimizer and wrappers that a program assumes to be unchanged.

    Before each call it compares:

    - the Python state that the forward read, by Dynamo's guards: attributes, globals, closures,
      hooks of modules, autocast and other modes, shapes and strides;
    - the order of keys in dicts of the model and of the batch;
    - the methods of the modules' classes;
    - the parameters, buffers and optimizer state: identities, data types and strides; after a
      change of addresses, also that they do not share memory;
    - the optimizer's class, methods and settings, except for learning rates;
    - hooks on parameters, on the optimizer and on all modules.

    It does not detect methods that are replaced on classes other than modules, hooks on nodes of
    the autograd graph, or state that a custom operator reads.
    """

    def __init__(self, wrapper: Any, optim_wrapper: Any, captured: Captured, batch: Any) -> None:
        model, optimizer = wrapper.module, optim_wrapper.optimizer
        self._check, self._is_alive, self._fetch = (
            captured.guards,
            captured.is_alive,
            captured.fetch,
        )
        self._scope: dict[str, Any] = {"model": model, "batch": None}
        self._optimizer, self._wrappers = optimizer, (wrapper, optim_wrapper)
        self._list_used = _list_used(wrapper, optim_wrapper)
        self._options = _clip_options(optim_wrapper)
        self._batch_order = key_order(batch)
        self._tables = [*_attributes_with_dicts(model)]
        self._orders = self._orders_now()
        tensor_dicts = [*(module._parameters for module in model.modules())]
        tensor_dicts += [module._buffers for module in model.modules()]
        self._dicts = [tensor_dict for tensor_dict in tensor_dicts if tensor_dict]
        self._known = self._objects()
        self._ids = [*map(_ID, self._known)]
        step_tensors = StepTensors(model, optimizer)
        self._parameters = step_tensors.parameters
        self._fixed = [*self._parameters, *step_tensors.buffers]
        self._fixed += [state[name] for _, name, state in step_tensors.states()]
        self._layout = self._layout_now()
        self._addresses = [*map(_ADDRESS, self._fixed)]
        self._read = [id(value) for value in self._fetch(self._scope)]
        self._groups = [_settings(group) for group in optimizer.param_groups]
        updated = [param for group in optimizer.param_groups for param in group["params"]]
        self._updated = [*map(_ID, updated)]
        self._frozen = [param for param in updated if not param.requires_grad]
        self._owners = [vars(optimizer), vars(optim_wrapper)]
        self._wrapper = vars(wrapper)
        self._lengths = [*map(len, self._owners)]
        self._hooks = _hook_dicts(wrapper, optimizer)
        kinds = [*{type(module) for module in model.modules()}]
        self._forwards = [*zip(kinds, map(_FORWARD, kinds), strict=True)]
        bases = {base for kind in kinds for base in kind.__mro__}
        self._classes = [
            (base, dict(vars(base))) for base in bases if not base.__module__.startswith(_KNOWN)
        ]

    def holds(self, batch: Any) -> bool:
        """Return whether the program would compute the same for ``batch`` as the usual step."""
        self._scope["batch"] = batch
        try:
            return (
                self.has_order(batch)
                and self._check(self._scope)
                and self._is_alive()
                and self._orders_now() == self._orders
                and [*map(_ID, self._fetch(self._scope))] == self._read
                and self.settings_hold()
                and [*map(_ID, self._objects())] == self._ids
                and self._layout_now() == self._layout
                and ([*map(_ADDRESS, self._fixed)] == self._addresses or self._accepts_addresses())
                and all(param.grad is None for param in self._frozen)
                and not any(self._hooks)
                and not any(map(_HOOKS, self._parameters))
                and not any(map(_LATE_HOOKS, self._parameters))
                and all(kind.forward is forward for kind, forward in self._forwards)
                and all(_same_methods(*methods) for methods in self._classes)
                and _SAVED_TENSORS_HOOKS(True) is None
                and not torch.is_anomaly_enabled()
            )
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            # An object was replaced by one that cannot be compared.
            return False
        finally:
            self._scope["batch"] = None

    def has_order(self, batch: Any) -> bool:
        """Return whether the dicts of ``batch`` have their keys in the order of the program."""
        return bool(key_order(batch) == self._batch_order)

    def settings_hold(self) -> bool:
        """Return whether wrappers, optimizer and settings are unchanged, except learning rates."""
        return (
            all(map(operator.is_, _list_used(*self._wrappers), self._list_used))
            and _clip_options(self._wrappers[1]) == self._options
            and [*map(len, self._owners)] == self._lengths
            and "forward" not in self._wrapper
            and self._rates_alone_change()
        )

    def _rates_alone_change(self) -> bool:
        groups = self._optimizer.param_groups
        updated = chain.from_iterable(group["params"] for group in groups)
        if [*map(_ID, updated)] != self._updated:
            return False
        try:
            if groups != self._groups:
                for stored_group, group in zip(self._groups, groups, strict=False):
                    stored_group["lr"], stored_group["params"] = group["lr"], group["params"]
                return bool(groups == self._groups)
        except (RuntimeError, ValueError):
            # Comparing different tensors or arrays gives no single truth value.
            return False
        return True

    def _objects(self) -> list[Any]:
        """Return parameters, buffers, and the optimizer's state with its keys."""
        state = self._optimizer.state
        values = state.values()
        return [
            *chain.from_iterable(map(_VALUES, self._dicts)),
            *state,
            *values,
            *chain.from_iterable(values),
            *chain.from_iterable(map(_VALUES, values)),
        ]

    def _orders_now(self) -> list[Any]:
        return [key_order(attributes[name]) for attributes, name in self._tables]

    def _layout_now(self) -> list[Any]:
        return [*map(_STRIDE, self._fixed), *map(_DTYPE, self._fixed)]

    def _accepts_addresses(self) -> bool:
        """Accept new addresses, and return True, unless tensors share memory now."""
        if share_memory(self._fixed):
            return False
        self._addresses = [*map(_ADDRESS, self._fixed)]
        return True


def key_order(value: Any) -> Any:
    """Return the keys of all dicts in ``value``, in their order; None without a dict.

    Dynamo's guards compare the order only if a forward iterates over a dict, but not if it passes
    it by ``**``, copies or merges it.
    """
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        return tuple(value), [*map(key_order, value.values())]
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name, None) for field in fields(value)]
    if not isinstance(value, (list, tuple)):
        return None
    orders = [*map(key_order, value)]
    return orders if any(order is not None for order in orders) else None


def _attributes_with_dicts(model: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the attributes of all modules that contain dicts, as their owner's dict and a name."""
    of_modules = set(vars(nn.Module()))
    for module in model.modules():
        attributes = vars(module)
        for name in attributes.keys() - of_modules:
            if key_order(attributes[name]) is not None:
                yield attributes, name


def share_memory(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of the tensors overlap in memory."""
    spans = sorted(
        (
            tensor.data_ptr(),
            tensor.data_ptr()
            + tensor.itemsize * (1 + sum(map(_reach, tensor.shape, tensor.stride()))),
        )
        for tensor in tensors
        if tensor.numel()
    )
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def _reach(size: int, stride: int) -> int:
    return (size - 1) * stride


def _list_used(wrapper: Any, optim_wrapper: Any) -> tuple[Any, ...]:
    """Return the objects and methods that a step uses."""
    optimizer, kind = optim_wrapper.optimizer, type(optim_wrapper)
    return (
        *(wrapper._modules["module"], wrapper.update_decorators, type(wrapper).forward),
        *(kind, kind.update_params, kind.backward, kind.step, kind.zero_grad, kind.apply),
        *(kind.scale_loss, kind.should_update, nn.Module.__call__),
        *(optim_wrapper.clip, optimizer, optimizer.state, optimizer.param_groups),
        *(type(optimizer), type(optimizer).step, vars(optimizer).get("step")),
    )


def _clip_options(optim_wrapper: Any) -> dict[str, Any]:
    clip = optim_wrapper.clip
    return {} if clip is None else {**clip.options, "returns_l2": clip.returns_l2}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group's settings; copy lists, because they may change in place."""
    return {
        name: value if name == "params" else copy.copy(value) if isinstance(value, list) else value
        for name, value in group.items()
    }


def _same_methods(kind: type, stored: dict[str, Any]) -> bool:
    now = vars(kind)
    if now == stored:
        return True
    # Compares only methods here; Dynamo's guards check the values that the forward reads.
    return all(now.get(name) is value for name, value in stored.items() if _is_method(value))


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, (property, classmethod, staticmethod))


def _hook_dicts(wrapper: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Return the dicts of hooks that must be empty."""
    # Dynamo could check the hooks of modules too, but its guards are slower.
    module_hooks = [getattr(module, name) for module in wrapper.modules() for name in MODULE_HOOKS]
    everywhere = (
        value for name, value in vars(torch_module).items() if name.startswith("_global_")
    )
    return [
        *(value for value in everywhere if isinstance(value, dict)),
        *module_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]


def find_obstacles(optimizer: Any, allow_custom: bool) -> Iterable[str]:
    """Yield why updates of an optimizer cannot be part of a program."""
    kind = type(optimizer)
    step: Callable[..., Any] | None = vars(optimizer).get("step")
    # torch's schedulers wrap this method to count its calls; that is allowed.
    if step is not None and getattr(step, "__wrapped__", None) is not kind.step:
        yield f"the step method of this {kind.__name__} has been replaced"
    methods = [name for name in vars(optimizer) if name != "step" and hasattr(kind, name)]
    if any(callable(vars(optimizer)[name]) for name in methods):
        yield f"methods of this {kind.__name__} have been replaced: {', '.join(methods)}"
    function = getattr(kind.step, "__wrapped__", kind.step)
    is_torchs = kind.__module__.startswith("torch.optim") and function.__module__.startswith(
        "torch."
    )
    if not (is_torchs or allow_custom):
        yield (
            f"{kind.__name__} is not part of torch and may keep state that a compiled step would "
            "ignore; to compile it anyway, set compile: {step: true, custom_optimizer: true}"
        )
