"""Capture the forward of a model as a graph, with guards for the Python state that it reads."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from ...registry import is_users_file
from ..blocks import keeping_activations
from ..steps.preprocess import as_call, get_device
from ..steps.step import parse_losses

# Dynamo's settings: raise if a forward assigns attributes, and trace recurrent layers too.
_SETTINGS = {"side_effect_replay_policy": "error", "allow_rnn": True}
_READS_VALUE = (
    "its forward depends on the values of tensors (.item(), `if x.sum() > 0`): use torch.where, or "
    "remove compile: step"
)
_CONTROL_FLOW = ("cond", "while_loop", "map_impl", "scan", "associative_scan")
# Parts of Dynamo's messages, with an explanation for users.
_PLAIN = {
    "Data-dependent": _READS_VALUE,
    "Tensor.item": _READS_VALUE,
    "torch.Tensor data-dependent": _READS_VALUE,
    "Dynamic shape operator": "the shapes in its forward depend on the values of tensors",
}


class NotCompilableError(Exception):
    """Raised if a step cannot be compiled with the same results; the text gives the reason."""


class NotReadyError(NotCompilableError):
    """Raised if a step cannot be compiled yet, because it must run eagerly first."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; compilers add many more lines."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Captured(NamedTuple):
    """The losses of a model as a graph.

    Attributes:
        graph: takes the tensors that ``reads`` lists, and returns a list of tensors.
        reads: the source of each input: ("model", id of the tensor) or ("batch", path).
        total: index of the output that is the sum of the losses.
        logs: indices of the outputs to log, by name.
        constants: logged values that are not tensors.
        guards: returns whether the graph is valid for ``{"model": ..., "batch": ...}``.
        is_alive: returns False once Dynamo has dropped the graph with its guards.
        fetch: returns the parameters and buffers that a forward would read now. The guards do not
            check the identity of tensors.
    """

    graph: GraphModule
    reads: list[tuple[str, Any]]
    total: int
    logs: dict[str, int]
    constants: dict[str, Any]
    guards: Callable[[dict[str, Any]], bool]
    is_alive: Callable[[], bool]
    fetch: Callable[[dict[str, Any]], tuple[Any, ...]]


