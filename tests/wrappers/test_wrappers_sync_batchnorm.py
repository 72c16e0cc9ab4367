"""Synchronised batch normalisation over the replicas of one process."""

import copy
import io
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from batchnorm_cases import (
    BOUNDS,
    CHANNELS,
    PLAIN,
    SHAPES,
    SYNCHRONISED,
    Case,
    case,
    largest_error,
    reference,
    set_parameters,
    splits,
    train,
)
from marks import slow
from on_ranks import assert_near
from torch import Tensor, nn

from stepwrap.wrappers import (
    ReplicationCallbackDataParallel,
    ReplicationError,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    exec_data_parallel_replication_callback,
    set_sbn_eps_mode,
)

F32, F64 = torch.float32, torch.float64


class _Sizes:
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __call__(self, inputs: Any, kwargs: Any, devices: Any, dim: int) -> Any:
        chunks = inputs[0].split(self.sizes, dim)
        return [(chunk.to(device),) for chunk, device in zip(chunks, devices, strict=True)], [
            {} for _ in chunks
        ]


def _parallel(layer: nn.Module, sizes: list[int], device: str = "cpu") -> nn.Module:
    return ReplicationCallbackDataParallel(
        layer, [device] * len(sizes), scatter=_Sizes(sizes), timeout_s=20
    )


def _layer(kind: str, dtype: torch.dtype = F32, **options: Any) -> Any:
    return set_parameters(SYNCHRONISED[kind](CHANNELS, **options)).to(dtype)


def _plain(kind: str) -> Any:
    return set_parameters(PLAIN[kind](CHANNELS).double())


def _halves(kind: str) -> list[int]:
    return splits(SHAPES[kind][0], 2)["uneven"]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("replicas", [2, *slow(1, 4)])
@pytest.mark.parametrize("kind", SHAPES)
def test_equals_the_full_batch(kind: str, replicas: int, dtype: torch.dtype) -> None:
    bn_case = case(kind, dtype)
    expected = reference(bn_case)
    for sizes in splits(SHAPES[kind][0], replicas).values():
        layer = _layer(kind, dtype)
        assert (
            largest_error(train(layer, _parallel(layer, sizes), bn_case), expected) <= BOUNDS[dtype]
        )
        assert layer.num_batches_tracked == len(bn_case.inputs)


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"momentum": None},
        {"momentum": 0.0},
        {"track_running_stats": False},
        {"eps": 0.5},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    bn_case = case("2d", F64)
    layer = _layer("2d", F64, **options)
    got = train(layer, _parallel(layer, _halves("2d")), bn_case)
    assert largest_error(got, reference(bn_case, **options)) <= 1e-12
    plain = PLAIN["2d"](CHANNELS, **options).double()
    plain.load_state_dict(layer.state_dict())
    x = bn_case.inputs[0]
    assert torch.equal(layer.eval()(x), plain.eval()(x))


def _clamped(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    var, mean = torch.var_mean(x, dim=0, correction=0)
    return (x - mean) / var.clamp(min=eps).sqrt() * weight + bias


@pytest.mark.parametrize("by_function", [False, True])
def test_clamp_mode(by_function: bool) -> None:
    """Some variances are below eps, some above."""
    x = case("1d", F64).inputs[0] * torch.linspace(0.01, 2, CHANNELS, dtype=F64)
    cotangent = case("1d", F64).cotangents[0]
    layer = _layer("1d", F64, eps=0.3, eps_mode=None if by_function else "clamp")
    weight, bias = (param.detach().clone().requires_grad_() for param in layer.parameters())
    expected = torch.autograd.grad(
        _clamped(x.requires_grad_(), weight, bias, 0.3), (x, weight, bias), cotangent
    )
    if by_function:
        set_sbn_eps_mode("clamp")
    try:
        y = _parallel(layer, [5, 11])(x)
    finally:
        set_sbn_eps_mode("plus")
    got = torch.autograd.grad(y, (x, *layer.parameters()), cotangent)
    assert torch.allclose(y, _clamped(x, weight, bias, 0.3), atol=1e-12)
    assert_near(got, expected, 1e-12)


def test_unknown_modes() -> None:
    with pytest.raises(AssertionError, match="'clamp' or 'plus', got 'minus'"):
        set_sbn_eps_mode("minus")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eps_mode must be"):
        SynchronizedBatchNorm2d(3, eps_mode="minus")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision .*'fp32' .*'fp64', got 'fp16'"):
        SynchronizedBatchNorm2d(3, precision="fp16")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SHAPES)
