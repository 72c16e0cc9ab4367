"""Find the modules of a model that are gathered separately, the *units*, and shard them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from ..blocks import find_blocks, find_parameters
from ..layout import broadcast_from_first_rank
from ..sharding.mesh import agree
from ..sharding.meta_init import check_no_meta_buffers
from ..steps.model import SupervisedModel
from ..steps.step import overrides_train_step
from ..steps.step_checks import check_unchanged_weights
from .options import FsdpOptions, WrapPolicy

logger = logging.getLogger(__name__)


def check_model(module: nn.Module, detect: bool) -> None:
    """Raise ValueError for a model that cannot be sharded with any options."""
    check_no_meta_buffers(module)
    if any(isinstance(child, FSDPModule) for child in module.modules()):
        raise ValueError(
            f"{type(module).__name__} is sharded already: pass the model without fully_shard, and "
            "name its blocks in shard"
        )
    if detect and calls_children(module):
        raise ValueError(
            f"detect_anomalous_params needs the default train_step of the wrapper, but the step "
            f"of {type(module).__name__} runs instead; remove one of the two"
        )


def calls_children(model: nn.Module) -> bool:
    """Return whether a step of ``model`` may call its children directly, in any order.

    This holds for a custom ``train_step``, and for Lightning modules with manual optimization.
    """
    return overrides_train_step(model) or not getattr(model, "automatic_optimization", True)


def shard_model(module: nn.Module, options: FsdpOptions, mesh: DeviceMesh) -> list[nn.Module]:
    """Shard the parameters over the mesh; return the root modules. Every rank must call this."""
    ignored: set[nn.Parameter] = set()
    units: dict[str, nn.Module] = {}

    def describe() -> dict[str, Any]:
        ignored.update(find_ignored(module, options.ignored))
        check_shapes(module, ignored)
        units.update(find_units(module, options, ignored))
        return _description(module, options, list(units), ignored)

    agree(describe, mesh)
    if mesh.size() > 1:
        check_unchanged_weights(module, "fsdp")
    roots = find_roots(module, ignored)
    exact = full_precision_units(module, options.precision)
    if options.device is not None and not any(param.is_meta for param in module.parameters()):
        module.to(options.device)
    if options.same_weights:
        broadcast_from_first_rank([*module.parameters(), *module.buffers()], mesh)
    common: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": options.offload,
        "ignored_params": ignored or None,
    }
    # Only the root has an output dtype: other blocks pass their output to blocks that expect
    # param_dtype.
    inner = replace(options.precision, output_dtype=None)
    # Innermost first, because fully_shard takes all parameters that are not in a unit yet.
    for path, child in reversed(list(module.named_modules())):
        if path not in roots and (path in exact or path in units):
            policy = exact.get(path, inner)
            free = options.free_after_forward
            fully_shard(child, mp_policy=policy, reshard_after_forward=free, **common)
    # With None torch keeps the root gathered, because the backward starts with it.
    free_root = False if options.free_after_forward is False else None
    for path, root in roots.items():
        policy = exact.get(path, options.precision)
        if root is module and _keeps_targets(module, policy):
            policy = replace(policy, cast_forward_inputs=False)
        fully_shard(root, mp_policy=policy, reshard_after_forward=free_root, **common)
        start = f"{path}." if path else ""
        inside = {name: units[name] for name in units if name != path and name.startswith(start)}
        _set_prefetch(root, inside, options.prefetch)
    return list(roots.values())


def _keeps_targets(module: nn.Module, policy: MixedPrecisionPolicy) -> bool:
    """Cast the input of the net instead of the batch, which contains the targets of the loss.

    Returns whether this is possible: for a ``SupervisedModel`` under a policy that casts inputs.
    """
    dtype = policy.param_dtype
    is_supervised = isinstance(module, SupervisedModel) and (
        type(module).forward is SupervisedModel.forward
    )
    if not is_supervised or dtype is None or not policy.cast_forward_inputs:
        return False

    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    def cast_all(net: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, (args, kwargs))

    supervised: Any = module
    supervised.net.register_forward_pre_hook(cast_all, with_kwargs=True, prepend=True)
    return True


def _description(
    module: nn.Module, options: FsdpOptions, units: list[str], ignored: set[nn.Parameter]
) -> dict[str, Any]:
    """Describe the model and the options, which must be the same on all ranks."""
    parameters = dict(module.named_parameters())
    named = {**parameters, **dict(module.named_buffers())}
    return {
        **{name: (tuple(value.shape), str(value.dtype)) for name, value in named.items()},
        **{f"{name}.requires_grad": param.requires_grad for name, param in parameters.items()},
        "the order of the parameters": list(parameters),
        "shard": units,
        "ignored_parameters": [name for name, param in parameters.items() if param in ignored],
        "mixed_precision": str(options.precision),
        "cpu_offload": str(options.offload),
        "reshard_after_forward": options.free_after_forward,
        "prefetch": options.prefetch,
        "sync_module_states": options.same_weights,
    }


def _set_prefetch(module: Any, units: dict[str, nn.Module], depth: tuple[int, int]) -> None:
    forward: list[Any] = [module, *units.values()]
    backward: list[Any] = [module, *(units[path] for path in sort_for_backward(units))]
    for at in range(len(units)):
        if depth[0]:
            forward[at].set_modules_to_forward_prefetch(forward[at + 1 :][: depth[0]])
        if depth[1]:
            backward[at].set_modules_to_backward_prefetch(backward[at + 1 :][: depth[1]])


def find_units(
    model: nn.Module, options: FsdpOptions, ignored: set[nn.Parameter]
) -> dict[str, nn.Module]:
    """Return the blocks of ``options`` that can be gathered separately, by path, in module order.

    Some blocks cannot: a block that shares parameters with other parts of the model, and a block
    whose parameters are used without calling it. They are gathered with the unit that contains
    them.
    """
    by_policy = options.policy and _find_by_policy(model, options.policy)
    blocks = find_blocks(model, options.blocks) if by_policy is None else by_policy
    blocks.pop("", None)
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    units = {}
    for path, block in blocks.items():
        reason = _reason_against(model, path, block, owners)
        if reason is None:
            units[path] = block
        else:
            logger.info("%s is not sharded on its own: %s", path, reason)
    _drop_overlaps(units, set().union(*owners.values()))
    return _split_by_dtype(model, units, ignored)


def find_roots(model: nn.Module, ignored: set[nn.Parameter]) -> dict[str, nn.Module]:
    """Return the root modules by path; each parameter is in exactly one of them.

    Usually the only root is the model. If its step may call its children in any order, with several
    backwards, the roots are the outermost modules inside it that have a forward and parameters,
    unless a parameter would then be in no root or in several.
    """
    roots: dict[str, nn.Module] = {}
    if not calls_children(model) or not _collect_roots(model, "", ignored, roots):
        return {"": model}
    params = [param for root in roots.values() for param in set(root.parameters())]
    return roots if params and len(params) == len(set(params)) else {"": model}


def _collect_roots(
    module: nn.Module, path: str, ignored: set[nn.Parameter], roots: dict[str, nn.Module]
) -> bool:
    """Add the outermost modules with a forward to ``roots``.

    Returns False if a parameter that is not ignored is outside of all of them.
    """
    if any(param not in ignored for param in module.parameters(recurse=False)):
        return False
    for name, child in module.named_children():
        if all(param in ignored for param in child.parameters()):
            continue
        full = f"{path}.{name}" if path else name
        if type(child).forward is not nn.Module.forward:
            roots[full] = child
        elif not _collect_roots(child, full, ignored, roots):
            return False
    return True


def full_precision_units(
    model: nn.Module, policy: MixedPrecisionPolicy
) -> dict[str, MixedPrecisionPolicy]:
    """Return, by path, policies for the layers that keep their dtype under mixed precision.

    These are the BatchNorm layers: their statistics are sums over many values, which would lose
    precision.
    """
    policies = {}
    for path, layer in model.named_modules():
        if path and isinstance(layer, _BatchNorm) and policy.param_dtype is not None:
            tensors = [*layer.parameters(), *layer.buffers()]
            dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
            if len(dtypes) == 1 and dtypes != {policy.param_dtype}:
                (dtype,) = dtypes
                policies[path] = replace(policy, param_dtype=dtype, output_dtype=policy.param_dtype)
    return policies


def find_ignored(model: nn.Module, named: Iterable[object]) -> set[nn.Parameter]:
    """Return the parameters in ``named``, given directly, by a module, or by a name or pattern."""
    ignored: set[nn.Parameter] = set()
    for entry in named:
        if isinstance(entry, nn.Parameter):
            ignored.add(entry)
        elif isinstance(entry, nn.Module):
            ignored.update(entry.parameters())
        else:
            ignored.update(find_parameters(model, str(entry), "ignored parameters").values())
    parameters = model.named_parameters(remove_duplicate=False)
    trained = [name for name, p in parameters if p in ignored and p.requires_grad]
    if trained:
        logger.warning(
            "the gradients of ignored parameters are not averaged over the ranks, so each rank "
            "updates its own copy of %s",
            ", ".join(trained),
        )
    return ignored


def check_shapes(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Raise ValueError if a parameter has no dimensions and cannot be sharded."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 and parameter not in ignored:
            raise ValueError(
                f"parameters must have at least one dimension to be sharded, but {name} has none: "
                "give it the shape (1,)"
            )


def _find_by_policy(model: nn.Module, policy: WrapPolicy) -> dict[str, nn.Module]:
    """Return the blocks that a wrapping policy of torch selects, from the leaves upwards."""
    chosen: set[int] = set()

    def visit(module: nn.Module) -> int:
        """Apply the policy inside ``module``; return the number of elements in its blocks."""
        count = sum(param.numel() for param in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=count):
            return 0
        total = 0
        for child in module.children():
            if id(child) in chosen:
                continue
            inside = visit(child)
            size = sum(param.numel() for param in child.parameters())
            if policy(module=child, recurse=False, nonwrapped_numel=size - inside):
                chosen.add(id(child))
                inside = size
            total += inside
        return total

    visit(model)
    return {
        path: module
        for path, module in model.named_modules()
        if id(module) in chosen and type(module).forward is not nn.Module.forward
    }


def _reason_against(
    model: nn.Module, path: str, block: nn.Module, owners: dict[nn.Parameter, set[nn.Module]]
) -> str | None:
    if isinstance(model.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention):
        return "the attention around it uses its parameters without calling it"
    if next(block.parameters(), None) is None:
        return "it has no parameters"
    inside = set(block.modules())
    for name, parameter in block.named_parameters():
        if not owners[parameter] <= inside:
            return f"its {name} belongs to other modules too"
    return None


def _drop_overlaps(units: dict[str, nn.Module], owning: set[nn.Module]) -> None:
    """Remove both of two units that share a module with parameters, unless one is in the other."""
    modules_by_path = {path: set(unit.modules()) for path, unit in units.items()}
    for (path, unit_modules), (other, other_modules) in combinations(modules_by_path.items(), 2):
        if (
            unit_modules & other_modules & owning
            and not unit_modules <= other_modules
            and not other_modules <= unit_modules
        ):
            units.pop(path, None)
            units.pop(other, None)
            logger.info("%s and %s share a module and are not sharded on their own", path, other)


def _split_by_dtype(
    model: nn.Module, units: dict[str, nn.Module], ignored: set[nn.Parameter]
) -> dict[str, nn.Module]:
    """Add a unit for each module whose parameters have another dtype than the unit around it.

    A unit gathers its parameters, and reduces their gradients, together and in one dtype.
    """
    more: set[nn.Module] = set()
    paths = {module: path for path, module in model.named_modules()}
    for root in [model, *units.values()]:
        dtypes: dict[nn.Module, set[torch.dtype]] = {}
        count: Counter[torch.dtype] = Counter()
        for module in _own_modules(root, set(units.values())):
            dtypes[module] = set()
            for param in module.parameters(recurse=False):
                if param.requires_grad and param not in ignored:
                    dtypes[module].add(param.dtype)
                    count[param.dtype] += param.numel()
        usual = {dtype for dtype, _ in count.most_common(1)}
        for module, module_dtypes in dtypes.items():
            if module_dtypes <= usual:
                continue
            if len(module_dtypes) > 1 or module is root:
                raise ValueError(
                    "the trained parameters of a module must have one dtype, but "
                    f"{paths[module] or 'the model'} ({type(module).__name__}) has "
                    f"{', '.join(sorted(map(str, module_dtypes)))} next to parameters of "
                    f"{usual.pop()}; put them into a separate module, or use one dtype"
                )
            more.add(module)
    unit_set = {*units.values(), *more}
    return {path: child for path, child in model.named_modules() if child in unit_set}


def _own_modules(root: nn.Module, units: set[nn.Module]) -> Iterable[nn.Module]:
    """Yield ``root`` and the modules in it, without the units inside."""
    yield root
    for child in root.children():
        if child not in units:
            yield from _own_modules(child, units)


def sort_for_backward(units: Iterable[str]) -> list[str]:
    """Sort paths in module order by backward order: the block whose forward ends last is first."""
    ended: list[str] = []
    running: list[str] = []
    for path in units:
        while running and not path.startswith(f"{running[-1]}."):
            ended.append(running.pop())
        running.append(path)
    return [*running, *reversed(ended)]