def step_losses(model: Any, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the sum of the losses and the logs of a preprocessed batch, like the usual step."""
    args, kwargs = as_call(batch)
    losses = model(*args, **kwargs, mode="loss")
    # The usual step sums the losses outside of autocast.
    with torch.autocast(get_device(model).type, enabled=False):
        return getattr(model, "parse_losses", parse_losses)(losses)


def capture(model: nn.Module, batch: Any) -> Captured:
    """Trace the forward symbolically, without computing or changing values or random states.

    Raises:
        NotCompilableError: the forward cannot be one graph, or has side effects.
    """
    if any(tensor.requires_grad for _, tensor in tensors_in(batch)):
        raise NotCompilableError(
            "tensors of the batch require gradients, which a compiled step does not compute"
        )

    def function(model: Any, batch: Any) -> Any:
        return step_losses(model, batch)

    # Dynamo caches graphs by code object, so each capture gets a new code object.
    function.__code__ = function.__code__.replace()
    try:
        with torch._dynamo.config.patch(_SETTINGS), keeping_activations():
            (graph, reads, marks), (total, logs) = _traced(function, model, batch)
        entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
        guards = entries[0].guard_manager
    except Exception as error:
        raise NotCompilableError(_explanation(error)) from error
    outputs = {id(mark): at for at, mark in enumerate(marks)}
    tensors = {name: value for name, value in logs.items() if isinstance(value, Tensor)}
    constants = {name: value for name, value in logs.items() if name not in tensors}
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(constants)):
        raise NotCompilableError("one of its logs is a list or dict of tensors")
    if not {id(total), *map(id, tensors.values())} <= {*outputs}:
        raise NotCompilableError("one of its losses or logs is itself a parameter or an input")

    def is_alive(_kept: Any = function) -> bool:
        # Dynamo drops a graph in torch.compiler.reset(), or when a guarded object is deleted.
        return guards.cache_entry is not None

    return Captured(
        graph,
        reads,
        outputs[id(total)],
        {name: outputs[id(tensor)] for name, tensor in tensors.items()},
        constants,
        guards.root.check,
        is_alive,
        _fetcher(graph, reads, function.__globals__),
    )


def _traced(
    function: Callable[..., Any], model: nn.Module, batch: Any
) -> tuple[tuple[GraphModule, list[tuple[str, Any]], list[Tensor]], Any]:
    """Trace a call; return (graph, sources of its inputs, markers of its outputs) and the result.

    The result contains the markers instead of tensors. They show which outputs of the graph are the
    sum of the losses and the logs.
    """
    traces: list[tuple[GraphModule, list[tuple[str, Any]], list[Tensor]]] = []
    errors: list[NotCompilableError] = []

    def backend(graph: GraphModule, inputs: list[Any]) -> Callable[..., list[Tensor]]:
        try:
            reads = list(_sources(graph, inputs, model, batch))
        except NotCompilableError as error:
            # Raised here, before the call can draw random numbers for inputs of the graph.
            errors.append(error)
            raise
        returned: Any = graph.graph.output_node().args[0]
        marks = [torch.empty(()) for _ in returned]
        traces.append((graph, reads, marks))
        return lambda *_: marks

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    try:
        result = compiled(model, batch)
    except Exception:
        if errors:
            raise errors[0] from None
        raise
    if len(traces) != 1:
        raise NotCompilableError("torch.compile is disabled for its forward, or finds no tensors")
    return traces[0], result


def _fetcher(
    graph: GraphModule, reads: list[tuple[str, Any]], variables: dict[str, Any]
) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Return a function that evaluates Dynamo's expressions for the parameters and buffers."""
    pairs = zip(graph.graph.find_nodes(op="placeholder"), reads, strict=True)
    expressions = [_expression(node) for node, (kind, _) in pairs if kind == "model"]
    code = f"lambda L: ({''.join(f'{expression}, ' for expression in expressions)})"
    fetch: Callable[[dict[str, Any]], tuple[Any, ...]] = eval(code, {**variables, "G": variables})
    return fetch


def _sources(
    graph: GraphModule, inputs: list[Any], model: nn.Module, batch: Any
) -> Iterator[tuple[str, Any]]:
    """Return the source of each input of the graph, for ``Captured.reads``."""
    sources: dict[int, tuple[str, Any]]
    sources = {id(tensor): ("batch", path) for path, tensor in tensors_in(batch)}
    sources |= {
        id(tensor): ("model", id(tensor)) for tensor in (*model.parameters(), *model.buffers())
    }
    if any(str(node.target) in _CONTROL_FLOW for node in graph.graph.nodes):
        raise NotCompilableError("its forward uses torch.cond or another operator of control flow")
    for node, graph_input in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if id(graph_input) in sources:
            yield sources[id(graph_input)]
        elif isinstance(graph_input, Tensor) and not str(node.target).startswith("random_value"):
            name = _users_name(_expression(node)).removeprefix("___from_numpy(").rstrip(")")
            raise NotCompilableError(
                f"its forward reads {name}, which is not a parameter, a buffer or a tensor of the "
                "batch: call register_buffer for it in its module, or give batches of tensors"
            )
        else:
            raise NotCompilableError("its forward draws random numbers outside of torch")


def _expression(node: Any) -> str:
    """Return Dynamo's expression that reads an input."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name) or str(node.target)


def _users_name(name: str) -> str:
    """Return a name as users write it: ``model.net`` for ``L['model']._modules['net']``."""
    name = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name)
    return re.sub(r"(?:\._modules|\._buffers|\._parameters)?\['(\w+)'\]", r".\1", name)


def tensors_in(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield the tensors in lists, tuples and dicts, each with its path."""
    if isinstance(data, Tensor):
        yield path, data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(data, (list, tuple)):
        for at, value in enumerate(data):
            yield from tensors_in(value, (*path, at))


def batch_reader(paths: list[tuple[Any, ...]]) -> Callable[[Any], list[Tensor]]:
    """Return a function that returns the tensors at these paths of a batch."""
    return lambda batch: [reduce(operator.getitem, path, batch) for path in paths]


def _explanation(error: Exception) -> str:
    """Return why the forward cannot be one graph, with the line of the user's code if known."""
    if isinstance(error, NotCompilableError):
        return str(error)
    text = str(error)
    if "certain side effects" in text:
        names = dict.fromkeys(map(_users_name, re.findall(r"\"(L\['.*?)\"[,\]]", text)))
        subject = (
            f"attributes of {', '.join(names)}" if names else "global variables or other objects"
        )
        return f"its forward changes {subject}; only buffers may change, and in place"
    for fragment, plain in _PLAIN.items():
        if fragment in text:
            return f"{plain}{_line(text)}"
    explained = re.search(r"Explanation: (.*)", text)
    reason = explained.group(1).strip() if explained else first_line(error)
    return f"its forward cannot be traced: {reason}{_line(text)}"


def _line(text: str) -> str:
    """Return the innermost line of the user's files in an error."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', text)
    users = [":".join(line) for line in lines if is_users_file(line[0])]
    return f" ({users[-1]})" if users else ""