def test_far_from_zero(kind: str) -> None:
    bn_case = case(kind, F32, mean=1e4)
    expected = reference(bn_case)
    layer = _layer(kind)
    error = largest_error(train(layer, _parallel(layer, _halves(kind)), bn_case), expected)
    plain = set_parameters(PLAIN[kind](CHANNELS))
    assert error <= 1e-6 < largest_error(train(plain, plain, bn_case), expected)


@pytest.mark.parametrize("mean", [1.0, 2.0, 1e3])
@pytest.mark.parametrize("kind", SHAPES)
def test_precision(kind: str, mean: float) -> None:
    bn_case = case(kind, F32, mean=mean)
    expected = reference(bn_case)
    got = {}
    for options in ({}, {"precision": "fp32"}, {"precision": "fp64"}):
        layer = _layer(kind, **options)
        got[str(options)] = train(layer, _parallel(layer, _halves(kind)), bn_case)
    default, fp32, fp64 = got.values()
    assert largest_error(fp64, expected) <= 2e-7
    assert largest_error(fp32, expected) <= 1e-6
    assert torch.equal(default["dx"], fp32["dx"])
    assert not torch.equal(fp64["dx"], fp32["dx"])


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_precision_of_large_inputs(precision: Any) -> None:
    """Inputs that are processed in several parts per copy."""
    torch.manual_seed(0)
    x = torch.randn(8, 3, 200, 300) * torch.tensor([0.5, 1, 2])[:, None, None] + 1e3
    layer = SynchronizedBatchNorm2d(3, precision=precision)
    plain = nn.BatchNorm2d(3).double()
    results, cotangent = [], torch.randn_like(x)
    for module, call, inputs in ((layer, _parallel(layer, [5, 3]), x), (plain, plain, x.double())):
        inputs.requires_grad_()
        y = call(inputs)
        y.backward(cotangent.to(y.dtype))
        results.append([y, inputs.grad, module.weight.grad, module.running_var])
    for got, expected in zip(*results, strict=True):
        assert (got.double() - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(1)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_halves(dtype: torch.dtype, bound: float) -> None:
    bn_case = case("2d", dtype, mean=300.0 if dtype is torch.float16 else 0.0)
    layer = _layer("2d")
    got = train(layer, _parallel(layer, _halves("2d")), bn_case)
    expected = reference(bn_case)
    assert largest_error(got, expected) <= bound
    assert layer.running_var.dtype is layer.weight.grad.dtype is F32
    assert (got["running_var"] - expected["running_var"]).abs().max() <= 1e-5
    assert (got["running_mean"] - expected["running_mean"]).abs().max() <= 1e-4


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_halves_are_rounded_once(mean: float) -> None:
    """The only error of outputs and input gradients is the final rounding to bfloat16's 8 bits."""
    bn_case, layer = case("2d", torch.bfloat16, mean=mean), _layer("2d")
    got, expected = train(layer, _parallel(layer, _halves("2d")), bn_case), reference(bn_case)
    for name in ("y", "dx"):
        torch.testing.assert_close(got[name], expected[name], rtol=1.001 * 2**-8, atol=1e-5)


def test_autocast() -> None:
    bn_case = case("2d", F32)
    model = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), _layer("2d"))
    parallel = _parallel(model, _halves("2d"))
    with torch.autocast("cpu", torch.bfloat16):
        y = parallel(bn_case.inputs[0])
        x = model[0](bn_case.inputs[0])
    assert x.dtype is y.dtype is torch.bfloat16
    y.backward(bn_case.cotangents[0].bfloat16())
    mean, var = x.double().mean((0, 2, 3)), x.double().var((0, 2, 3))
    assert torch.allclose(model[1].running_mean.double(), 0.1 * mean, atol=1e-6)
    assert torch.allclose(model[1].running_var.double(), 0.9 + 0.1 * var, atol=1e-6)
    assert all(param.grad.dtype is F32 for param in model.parameters())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", ["2d", "3d"])
