"""Which modules of a model are gathered and freed on their own."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _BatchNorm

from ...registry import did_you_mean
from ..blocks import find_blocks
from ..steps.step import has_own_train_step
from .options import FsdpOptions, WrapPolicy

logger = logging.getLogger(__name__)


def find_units(
    model: nn.Module, options: FsdpOptions, ignored: set[nn.Parameter]
) -> dict[str, nn.Module]:
    """The blocks of ``options`` that can stand alone, by path and in module order.

    A block that shares parameters with other parts of the model stays with what holds both, and
    so does one whose parameters are used without calling it.
    """
    if options.policy is not None:
        blocks = _by_policy(model, options.policy)
    else:
        blocks = find_blocks(model, options.blocks)
    blocks.pop("", None)
    owners = _owners(model)
    units = {}
    for path, block in blocks.items():
        reason = _why_not_alone(model, path, block, owners)
        if reason is None:
            units[path] = block
        else:
            logger.info("%s is not sharded on its own: %s", path, reason)
    _drop_overlaps(units, owners)
    return _with_dtypes_apart(model, units, ignored)


def find_roots(model: nn.Module, ignored: set[nn.Parameter]) -> dict[str, nn.Module]:
    """The modules from which gathering starts, by path: each parameter is in one of them.

    That is the model. The step of a model that steps itself may call its children in any order,
    with several backwards: then each child that has parameters is a root, where each parameter is
    in one child.
    """
    roots: dict[str, nn.Module] = {}
    if not has_own_train_step(model) or not _collect_called(model, "", ignored, roots):
        return {"": model}
    found = [one for root in roots.values() for one in set(root.parameters())]
    return roots if found and len(found) == len(set(found)) else {"": model}


def _collect_called(
    module: nn.Module, path: str, ignored: set[nn.Parameter], roots: dict[str, nn.Module]
) -> bool:
    """Put what is called by itself into ``roots``; False where parameters are in none of it."""
    if any(one not in ignored for one in module.parameters(recurse=False)):
        return False
    for name, child in module.named_children():
        if all(one in ignored for one in child.parameters()):
            continue
        full = f"{path}.{name}" if path else name
        if type(child).forward is not nn.Module.forward:
            roots[full] = child
        elif not _collect_called(child, full, ignored, roots):
            return False
    return True


def full_precision_units(
    model: nn.Module, policy: MixedPrecisionPolicy
) -> dict[str, MixedPrecisionPolicy]:
    """The layers that keep their dtype under mixed precision, with the policy for each.

    These are the BatchNorm layers: their statistics are sums over many values.
    """
    found = {}
    for path, layer in model.named_modules():
        if path and isinstance(layer, _BatchNorm) and policy.param_dtype is not None:
            tensors = [*layer.parameters(), *layer.buffers()]
            dtypes = {one.dtype for one in tensors if one.is_floating_point()}
            if len(dtypes) == 1 and dtypes != {policy.param_dtype}:
                (dtype,) = dtypes
                found[path] = replace(policy, param_dtype=dtype, output_dtype=policy.param_dtype)
    return found


def find_ignored(model: nn.Module, named: Iterable[object]) -> set[nn.Parameter]:
    """The parameters that are named: by themselves, by modules, or by names and patterns."""
    found: set[nn.Parameter] = set()
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for one in named:
        if isinstance(one, nn.Parameter):
            found.add(one)
        elif isinstance(one, nn.Module):
            found.update(one.parameters())
        elif isinstance(one, str) and one in modules:
            found.update(modules[one].parameters())
        else:
            fitting = [p for name, p in parameters.items() if fnmatchcase(name, str(one))]
            if not fitting:
                hint = did_you_mean(str(one), [*parameters, *filter(None, modules)])
                raise ValueError(f"no parameter or module of the model is called {one!r}{hint}")
            found.update(fitting)
    trained = [name for name, p in parameters.items() if p in found and p.requires_grad]
    if trained:
        logger.warning(
            "%s: ignored parameters that are trained; each rank updates its own copy by the "
            "gradient of its own batches",
            ", ".join(trained),
        )
    return found


def check_shapes(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Raise ValueError for parameters that cannot be sharded."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 and parameter not in ignored:
            raise ValueError(
                f"{name} is a parameter without dimensions, which cannot be sharded: give it the "
                "shape (1,)"
            )


def _by_policy(model: nn.Module, policy: WrapPolicy) -> dict[str, nn.Module]:
    """Blocks by a function of torch's wrapping policies, asked from the leaves upwards."""
    chosen: set[int] = set()

    def visit(module: nn.Module) -> int:
        """Ask for everything in ``module``; the number of parameters that were taken."""
        count = sum(one.numel() for one in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=count):
            return 0
        taken = 0
        for child in module.children():
            if id(child) in chosen:
                continue
            inside = visit(child)
            own = sum(one.numel() for one in child.parameters())
            if policy(module=child, recurse=False, nonwrapped_numel=own - inside):
                chosen.add(id(child))
                inside = own
            taken += inside
        return taken

    visit(model)
    return {
        path: module
        for path, module in model.named_modules()
        if id(module) in chosen and type(module).forward is not nn.Module.forward
    }


