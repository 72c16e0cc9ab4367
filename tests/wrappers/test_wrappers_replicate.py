"""Copies of a module: gradients, buffers, and the callbacks of submodules."""

import copy
import ctypes
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

from stepwrap.wrappers import (
    CallbackContext,
    ReplicationCallbackDataParallel,
    exec_data_parallel_replication_callback,
    patch_replication_callback,
)

Calls = list[tuple[int, str, CallbackContext]]


class Called(nn.Module):
    def __init__(self, name: str, calls: Calls, *children: nn.Module) -> None:
        super().__init__()
        self.name, self.calls = name, calls
        self.inner = nn.ModuleList(children)

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self.calls.append((copy_id, self.name, ctx))

    def forward(self, inputs: Tensor) -> Tensor:
        for child in self.inner:
            inputs = child(inputs)
        return inputs


def nested(calls: Calls) -> Called:
    shared = Called("b", calls)
    return Called("a", calls, nn.Identity(), nn.Sequential(shared, nn.Identity()), shared)


def parallel(module: nn.Module, copies: int = 2, **options: Any) -> ReplicationCallbackDataParallel:
    return ReplicationCallbackDataParallel(module, ["cpu"] * copies, timeout_s=10, **options)


def test_order_of_the_callbacks() -> None:
    """All callbacks of copy 0 come first; a shared submodule is called once."""
    calls: Calls = []
    exec_data_parallel_replication_callback([nested(calls) for _ in range(3)])
    names = [(copy_id, name) for copy_id, name, _ in calls]
    assert names == [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_a_callback_of_one_instance() -> None:
    """A callback may be an attribute of an instance whose class has none."""
    calls: list[tuple[int, str]] = []
    model = nn.Sequential(nn.Tanh(), nn.Tanh())
    model[1].__data_parallel_replicate__ = lambda ctx, copy_id: calls.append((copy_id, ctx.layer))
    assert parallel(model)(torch.zeros(2, 3)).shape == (2, 3)
    assert calls == [(0, "1"), (1, "1")]


def test_contexts() -> None:
    """There is one context per position and replication, shared by all copies."""
    calls: Calls = []
    model = parallel(nested(calls), 3)
    model(torch.zeros(3, 2))
    contexts = [ctx for _, _, ctx in calls]
    assert contexts[0] is contexts[2] is contexts[4]
    assert contexts[1] is contexts[3] is contexts[5]
    assert contexts[0] is not contexts[1]
    assert [ctx.layer for ctx in contexts[:2]] == ["", "inner.1.0"]
    assert contexts[0].num_copies == 3
    assert contexts[0].session is contexts[1].session
    calls.clear()
    model(torch.zeros(2, 2))
    assert len(calls) == 4
    assert calls[0][2].num_copies == 2
    assert calls[0][2] is not contexts[0]
    assert calls[0][2].session is not contexts[0].session
    with pytest.raises(AttributeError, match=r"layer 'inner\.1\.0' .*no attribute 'total'"):
        _ = contexts[1].total


def test_copies_that_differ_are_refused() -> None:
    """No callback is called if the copies differ."""
    calls: Calls = []
    with pytest.raises(ValueError, match=r"copy 1 .*position 1 \(layer '0'\) .*ReLU, .*Tanh"):
        exec_data_parallel_replication_callback(
            [nn.Sequential(nn.Tanh(), Called("a", calls)), nn.Sequential(nn.ReLU(), nn.Tanh())]
        )
    for count in (1, 3):
        wrong = nn.Sequential(*[nn.Tanh() for _ in range(count)])
        with pytest.raises(ValueError, match=r"copy 1 .* \d submodules, the master 3"):
            exec_data_parallel_replication_callback([nn.Sequential(nn.Tanh(), nn.Tanh()), wrong])
    with pytest.raises(IndexError, match="no copies"):
        exec_data_parallel_replication_callback([])
    assert not calls


def test_an_error_in_a_callback() -> None:
    class Failing(nn.Module):
        def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
            if copy_id == 1:
                raise LookupError("my own mistake")

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs

    model = parallel(nn.Sequential(Failing()))
    with pytest.raises(LookupError, match="my own mistake") as caught:
        model(torch.zeros(2))
    notes = "\n".join(caught.value.__notes__)
    assert "Failing.__data_parallel_replicate__ of copy 1 of 2, layer '0'" in notes
    assert model(torch.zeros(1)).shape == (1,)


class Tied(nn.Module):
    """A module with shared, listed and frozen parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.again = self.first
        self.missing: nn.Module | None = None
        self.register_parameter("none", None)
        self.scales = nn.ParameterList([torch.full((6,), 0.5 + index) for index in range(2)])
        self.biases = nn.ParameterDict({"a": torch.ones(6), "b": torch.zeros(6)})
        self.layers = nn.ModuleDict({"x": nn.ModuleList([nn.Linear(6, 6), self.second])})
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.__dict__["reference"] = self.frozen

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.again(torch.tanh(self.first(inputs))) + self.second(inputs)
        for scale, layer in zip(self.scales, self.layers["x"], strict=True):
            hidden = torch.tanh(layer(hidden) * scale + self.biases["a"])
        assert self.reference is self.frozen
        assert self.first.weight is self.second.weight
        # A penalty on the module's own parameters, which a copy also has.
        penalty = sum(parameter.sum() for parameter in self.parameters())
        return self.frozen(hidden) + self.biases["b"] + 0.01 * penalty


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 6, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.scaled = parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        # RNNs compute with a list of weights that is separate from their parameters.
        assert self.rnn._flat_weights[0] is self.rnn.weight_ih_l0
        hidden, _ = self.rnn(inputs.unsqueeze(1).expand(-1, 3, -1))
        return self.scaled(self.attention(hidden, hidden, hidden)[0][:, -1])


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        layers = [nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.PReLU(), nn.Flatten()]
        super().__init__(*layers, nn.Linear(8, 6))


@pytest.mark.parametrize("kind", [Tied, Recurrent, Convolutional])
@pytest.mark.parametrize(("size", "copies"), [(5, 3), (4, 2), (3, 1)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-7), (torch.float64, 1e-12)])
def test_gradients(
    kind: type[nn.Module], size: int, copies: int, dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    module = kind().to(dtype)
    inputs = torch.randn(size, 6, dtype=dtype, requires_grad=True)
    cotangent = torch.randn(size, 6, dtype=dtype)
    trained = [param for param in module.parameters() if param.requires_grad]
    reference = _grads(kind, module, inputs, cotangent)
    outputs = parallel(module, copies)(inputs)
    grads = torch.autograd.grad(outputs, [inputs, *trained], cotangent)
    for ours, exact in zip((outputs, *grads), reference, strict=True):
        scale = max(1.0, exact.abs().max().item())
        # An unwrapped module in fp32 also differs from fp64 by about 3e-7.
        allowed = bound if dtype is torch.float64 else bound + 3e-7
        assert (ours.double() - exact).abs().max() <= allowed * scale


def _grads(
    kind: type[nn.Module], module: nn.Module, inputs: Tensor, cotangent: Tensor
) -> list[Tensor]:
    """Return outputs and gradients of the unwrapped module in float64."""
    exact = kind().double()
    exact.load_state_dict(module.state_dict())
    again = inputs.detach().double().requires_grad_()
    trained = [param for param in exact.parameters() if param.requires_grad]
    outputs = exact(again)
    return [outputs, *torch.autograd.grad(outputs, [again, *trained], cotangent.double())]


def test_gradients_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    calls: Calls = []
    layer = nn.Linear(6, 3)
    model = parallel(nn.Sequential(layer, Called("a", calls)))
    inputs, cotangent = torch.randn(4, 6), torch.randn(4, 3)
    for _ in range(2):
        layer.zero_grad()
        outputs = model(inputs)
        outputs.backward(cotangent)
    assert [copy_id for copy_id, _, _ in calls] == [0, 1, 0, 1]
    expected = torch.autograd.grad(layer(inputs), [layer.weight, layer.bias], cotangent)
    assert torch.allclose(outputs, layer(inputs), rtol=0, atol=1e-7)
    for parameter, grad in zip(layer.parameters(), expected, strict=True):
        assert (parameter.grad - grad).abs().max() <= 1e-7 * max(1, grad.abs().max())


def test_copies_share_the_parameters() -> None:
    """The hooks of a parameter are called once, with the summed gradient."""
    gradients: list[Tensor] = []
    layer = nn.Linear(3, 2)
    layer.weight.register_hook(gradients.append)
    copies = parallel(layer).replicate(layer, ["cpu", "cpu"])
    assert [replica.weight is layer.weight for replica in copies] == [True, True]
    assert [list(replica.parameters()) == list(layer.parameters()) for replica in copies] == [
        True,
        True,
    ]
    del copies[1].weight
    copies[0].bias = None
    assert isinstance(layer.weight, nn.Parameter)
    assert isinstance(layer.bias, nn.Parameter)
    parallel(layer)(torch.ones(4, 3)).sum().backward()
    assert [gradient.tolist() for gradient in gradients] == [[[4.0] * 3] * 2]


def test_the_structure_may_change() -> None:
    """Between two forwards layers, buffers and references are added, removed and moved."""
    model = parallel(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    inputs = torch.randn(4, 3)

    def same() -> bool:
        return torch.allclose(model(inputs), model.module(inputs), rtol=0, atol=1e-6)

    assert same()
    model.module.append(nn.Linear(3, 2))
    assert same()
    model.module[1] = nn.BatchNorm1d(3).eval()
    model.module[0].weight = nn.Parameter(torch.zeros(3, 3))
    assert same()
    del model.module[2]
    model.module[1].register_buffer("running_mean", torch.ones(3))
    assert same()
    model.module[0] = model.module[1]
    assert same()


def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    index = torch.tensor([0, 1, 1, 4])
    cotangent = torch.randn(4, 3)
    parallel(table)(index).backward(cotangent)
    assert table.weight.grad.is_sparse
    expected = torch.zeros(5, 3).index_add(0, index, cotangent)
    assert torch.allclose(table.weight.grad.to_dense(), expected)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("missing", None)
        self.alias = nn.Module()
        self.alias.register_buffer("count", self.count)
        self.ran = 0

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.alias.count is self.count
        self.count += len(inputs)
        self.ran += 1
        return inputs + self.count


def test_buffers_of_copy_0_are_the_masters() -> None:
    module = Counting()
    count = module.count
    assert parallel(module)(torch.zeros(5)).tolist() == [3, 3, 3, 2, 2]
    assert module.count is count
    assert count.item() == 3
    assert module.ran == 0


def test_flags_hooks_and_grad_mode() -> None:
    modes: list[tuple[bool, bool]] = []

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        modes.append((module.training, output.requires_grad))

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).eval())
    for layer in module:
        layer.register_forward_hook(hook)
    model = parallel(module)
    assert model(torch.zeros(2, 2)).requires_grad
    assert sorted(modes) == [(False, True)] * 2 + [(True, True)] * 2
    modes.clear()
    with torch.no_grad():
        assert not model.eval()(torch.zeros(2, 2)).requires_grad
    assert modes == [(False, False)] * 4
    with torch.inference_mode():
        assert model(torch.zeros(2, 2)).is_inference()


@pytest.mark.parametrize("width", [2, 1300])
def test_hooks_on_saved_tensors(width: int) -> None:
    """Hooks on saved tensors see the tensors of all copies; a large copy 0 also gets a thread."""
    packed: list[tuple[int, ...]] = []
    names: list[str] = []
    layer = nn.Linear(width, width)
    layer.register_forward_hook(lambda *_: names.append(threading.current_thread().name))
    model = parallel(layer, 3)
    inputs = torch.randn(5, width)

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(inputs)
    assert sorted(packed) == [(1, width), (2, width), (2, width)]
    caller = "stepwrap copy 0" if width > 2 else threading.current_thread().name
    assert sorted(names) == sorted([caller, "stepwrap copy 1", "stepwrap copy 2"])
    outputs.sum().backward()
    assert torch.allclose(layer.weight.grad, inputs.sum(0).expand(width, -1), rtol=0, atol=1e-5)
    names.clear()
    with torch.no_grad():
        model(inputs)
    assert threading.current_thread().name in names
    names.clear()
    model(inputs[:1])
    assert names == [threading.current_thread().name]


def test_modes_of_the_caller_apply_to_a_small_copy_0() -> None:
    """torch keeps modes per thread, and new threads do not inherit them."""
    functions: list[Any] = []

    class Recording(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            functions.append(function)
            return function(*args, **(kwargs or {}))

    model = parallel(nn.Tanh())
    with Recording():
        model(torch.zeros(2, 2))
    assert functions.count(torch.tanh) == 1


def test_copies_take_as_many_threads_as_the_caller_has_set() -> None:
    # OpenMP keeps the number of threads per thread; tests begin with 1.
    library = Path(torch.__file__).parent / "lib/libgomp.so.1"
    if not library.exists():
        pytest.skip(f"this torch has no {library.name}")
    openmp = ctypes.CDLL(str(library))
    counts = []
    layer = nn.Linear(64, 64)
    layer.register_forward_pre_hook(lambda *_: counts.append(openmp.omp_get_max_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        parallel(layer)(torch.zeros(2, 64))
    finally:
        torch.set_num_threads(before)
    assert counts == [before + 1] * 2


def test_compiled_parts_are_refused() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(TypeError, match=r"0 \(Linear\) .*compiled, .*use ddp"):
        parallel(nn.Sequential(compiled))
    module = nn.Linear(2, 2)
    model = parallel(module)
    module.compile(backend="eager")
    with pytest.raises(TypeError, match=r"module \(Linear\) .*not be compiled"):
        model(torch.zeros(2, 2))


class Mine(DataParallel[nn.Module]):
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **kwargs) + 1

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return super().scatter(tuple(tensor * 2 for tensor in inputs), kwargs, device_ids)


class Own(Mine):
    """A DataParallel that replicates without torch's method."""

    def replicate(self, module: nn.Module, device_ids: Any) -> list[nn.Module]:
        return [copy.copy(module) for _ in device_ids]


class CallbackLog(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self.log.append(copy_id)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


@pytest.mark.parametrize(("kind", "expected"), [(DataParallel, 3), (Mine, 7), (Own, 7)])
def test_patching(kind: Any, expected: float) -> None:
    """The callback runs once per copy, also after deepcopy and pickle, and for one copy."""
    model = kind(CallbackLog())
    model.device_ids = []
    for _ in range(2):
        patch_replication_callback(model)
    assert isinstance(model, kind)
    assert isinstance(model, ReplicationCallbackDataParallel)
    for patched in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        patch_replication_callback(patched)
        patched.module.log.clear()
        assert patched(torch.full((3,), 3.0)).tolist() == [expected] * 3
        assert patched.module.log == [0]
        patched.device_ids = ["cpu"] * 2
        assert patched(torch.full((3,), 3.0)).tolist() == [expected] * 3
        assert patched.module.log == [0, 0, 1]
        assert type(patched) is type(model)


def test_patching_another_module_is_refused() -> None:
    with pytest.raises(AssertionError, match="expected a DataParallel, got Tanh"):
        patch_replication_callback(nn.Tanh())  # type: ignore[arg-type]