def test_memory_formats(kind: str, dtype: torch.dtype) -> None:
    bound = BOUNDS[dtype]
    bn_case = case(kind, dtype)
    expected = reference(bn_case)
    layout = torch.channels_last if kind == "2d" else torch.channels_last_3d
    channels_last = Case(
        kind, [tensor.to(memory_format=layout) for tensor in bn_case.inputs], bn_case.cotangents
    )
    layer = _layer(kind, dtype)
    assert (
        largest_error(train(layer, _parallel(layer, _halves(kind)), channels_last), expected)
        <= bound
    )
    y = _parallel(_layer(kind, dtype), [8])(channels_last.inputs[0])
    assert y.is_contiguous(memory_format=layout)
    strided = [tensor.transpose(0, -1).contiguous().transpose(0, -1) for tensor in bn_case.inputs]
    layer = _layer(kind, dtype)
    call = _parallel(layer, _halves(kind))
    assert (
        largest_error(train(layer, call, Case(kind, strided, bn_case.cotangents)), expected)
        <= bound
    )


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
def test_gradcheck(eps_mode: Any) -> None:
    layer = SynchronizedBatchNorm1d(2, eps=0.7, eps_mode=eps_mode, dtype=F64)
    parallel = _parallel(layer, [2, 3])
    x = torch.randn(5, 2, 2, dtype=F64, requires_grad=True)

    # The parameters are read from the layer, because gradcheck changes them in place.
    def call(x: Tensor, *_: Tensor) -> Tensor:
        return parallel(x * torch.tensor([[0.5], [2.0]]))

    assert torch.autograd.gradcheck(call, (x, layer.weight, layer.bias))


@pytest.mark.parametrize("training", [False, True])
def test_one_process_gives_the_bits_of_torch(training: bool) -> None:
    bn_case = case("2d", F32)
    layer, plain = _layer("2d").train(training), set_parameters(nn.BatchNorm2d(CHANNELS))
    got, expected = train(layer, layer, bn_case), train(plain.train(training), plain, bn_case)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    if not training:
        y = _parallel(layer, [3, 5])(bn_case.inputs[0])
        assert torch.equal(y, plain(bn_case.inputs[0]))


def test_order_of_the_chunks() -> None:
    bn_case = case("2d", F64)
    back = (
        [tensor.flip(0) for tensor in bn_case.inputs],
        [tensor.flip(0) for tensor in bn_case.cotangents],
    )
    expected = reference(bn_case)
    layer = _layer("2d", F64)
    got = train(layer, _parallel(layer, [6, 2]), Case("2d", *back))
    got["y"], got["dx"] = got["y"].flip(1), got["dx"].flip(1)
    assert largest_error(got, expected) <= 1e-12


def test_changing_number_of_chunks() -> None:
    layer = _layer("2d", F64)
    parallel = ReplicationCallbackDataParallel(layer, ["cpu"] * 3)
    plain = _plain("2d")
    x = case("2d", F64).inputs[0]
    for size in (8, 1, 2, 4, 1, 3):
        assert_near(parallel(x[:size]), plain(x[:size]), 1e-12)
    assert_near(layer.running_var, plain.running_var, 1e-12)


def test_shared_layer_and_buffers_in_place() -> None:
    """A layer that is called twice synchronises twice; its buffers change in place."""
    norm = _layer("1d", F64)
    plain = _plain("1d")
    model = nn.Sequential(norm, nn.ReLU(), norm)
    running_mean = norm.running_mean
    x = case("1d", F64).inputs[0]
    parallel, expected = _parallel(model, [5, 11])(x), plain(plain(x).relu())
    assert_near(parallel, expected, 1e-12)
    assert running_mean is norm.running_mean
    assert_near(running_mean, plain.running_mean, 1e-12)
    assert norm.num_batches_tracked == 2


def test_copies_that_share_their_buffers() -> None:
    """With copies made by other code the shared statistics are updated once."""
    copies = [_layer("1d", F64) for _ in range(3)]
    for copied in copies[1:]:
        copied._buffers.update(copies[0]._buffers)
    exec_data_parallel_replication_callback(copies)
    x = case("1d", F64).inputs[0]
    with ThreadPoolExecutor(len(copies)) as pool:
        outputs = list(
            pool.map(lambda layer_copy, chunk: layer_copy(chunk), copies, x.split([3, 4, 9]))
        )
    plain = _plain("1d")
    assert_near(torch.cat(outputs), plain(x), 1e-12)
    for name, buffer in plain.named_buffers():
        assert_near(copies[0].get_buffer(name), buffer, 1e-12)