def _owners(model: nn.Module) -> dict[int, set[int]]:
    """For every parameter (by id) the modules that have it as their own."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    return owners


def _why_not_alone(
    model: nn.Module, path: str, block: nn.Module, owners: dict[int, set[int]]
) -> str | None:
    parent = model.get_submodule(path.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        return "the attention around it uses its parameters without calling it"
    inside = {id(one) for one in block.modules()}
    if next(block.parameters(), None) is None:
        return "it has no parameters"
    for name, parameter in block.named_parameters():
        if not owners[id(parameter)] <= inside:
            return f"its {name} belongs to other modules too"
    return None


def _drop_overlaps(units: dict[str, nn.Module], owners: dict[int, set[int]]) -> None:
    """Drop units that share a module, unless one holds the other."""
    sets = {path: {id(one) for one in unit.modules()} for path, unit in units.items()}
    with_parameters = set().union(*owners.values()) if owners else set()
    for path, inside in sets.items():
        for other, others in sets.items():
            common = inside & others & with_parameters
            if common and not inside <= others and not others <= inside:
                units.pop(path, None)
                units.pop(other, None)
                logger.info("%s and %s share a module and are not sharded alone", path, other)


def _with_dtypes_apart(
    model: nn.Module, units: dict[str, nn.Module], ignored: set[nn.Parameter]
) -> dict[str, nn.Module]:
    """Make a unit of each module whose dtype is not that of the unit around it.

    The parameters of one unit are gathered and their gradients reduced together, in one dtype.
    """
    more: dict[str, nn.Module] = {}
    paths = {id(module): path for path, module in model.named_modules()}
    for root in [model, *units.values()]:
        own = list(_own_modules(root, {id(one) for one in units.values()}))
        count: Counter[torch.dtype] = Counter()
        for module in own:
            for one in _trained(module, ignored):
                count[one.dtype] += one.numel()
        if len(count) < 2:
            continue
        usual = count.most_common(1)[0][0]
        for module in own:
            dtypes = {one.dtype for one in _trained(module, ignored)}
            if dtypes <= {usual}:
                continue
            if len(dtypes) > 1 or module is root:
                raise ValueError(
                    f"{paths[id(module)] or 'the model'} ({type(module).__name__}) has trained "
                    f"parameters of its own that cannot be sharded with those of {usual} around "
                    f"them: {', '.join(sorted(map(str, dtypes)))}; put them into a module of "
                    "their own, or use one dtype"
                )
            more[paths[id(module)]] = module
    wanted = {**units, **more}
    return {path: one for path, one in model.named_modules() if path in wanted}


def _own_modules(root: nn.Module, units: set[int]) -> Iterable[nn.Module]:
    """``root`` and what is in it, without the units inside."""
    yield root
    for child in root.children():
        if id(child) not in units:
            yield from _own_modules(child, units)


def _trained(module: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Parameter]:
    own = module.parameters(recurse=False)
    return [one for one in own if one.requires_grad and one not in ignored]


def in_backward_order(units: dict[str, nn.Module]) -> list[str]:
    """Paths in the order in which backward needs them: the last one that ended its forward first.

    That is, a unit before those inside it, and otherwise from the back to the front.
    """
    order: list[str] = []

    def visit(path: str) -> None:
        inside = [one for one in units if one.startswith(f"{path}.") or (not path and one)]
        direct = [one for one in inside if not any(_holds(other, one) for other in inside)]
        for one in reversed(direct):
            order.append(one)
            visit(one)

    visit("")
    return order


def _holds(outer: str, inner: str) -> bool:
    return inner.startswith(f"{outer}.")
