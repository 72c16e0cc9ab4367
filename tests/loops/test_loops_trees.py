"""Files of checkpoints: values that they keep, and what other programs see."""

from __future__ import annotations

import enum
import math
import os
import sys
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st
from loop_parts import Value, make_state
from safetensors.torch import load_file, load_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from stepwrap.loops import (
    CheckpointError,
    LoopState,
    TextCollator,
    build_loader,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.loops.checkpoints import tensor_files
from stepwrap.loops.checkpoints.files import fingerprint
from stepwrap.loops.checkpoints.tensor_files import Reader, pack
from stepwrap.runner.pretrained.files import read_weights
from stepwrap.wrappers import SingleDevice


class Color(enum.Enum):
    RED = (1, 2)


class Mode(enum.IntFlag):
    A = 1
    B = 2


def round_trip(value: Any, folder: Path, *, by_parts: bool = False) -> Any:
    file = pack("state", {"value": value})
    assert file.write(folder) == fingerprint(folder / file.name)
    reader = Reader(folder, {file.name: fingerprint(folder / file.name)}, by_parts=by_parts)
    return reader.tree("state")["value"]


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values have the same types and, bit for bit, the same contents."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        return [*a] == [*b] and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(is_same, a, b))
    # NaN equals NaN, and 0.0 differs from -0.0.
    return repr(a) == repr(b) if isinstance(a, (float, complex)) else bool(a == b)


def _bytes(tensor: Tensor) -> bytes:
    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.float8_e5m2fnuz, torch.complex64, torch.complex128, torch.bool, torch.uint8),
    *(torch.int8, torch.int64, torch.uint16, torch.uint64),
]
SHAPES = st.lists(st.integers(0, 4), max_size=3)
NUMBERS = st.one_of(st.integers(), st.floats(), st.complex_numbers(), st.booleans(), st.none())
TIMES = st.one_of(st.datetimes(), st.dates(), st.times(), st.timedeltas())
KEYS = st.one_of(st.text(max_size=4), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
HASHABLE = st.one_of(st.integers(), st.text(max_size=3), st.tuples(st.integers(), st.none()))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        data = bytearray(byte % 2 for byte in data)
    flat = torch.frombuffer(data, dtype=dtype) if size else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


ARRAYS = numpy_st.arrays(
    st.one_of(
        numpy_st.scalar_dtypes(),
        numpy_st.unicode_string_dtypes(max_len=3),
        numpy_st.array_dtypes(max_size=2),
    ),
    numpy_st.array_shapes(min_dims=0, min_side=0, max_side=3),
)
LEAVES = st.one_of(NUMBERS, st.text(max_size=5), st.binary(max_size=5), TIMES, tensors(), ARRAYS)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 5])),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
        st.sets(HASHABLE, max_size=3),
        st.frozensets(HASHABLE, max_size=3),
        st.dictionaries(HASHABLE, st.integers(0, 9), max_size=3).map(Counter),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(tree=TREES)
