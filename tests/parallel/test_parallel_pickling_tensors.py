"""Tensors copied as bytes: all layouts, only the viewed part; aliases stay aliases."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_families import bases, families, numbers, touch, views
from torch import Tensor, nn

from stepwrap.parallel import dumps, loads
from stepwrap.transport import wire as _wire


def _send_bytes(value: Any) -> Any:
    return loads(dumps(value))


def _send_over_wire(value: Any) -> Any:
    return _wire.unpack(*_wire.pack(value, copy_tensor=True))


BOTH = pytest.mark.parametrize("sent", [_send_bytes, _send_over_wire])
Sent = Callable[[Any], Any]


class Tagged(torch.Tensor):
    tag: str


def _same(actual: Tensor, other: Tensor) -> bool:
    return (
        (
            type(actual),
            actual.dtype,
            actual.shape,
            actual.device,
            actual.layout,
            actual.requires_grad,
        )
        == (type(other), other.dtype, other.shape, other.device, other.layout, other.requires_grad)
    ) and torch.equal(numbers(actual), numbers(other))


@BOTH
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_views_of_shared_storages_arrive_as_such(sent: Sent, data: st.DataObject) -> None:
    family = data.draw(families())
    arrived = sent({"family": family, "again": family[::-1]})
    pairs = zip(arrived["family"], arrived["again"][::-1])  # noqa: B905
    assert all(view is other for view, other in pairs)
    before = [numbers(tensor).clone() for tensor in family]
    for view, other in zip(family, arrived["family"], strict=True):
        assert _same(view, other)
        assert (view.is_conj(), view.is_neg()) == (other.is_conj(), other.is_neg())
    for number in range(len(family)):
        touch(arrived["family"][number], number)
    # The sender's tensors are unchanged.
    assert all(torch.equal(numbers(view), was) for view, was in zip(family, before, strict=True))
    for number in range(len(family)):
        touch(family[number], number)
    # The same tensors overlap: equal writes had equal effects.
    for view, other in zip(family, arrived["family"], strict=True):
        assert torch.equal(numbers(view), numbers(other))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_single_view_costs_its_own_bytes(data: st.DataObject) -> None:
    tensor = data.draw(views(data.draw(bases())))
    empty = len(dumps(tensor[..., :0] if tensor.dim() else tensor.new_empty(0)))
    assert len(dumps(tensor)) <= empty + tensor.numel() * tensor.itemsize + 200
    steps = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    is_dense = tensor.is_contiguous() or tensor.transpose(0, -1).is_contiguous()
    if is_dense and steps:
        assert loads(dumps(tensor)).stride() == tensor.stride()


def test_one_element_of_a_large_tensor_is_small() -> None:
    large = torch.zeros(1000, 1000)
    assert len(dumps(large[500, 500])) < 1000
    assert len(dumps([large[0], large[-1]])) < 10_000
    assert len(dumps(large[:, 3])) < 5_000
    assert len(dumps(large[:, :1].expand(1000, 1000))) < 5_000


def test_large_tensor_is_written_once() -> None:
    large = torch.zeros(100, 1000)
    assert len(dumps([large, large.t(), large[3:], large.view(torch.int32)])) < 401_000


@BOTH
def test_views_of_other_dtypes(sent: Sent) -> None:
    longs = torch.arange(8)
    octets, tail = sent([longs.view(torch.uint8)[13:], longs[2:]])
    assert torch.equal(octets, longs.view(torch.uint8)[13:])
    assert torch.equal(tail, longs[2:])
    tail[0] = -1
    assert octets[3:11].eq(255).all()


@BOTH
def test_strides_are_kept(sent: Sent) -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    arrived = sent(images)
    assert arrived.stride() == images.stride()
    assert arrived.is_contiguous(memory_format=torch.channels_last)
    # The windows overlap.
    windows = torch.arange(10.0).unfold(0, 4, 2)
    arrived = sent(windows)
    assert arrived.stride() == windows.stride()
    arrived[0, 2] = -1
    assert arrived[1, 0] == -1


@BOTH
@pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecated)")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_sparse(sent: Sent, layout: str, requires_grad: bool) -> None:
    dense = torch.eye(4) * torch.arange(4)
    size = ((2, 2),) if layout.startswith("b") else ()
    make = dense.to_sparse if layout == "coo" else getattr(dense, f"to_sparse_{layout}")
    tensor = make(*size).requires_grad_(requires_grad)
    arrived = sent(tensor)
    assert (arrived.layout, arrived.requires_grad) == (tensor.layout, requires_grad)
    assert torch.equal(arrived.detach().to_dense(), dense)


def test_sparse_tensors_are_not_kept_after_loading() -> None:
    # torch's own rebuild function adds each to a list that only torch.load clears.
    arrived = weakref.ref(_send_bytes(torch.eye(3).to_sparse()))
    assert arrived() is None


def test_uncoalesced_stays_so() -> None:
    tensor = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True)
    arrived = _send_bytes(tensor)
    assert not arrived.is_coalesced()
    assert torch.equal(arrived._values(), tensor._values())


@BOTH
@pytest.mark.filterwarnings("ignore:.*(deprecated)")
def test_quantised(sent: Sent) -> None:
    numbers_of = torch.arange(8.0).view(2, 4)
    quantised = torch.quantize_per_tensor(numbers_of, 0.5, 3, torch.qint8)
    other = torch.quantize_per_channel(
        numbers_of, torch.tensor([0.5, 0.25]), torch.zeros(2), 0, torch.quint8
    )
    for tensor in (quantised, other):
        arrived = sent(tensor)
        assert arrived.qscheme() == tensor.qscheme()
        assert torch.equal(arrived.dequantize(), tensor.dequantize())


@BOTH
@pytest.mark.filterwarnings("ignore:.*prototype")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested(sent: Sent, layout: torch.layout) -> None:
    rows = [torch.arange(2.0), torch.arange(3.0)]
    arrived = sent(torch.nested.nested_tensor(rows, layout=layout))
    assert all(map(torch.equal, arrived.unbind(), rows))


@BOTH
def test_parameters_and_leaves(sent: Sent) -> None:
    frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
    leaf = torch.arange(3.0, requires_grad=True)
    for tensor in (nn.Parameter(torch.arange(3.0)), frozen, leaf, nn.Buffer(torch.ones(2))):
        arrived = sent(tensor)
        assert _same(tensor, arrived)
        assert arrived.is_leaf
    computed = sent(leaf * 2)
    assert computed.is_leaf
    assert computed.requires_grad
    (computed.sum() * 3).backward()
    assert torch.equal(computed.grad, torch.full((3,), 3.0))


@BOTH
def test_subclasses_and_attributes(sent: Sent) -> None:
    tagged = torch.arange(3.0).as_subclass(Tagged)
    tagged.tag = "rare"
    marked: Any = torch.arange(3.0)
    marked.tag = "rare"
    for tensor in (tagged, marked):
        arrived = sent(tensor)
        assert type(arrived) is type(tensor)
        assert arrived.tag == "rare"
        assert torch.equal(arrived.as_subclass(Tensor), torch.arange(3.0))


@BOTH
def test_meta_and_empty(sent: Sent) -> None:
    for tensor in (
        torch.empty(3, 4, device="meta").t(),
        torch.empty(2, 0, 3),
        torch.arange(8)[8:],
        torch.tensor(4),
        torch.empty(0, dtype=torch.bfloat16, requires_grad=True),
    ):
        arrived = sent(tensor)
        assert (arrived.shape, arrived.dtype, arrived.device) == (
            tensor.shape,
            tensor.dtype,
            tensor.device,
        )
        assert arrived.stride() == tensor.stride()


@BOTH
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_and_the_tensors_on_them(sent: Sent) -> None:
    tensor = torch.arange(6.0)
    storage, arrived, legacy = sent([tensor.untyped_storage(), tensor[2:], torch.FloatStorage([3])])
    assert arrived.untyped_storage().data_ptr() == storage.data_ptr()
    assert torch.equal(arrived, tensor[2:])
    assert list(legacy) == [3.0]


@BOTH
def test_tied_weights(sent: Sent) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    arrived = sent(model)
    assert arrived[1].weight is arrived[0].weight
    inputs = torch.randn(2, 3)
    assert torch.equal(arrived(inputs), model(inputs))


@BOTH
def test_received_tensors_can_be_used(sent: Sent) -> None:
    arrived = sent([torch.zeros(5), torch.zeros(100_000)])
    for tensor in arrived:
        tensor.add_(1)
        assert tensor.sum() == tensor.numel()
        assert torch.equal(sent(tensor), tensor)
        tensor.share_memory_()


@BOTH
def test_default_device_of_the_receiver_does_not_matter(sent: Sent) -> None:
    with torch.device("meta"):
        arrived = sent([torch.zeros(3, device="cpu"), torch.zeros(50_000, device="cpu")])
    assert all(tensor.device.type == "cpu" for tensor in arrived)
    assert arrived[1].sum() == 0


def test_no_warning_for_ordinary_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _send_over_wire(_send_bytes([torch.zeros(3), nn.Linear(2, 2), torch.zeros(0)]))
