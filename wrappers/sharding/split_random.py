"""Random numbers for activations that are split over a tensor group.

The ranks of a tensor group have the same random state, so that dropout on whole activations draws
the same mask on each of them. On split activations the masks must be independent. There, each rank
draws from a separate stream, whose seed comes from the common state. So nothing in addition to
this state has to be saved, and checkpointed blocks draw the same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_leaves

# Seeds from 0 to this number.
_SEEDS = 2**62
_ATTENTION = functional.scaled_dot_product_attention
_DROPOUT = {
    *(_ATTENTION, functional.multi_head_attention_forward, functional.rrelu, torch.rrelu),
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout, functional.gumbel_softmax),
    *(torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_),
    *(torch.alpha_dropout, torch.alpha_dropout_, torch.native_dropout),
    *(torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
}
# Functions that draw one number for each element of their first argument.
_NOISE = {
    *(torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.poisson),
    *(torch.normal, torch.multinomial, Tensor.multinomial, Tensor.bernoulli, Tensor.bernoulli_),
    *(Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_, Tensor.cauchy_),
    *(Tensor.log_normal_, Tensor.geometric_),
}
_RANDOM = _DROPOUT | _NOISE
_BACKWARDS = {Tensor.backward, torch.autograd.grad}


class SplitActivation(Tensor):
    """A part of an activation, of which each rank of a tensor group holds another part.

    It behaves like the tensor that it is made from, except that random functions draw from a stream
    of this rank. Results of functions of it are split as well.

    Attributes:
        tensor_rank: the position of this process in the tensor group.
        tensor_size: the number of ranks in the tensor group.
    """

    tensor_rank: ClassVar[int]
    tensor_size: ClassVar[int]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            return _run_backward(func, args, kwargs)
        stream: Any = nullcontext()
        if func in _RANDOM and _draws_parts(func, args, kwargs):
            tensor = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            stream = rank_stream(cls.tensor_rank, cls.tensor_size, tensor.device)
        with stream, torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func not in get_default_nowrap_functions():
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                mark_split(tensor, cls)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


@cache
def split_kind(rank: int, size: int) -> type[SplitActivation]:
    """Return the class of the activations of which ``rank`` holds one of ``size`` parts."""
    position = {"tensor_rank": rank, "tensor_size": size}
    return type("SplitActivation", (SplitActivation,), position)


def mark_split(value: Any, kind: type[SplitActivation]) -> None:
    """Make a tensor an instance of ``kind``, in place; leave any other value unchanged."""
    # Not by `as_subclass`, whose result is a view: FSDP2 warns of views that a block returns.
    if type(value) is Tensor:
        value.__class__ = kind


def as_whole(value: Any) -> Any:
    """Return a split activation as an ordinary tensor; return any other value unchanged."""
    return value.as_subclass(Tensor) if isinstance(value, SplitActivation) else value


def _run_backward(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a backward in which checkpointed blocks draw the same numbers as in the forward.

    As methods of split activations, functions would run without ``__torch_function__``.
    """
    leaves = tree_leaves((args, kwargs))
    kinds = [(leaf, type(leaf)) for leaf in leaves if isinstance(leaf, SplitActivation)]
    try:
        for tensor, _ in kinds:
            tensor.__class__ = Tensor  # type: ignore[assignment]
        return func(*args, **kwargs)
    finally:
        for tensor, kind in kinds:
            tensor.__class__ = kind


def _draws_parts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a random function draws numbers that must differ between the ranks."""
    if func in _NOISE:
        # All ranks draw the same mask if it has one number for each sample (stochastic depth).
        shape = args[0].shape if args and isinstance(args[0], Tensor) else ()
        return not (len(shape) > 1 and shape.numel() == shape[0])
    rate = kwargs.get("p")
    if func is _ATTENTION:
        rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return rate != 0 and kwargs.get("training") is not False


@contextmanager
def rank_stream(rank: int, size: int, device: torch.device) -> Iterator[None]:
    """Draw the random numbers in this context from a stream of ``rank``.

    Every rank of the tensor group must enter it. The common state of the CPU changes by one draw,
    in the same way on all ranks; the state of ``device`` is restored.
    """
    if device.type == "meta":
        yield
        return
    seed = int(torch.randint(_SEEDS, (size,), device="cpu")[rank])
    generator = torch.default_generator
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        index = module.current_device() if device.index is None else device.index
        generator = module.default_generators[index]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


class DTensorStream:
    """A generator of random numbers for the DTensors of a process without CUDA.

    torch has none: without it, random functions draw the same numbers for all parts.
    """

    distribute_region_enabled = True

    @contextmanager
    def _distribute_region(self, spec: Any, generator: Any = None) -> Iterator[None]:
        mesh = spec.mesh
        index, size = 0, 1
        for at, placement in enumerate(spec.placements):
            if isinstance(placement, Shard):
                index = index * mesh.size(at) + mesh.get_local_rank(at)
                size *= mesh.size(at)
        if size == 1 or generator is not None:
            yield
            return
        with rank_stream(index, size, torch.device(mesh.device_type)):
            yield


def prepare_dtensors(mesh: DeviceMesh) -> None:
    """Let random functions draw different numbers for the parts of a DTensor.

    Raises:
        RuntimeError: this version of torch keeps the generator of DTensors elsewhere.
    """
    from torch.distributed.tensor import _random as dtensor_random

    if not hasattr(dtensor_random, "_rng_tracker"):
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.distributed.tensor._random._rng_tracker, "
            "without which dropout would draw the same mask for all parts of a DTensor: set "
            "local_output to true in all styles"
        )
    if dtensor_random._rng_tracker is not None:
        return
    tracker: Any = DTensorStream()
    if mesh.device_type != "cpu":
        # torch would create it at the first draw, and then copy rank 0's state to all ranks, also
        # to those that see other batches.
        tracker = dtensor_random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
    dtensor_random._rng_tracker = tracker


def dropout_layers(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules with a dropout rate above 0."""
    for path, module in model.named_modules():
        rates = [rate for name, rate in vars(module).items() if "dropout" in name]
        rates += [module.p] if isinstance(module, _DropoutNd) else []
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            yield path


def pass_whole_inputs(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that replaces split activations by ordinary tensors, and runs ``call``.

    An output with the shape of the split input is split as well.
    """

    @wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = (*args, *kwargs.values())
        split = next((x for x in tensors if isinstance(x, SplitActivation)), None)
        if split is None:
            return call(*args, **kwargs)
        named = {name: as_whole(value) for name, value in kwargs.items()}
        output = call(*map(as_whole, args), **named)
        if getattr(output, "shape", None) == split.shape:
            mark_split(output, type(split))
        return output

    return run