@pytest.mark.parametrize("unused", [0, 1])
def test_backward_of_one_chunk_alone(unused: int) -> None:
    """A chunk that the loss does not use still takes part in the statistics."""
    x = case("1d", F64).inputs[0].requires_grad_()
    layer, plain = _layer("1d", F64), _plain("1d")
    rows = slice(0, 5) if unused else slice(5, None)
    results = []
    for call, module in ((_parallel(layer, [5, 11]), layer), (plain, plain)):
        loss = call(x)[rows].square().sum()
        results.append(torch.autograd.grad(loss, (x, *module.parameters())))
    assert_near(*results, 1e-12)


def test_without_gradients() -> None:
    x = case("2d", F64).inputs[0]
    expected = _plain("2d")(x).detach()
    for context in (torch.no_grad(), torch.inference_mode()):
        layer = _layer("2d", F64)
        with context:
            y = _parallel(layer, [3, 5])(x)
        assert not y.requires_grad
        assert_near(y, expected, 1e-12)
        assert layer.num_batches_tracked == 1
    frozen = _layer("2d", F64).requires_grad_(False)
    assert not _parallel(frozen, [3, 5])(x).requires_grad


def test_one_value_per_channel() -> None:
    layer = _layer("1d")
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        _parallel(layer, [1, 0])(torch.randn(1, CHANNELS))
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("kind", "shape", "kind_of_error", "text"),
    [
        ("1d", (4, CHANNELS, 2, 2), ValueError, r"expected 2D or 3D input \(got 4D input\)"),
        ("2d", (4, CHANNELS, 2), ValueError, r"expected 4D input \(got 3D input\)"),
        ("3d", (4, CHANNELS), ValueError, r"expected 5D input \(got 2D input\)"),
        ("1d", (4, 5), AssertionError, "Channel size mismatch: .* 6 channels"),
    ],
)
def test_wrong_inputs(kind: str, shape: tuple[int, ...], kind_of_error: Any, text: str) -> None:
    with pytest.raises(kind_of_error, match=text):
        _parallel(_layer(kind), [2, 2])(torch.randn(shape))


class _Skipping(nn.Module):
    """A model that normalises only chunks that begin with a positive value."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] == 13:
            raise KeyError("broken chunk")
        return self.norm(x) if x[0, 0] > 0 else x


def test_replicas_that_skip_the_layer_or_fail() -> None:
    threads = threading.active_count()
    parallel = _parallel(_Skipping(_layer("1d")), [2, 2])
    x = torch.rand(4, CHANNELS) + 0.1
    skipping, failing = x.clone(), x.clone()
    skipping[2, 0], failing[2, 0] = -1, 13
    with pytest.raises(ReplicationError, match="copy 1 finished .*layer 'norm'"):
        parallel(skipping)
    with pytest.raises(KeyError, match="broken chunk"):
        parallel(failing)
    assert parallel(x).shape == x.shape
    assert threading.active_count() == threads


def test_copies_of_a_layer_in_use() -> None:
    """Copies made during and after a replication are independent."""
    layer, second = _layer("1d", F64), _layer("1d", F64)
    x = case("1d", F64).inputs[0]
    expected = _parallel(second, [8, 8])(x)
    exec_data_parallel_replication_callback([layer, second])
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    copies += [torch.load(file, weights_only=False), copy.deepcopy(second)]
    before = layer.running_mean.clone()
    for copied in copies:
        assert_near(_parallel(copied, [8, 8])(x), expected, 1e-12)
        assert_near(copied(x), expected, 1e-12)
    assert torch.equal(layer.running_mean, before)
    del second
    assert_near(layer(x), expected, 1e-12)


def test_no_second_derivative() -> None:
    x = torch.randn(4, CHANNELS, requires_grad=True)
    y = _parallel(_layer("1d"), [2, 2])(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_nothing_of_the_graph_is_kept() -> None:
    """The tensors of a step are freed with their last reference, without the garbage collector."""
    import gc
    import weakref

    parallel = _parallel(_layer("1d"), [2, 2])
    gc.disable()
    try:
        x = torch.randn(4, CHANNELS, requires_grad=True)
        y = parallel(x * 1)
        node = weakref.ref(y.grad_fn.next_functions[0][0])
        assert node() is not None
        y.sum().backward()
        del y
        assert node() is None
    finally:
        gc.enable()


_COMPILED = """
from concurrent.futures import ThreadPoolExecutor
import torch
from torch import nn
from stepwrap.wrappers import SynchronizedBatchNorm1d, exec_data_parallel_replication_callback