def test_states_are_equal_after_a_round_trip(
    tree: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    loaded = round_trip(tree, folder)
    assert is_same(loaded, tree)


def test_further_values(tmp_path: Path) -> None:
    values = [
        *(Color.RED, Mode.A | Mode.B, Path("/a/b"), PurePosixPath("c"), torch.Size([2, 3])),
        *(torch.bfloat16, torch.device("cuda:1"), range(1, 9, 2), np.float32(0.1), np.str_("a")),
        *(datetime(2026, 1, 2, tzinfo=timezone.utc), date(2026, 1, 2), time(3), timedelta(1, 2, 3)),
        *(np.datetime64("2026-01-02"), np.longdouble(1) / 3),
        deque([1, 2, 3], maxlen=3),
    ]
    loaded = round_trip(values, tmp_path)
    assert [type(value) for value in loaded] == [type(value) for value in values]
    assert loaded == values
    assert loaded[-1].maxlen == 3


@pytest.mark.filterwarnings("ignore:.*deprecated|Sparse")
@pytest.mark.parametrize("by_parts", [False, True])
def test_layouts_of_tensors(by_parts: bool, tmp_path: Path) -> None:
    dense = torch.arange(24.0).reshape(2, 3, 2, 2)
    square = torch.eye(40)
    values = {
        "transposed": square[:3].t(),
        "channels last": dense.to(memory_format=torch.channels_last),
        "slice": torch.arange(9000.0)[3:5],
        "expanded": torch.ones(1).expand(3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "gradient": torch.ones(2, requires_grad=True),
        "sparse": square.to_sparse(),
        "rows": square.to_sparse_csr(),
        "columns": square.to_sparse_csc(),
        "blocks": square.to_sparse_bsr((2, 2)),
        "quantized": torch.quantize_per_tensor(dense, 0.1, 3, torch.qint8),
        "channels": torch.quantize_per_channel(
            dense, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
        ),
    }
    loaded = round_trip(values, tmp_path, by_parts=by_parts)
    for name, value in values.items():
        tensor = loaded[name] if isinstance(loaded[name], Tensor) else loaded[name][...]
        assert (tensor.layout, tensor.dtype) == (value.layout, value.dtype)
        if value.is_quantized:
            assert torch.equal(tensor, value)
        elif value.layout is torch.strided:
            assert torch.equal(tensor, value.detach())
            is_dense = name not in ("expanded", "conjugate")
            assert not is_dense or tensor.stride() == value.stride() or by_parts
        else:
            assert torch.equal(tensor.to_dense(), value.to_dense())
    assert (tmp_path / "state.safetensors").stat().st_size < 60_000


def test_large_tensors_are_read_in_parts(tmp_path: Path) -> None:
    for tensor in (torch.randn(64, 32), torch.randn(64, 32, dtype=torch.complex128)):
        saved = round_trip(tensor, tmp_path, by_parts=True)
        assert (saved.shape, saved.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(saved[slice(3, 5), slice(1, 9)], tensor[3:5, 1:9])
        assert torch.equal(saved[...], tensor)


@pytest.mark.parametrize(("module", "name"), [("this", "Color"), ("torch", "_inductor.Color")])
def test_no_module_of_a_file_is_imported(module: str, name: str, tmp_path: Path) -> None:
    file = pack("state", {"value": Color.RED})
    file.tree["value"]["$enum"][:2] = [module, name]
    file.write(tmp_path)
    reader = Reader(tmp_path, {file.name: fingerprint(tmp_path / file.name)}, by_parts=False)
    before = {*sys.modules}
    with pytest.raises(CheckpointError, match=rf"state\.safetensors.*{name} is not imported"):
        reader.tree("state")
    assert {*sys.modules} == before


@pytest.mark.parametrize("value", [{"data": os.urandom(80_000_000)}, {"list": ["é" * 9] * 900_000}])
def test_large_values_do_not_exceed_the_limit_of_the_header(value: Any, tmp_path: Path) -> None:
    assert round_trip(value, tmp_path) == value


def test_too_many_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_MAX_HEADER_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"state\.safetensors would have 50 tensors"):
        round_trip([torch.tensor(i) for i in range(50)], tmp_path)


def test_odd_names_and_equal_paths(tmp_path: Path) -> None:
    empty, other = torch.empty(0), torch.empty(0, 3, dtype=torch.int64)
    values = [
        {1: empty, "1": other},
        {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)},
        {"\ud800": torch.ones(1)},
        {"$tensor": 3, "extra": 4},
        {True: torch.ones(1), None: torch.zeros(1)},
    ]
    assert is_same(round_trip(values, tmp_path), values)
    names = {name: torch.ones(1) for name in ("__metadata__", "stepwrap.tree", "format", "", "$x")}
    file = pack("model", names)
    file.write(tmp_path)
    reader = Reader(tmp_path, {file.name: fingerprint(tmp_path / file.name)}, by_parts=False)
    assert is_same(reader.tree("model"), names)


class Kept(Counter[str]):
    pass


def test_values_at_the_edges(tmp_path: Path) -> None:
    values = [
        *(np.str_(""), np.bytes_(b""), 10**5000, -(10**5000), "\ud800"),
        *(datetime(2026, 10, 25, 2, fold=1), time(2, fold=1), np.array(["", ""])),
    ]
    loaded = round_trip(values, tmp_path)
    assert all(map(is_same, loaded, values))
    assert [loaded[5].fold, loaded[6].fold] == [1, 1]
    assert type(round_trip(Kept("aab"), tmp_path)) is Counter


def test_many_numpy_numbers_are_no_tensors(tmp_path: Path) -> None:
    values = [np.float64(i) / 3 for i in range(2000)]
    assert is_same(round_trip(values, tmp_path), values)
    assert not pack("state", values).tensors


@pytest.mark.parametrize("length", range(1, 9))
def test_wide_numbers_are_aligned(length: int, tmp_path: Path) -> None:
    value = {"k" * length: torch.ones(64, 33, dtype=torch.complex128), "s": torch.ones(())}
    loaded = round_trip(value, tmp_path, by_parts=True)
    assert torch.equal(loaded["k" * length][slice(0, 1), slice(0, 1)], value["k" * length][:1, :1])


def test_a_config_that_is_no_json_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=0, num_attention_heads=1)
    config.extra = object()
    model = nn.Linear(2, 2)
    model.config = config
    path = save_checkpoint(tmp_path, LoopState(SingleDevice(model)))
    assert not (path / "config.json").exists()
    assert "config.json" in caplog.text


def test_hooks_of_other_programs_do_not_hide_the_weights(tmp_path: Path) -> None:
    file = pack("state", {"stateful": {"hooks.a": {"mode": Color.RED}, "hooks.ema": {"model": 3}}})
    file.tree["stateful"]["hooks.a"]["mode"]["$enum"][0] = "absent"
    file.write(tmp_path)
    reader = Reader(tmp_path, {file.name: fingerprint(tmp_path / file.name)}, by_parts=False)
    assert reader.tree("state", "stateful", "hooks.ema", "model") == 3


def test_files_of_a_divided_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "MAX_BYTES", 100)
    model = Tied()
    model.register_buffer("wide", torch.ones(8, dtype=torch.complex128))
    path = save_checkpoint(tmp_path, LoopState(SingleDevice(model)))
    weights = read_weights(path / "model.safetensors.index.json")
    # One name of tied weights is enough.
    assert weights.keys() | {"head.weight"} == model.state_dict().keys()
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights.items())
    with pytest.raises(CheckpointError, match=r"contains state, .*model\.safetensors"):
        read_weights(path / "state.safetensors")


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "builtins.object"),
        (lambda: None, "builtins.function"),
        (enum.Enum("Local", "A").A, "Local"),
        (datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")), "datetime.datetime"),
        (np.array([object()]), "numpy.ndarray"),
        (torch.ones(1).as_subclass(Subclass), "Subclass"),
        (torch.ones(1, device="meta"), "meta device"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(value: Any, words: str, tmp_path: Path) -> None:
    state = make_state()
    state.stateful = {"hooks.mine": Value({"list": [0, value]})}
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, state)
    assert words in str(caught.value)
    assert "state.stateful.hooks.mine.value.list.1" in str(caught.value)
    assert not [*tmp_path.iterdir()]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)


def test_tied_weights_are_stored_once_and_open_elsewhere(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    path = save_checkpoint(tmp_path, LoopState(SingleDevice(model)))
    assert "head.weight" not in load_file(path / "model.safetensors")
    load_model(other, path / "model.safetensors")
    assert torch.equal(other.head.weight, model.embed.weight)
    weights = load_checkpoint(path).read("model")
    assert weights["head.weight"] is weights["embed.weight"]
    assert weights._metadata["norm"] == {"version": 2}


@pytest.mark.parametrize("max_bytes", [300_000, 5 * 2**30])
def test_transformers_opens_the_folder(
    max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "MAX_BYTES", max_bytes)
    config = BertConfig(
        vocab_size=99,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=16,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    path = save_checkpoint(tmp_path, LoopState(SingleDevice(model)))
    divided = sorted(file.name for file in path.glob("model-*"))
    assert (len(divided) > 1) == (max_bytes < 10**9)
    assert (path / "model.safetensors.index.json").exists() == bool(divided)
    other, info = BertForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.arange(8)[None]
    weights = model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in other.state_dict().items())
    assert torch.allclose(other.eval()(tokens).logits, model(tokens).logits, atol=1e-6)
    # The checkpoint itself, also in parts.
    fresh = LoopState(SingleDevice(BertForSequenceClassification(config).eval()))
    load_checkpoint(path).restore(fresh)
    assert torch.equal(fresh.model.module(tokens).logits, model(tokens).logits)


def test_transformers_opens_the_tokenizer_beside_the_model(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "good": 2, "film": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=8
    )
    samples: Any = [{"text": "good film", "label": 1}, {"text": "film", "label": 0}]
    collate = TextCollator(tokenizer, label="label")
    loader = build_loader(samples, batch_size=2, collate=collate)
    model = BertForSequenceClassification(BertConfig(vocab_size=4, hidden_size=12))
    state = LoopState(SingleDevice(model), dataloader=loader)
    path = save_checkpoint(tmp_path, state)
    assert "tokenizer.json" in load_checkpoint(path).meta["files"]
    other = AutoTokenizer.from_pretrained(path)
    assert other("good film")["input_ids"] == [2, 3]
    assert (other.pad_token, other.model_max_length) == ("[PAD]", 8)