torch.manual_seed(0)
model = nn.Sequential(nn.Identity(), SynchronizedBatchNorm1d(3), nn.ReLU())
other = SynchronizedBatchNorm1d(3)
x = torch.randn(8, 3)
plain = nn.BatchNorm1d(3)
expected = plain(x)[:4].relu()
exec_data_parallel_replication_callback([model[1], other])
with ThreadPoolExecutor(1) as pool:
    second = pool.submit(other, x[4:])
    assert torch.allclose(model(x[:4]), expected, atol=1e-6)
    second.result()
try:
    torch.compile(model, backend="eager", fullgraph=True)(x[:4])
except RuntimeError as error:
    assert "cannot be part of a compiled graph" in str(error), error
else:
    raise AssertionError("no error")
torch.compiler.reset()
with ThreadPoolExecutor(1) as pool:
    second = pool.submit(other, x[4:])
    assert torch.allclose(torch.compile(model, backend="eager")(x[:4]), expected, atol=1e-6)
    second.result()
torch.compiler.reset()
plain.load_state_dict(model[1].state_dict())
whole = torch.compile(model.eval(), backend="eager", fullgraph=True)(x)
assert torch.allclose(whole, plain.eval()(x).relu(), atol=1e-6)
"""


@pytest.mark.slow
def test_compiled_models() -> None:
    """Compiled graphs exclude the layer in training and include it in evaluation.

    It runs in a separate process, because the compiler changes how a process ends.
    """
    done = subprocess.run(
        [sys.executable, "-c", _COMPILED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def _run_gpu(bn_case: Case) -> Case:
    inputs, cotangents = (
        [tensor.cuda() for tensor in x] for x in (bn_case.inputs, bn_case.cotangents)
    )
    return Case(bn_case.kind, inputs, cotangents)


def _results(layer: Any, bn_case: Case) -> dict[str, Tensor]:
    got = train(layer, ReplicationCallbackDataParallel(layer, [0, 0]), _run_gpu(bn_case))
    return {name: tensor.cpu() for name, tensor in got.items()}


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", SHAPES)
def test_two_replicas_on_one_device(kind: str, dtype: torch.dtype, bound: float) -> None:
    bn_case = case(kind, dtype)
    layer = set_parameters(SYNCHRONISED[kind](CHANNELS)).to("cuda", dtype)
    assert largest_error(_results(layer, bn_case), reference(bn_case)) <= bound
    assert layer.num_batches_tracked == len(bn_case.inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_halves_on_one_device(dtype: torch.dtype, bound: float) -> None:
    bn_case = case("2d", dtype)
    layer = set_parameters(SYNCHRONISED["2d"](CHANNELS)).cuda()
    assert largest_error(_results(layer, bn_case), reference(bn_case)) <= bound


@pytest.mark.gpu
def test_channels_last_and_autocast() -> None:
    bn_case = case("2d", torch.float32)
    x = bn_case.inputs[0].cuda().to(memory_format=torch.channels_last).requires_grad_()
    layer = SYNCHRONISED["2d"](CHANNELS).cuda()
    with torch.autocast("cuda", torch.float16):
        y = ReplicationCallbackDataParallel(layer, [0, 0])(x.half())
    assert y.dtype is torch.float16
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.sum().backward()
    assert layer.weight.grad.dtype is torch.float32


@pytest.mark.gpu
def test_one_process_on_a_gpu_gives_the_bits_of_torch() -> None:
    bn_case = _run_gpu(case("2d", torch.float32))
    layer = set_parameters(SYNCHRONISED["2d"](CHANNELS)).cuda()
    plain = set_parameters(nn.BatchNorm2d(CHANNELS)).cuda()
    got, expected = train(layer, layer, bn_case), train(plain, plain, bn_case)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.gpu
def test_refuses_graphs() -> None:
    layer = SYNCHRONISED["2d"](CHANNELS).cuda()
    x = torch.randn(4, CHANNELS, 2, 2, device="cuda")
    parallel = ReplicationCallbackDataParallel(layer, [0, 0])
    parallel(x)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            # Otherwise the graph would be empty, and torch would warn.
            torch.add(x, 1)
            parallel(x)

    with pytest.raises(RuntimeError, match="CUDA graph"):
        capture()
    torch.cuda.synchronize()
    assert parallel(x).shape == x.shape
