"""Prediction files have every sample once and in order, in each format, on any number of ranks."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from ranks import RanksError, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from stepwrap.loops import HookList, LoopState, PredictionHook, TestLoop, build_loader
from stepwrap.wrappers import BaseModel, SingleDevice, SupervisedModel

INPUTS = torch.arange(22.0).reshape(11, 2)
TARGETS = torch.arange(11)


def _predict(path: Path, *, model: Any = None, dataset: Any = None, batch_size: int = 2) -> int:
    """Write the predictions of this rank's share; return the hook's count."""
    if model is None:
        model = SupervisedModel(nn.Identity(), nn.CrossEntropyLoss())
    dataset = TensorDataset(INPUTS, TARGETS % 2) if dataset is None else dataset
    loader = build_loader(dataset, batch_size=batch_size)
    hook = PredictionHook(path, loader)
    TestLoop(loader).run(LoopState(SingleDevice(model)), HookList([hook]))
    return hook.count


class OutputModel(BaseModel):
    """A model that returns the result of a function."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs

    def test_step(self, data: Any) -> Any:
        return self.outputs(data)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_every_sample_comes_once_and_in_order(ranks: int, batch_size: int, tmp_path: Path) -> None:
    path = tmp_path / "out" / "predictions.jsonl"
    counts = run_ranks(_write_with, ranks, path, batch_size)
    assert counts == [11] + [0] * (ranks - 1)
    assert _lines(path) == [
        {"index": at, "preds": INPUTS[at].tolist(), "target": at % 2} for at in range(11)
    ]
    assert list(path.parent.iterdir()) == [path]


def _write_with(path: Path, batch_size: int) -> int:
    return _predict(path, batch_size=batch_size)


@pytest.mark.parametrize("ranks", [1, 3])
def test_arrays_keep_their_types(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "predictions.npz"
    run_ranks(_write_with, ranks, path, 2)
    with np.load(path, allow_pickle=False) as arrays:
        assert set(arrays) == {"index", "preds", "target"}
        assert arrays["preds"].dtype == np.float32
        assert arrays["target"].dtype == np.int64
        np.testing.assert_array_equal(arrays["preds"], INPUTS.numpy())
        np.testing.assert_array_equal(arrays["index"], np.arange(11))


@pytest.mark.parametrize("ranks", [1, 3])
def test_parquet(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "predictions.parquet"
    run_ranks(_write_with, ranks, path, 2)
    table = parquet.read_table(path)
    assert table.column_names == ["index", "preds", "target"]
    assert table["preds"].to_pylist() == INPUTS.tolist()
    assert table["index"].to_pylist() == list(range(11))


def test_many_rows_are_written_in_groups(tmp_path: Path) -> None:
    path = tmp_path / "predictions.parquet"
    dataset = TensorDataset(torch.rand(2500, 1), torch.zeros(2500, dtype=torch.long))
    assert _predict(path, dataset=dataset, batch_size=100) == 2500
    file = parquet.ParquetFile(path)
    assert file.metadata.num_row_groups == 3
    assert file.read()["preds"].to_pylist() == dataset.tensors[0].tolist()


@dataclass
class Box:
    corner: Tensor
    label: str


@pytest.mark.parametrize(
    ("outputs", "fields"),
    [
        (lambda x: x[0], {"prediction": [0.0, 1.0]}),
        (lambda x: tuple(x[0]), {"prediction": [0.0, 1.0]}),
        (lambda x: x[0].bfloat16(), {"prediction": [0.0, 1.0]}),
        (lambda x: x[0].numpy(), {"prediction": [0.0, 1.0]}),
        (lambda x: x[0].to(torch.float8_e4m3fn), {"prediction": [0.0, 1.0]}),
        (lambda x: [{"label": "a", "score": s.sum()} for s in x[0]], {"label": "a", "score": 1.0}),
        (lambda x: [Box(s, "b") for s in x[0]], {"corner": [0.0, 1.0], "label": "b"}),
        (lambda x: {"p": x[0], "loss": x[0].mean(), "hidden": (x[0], x[0])}, {"p": [0.0, 1.0]}),
        (lambda x: {"text": ["ab"] * len(x[0]), "none": None}, {"text": "ab"}),
    ],
)
def test_outputs_become_rows(outputs: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    assert _predict(path, model=OutputModel(outputs)) == 11
    lines = _lines(path)
    assert lines[0] == {"index": 0, **fields}
    assert [line["index"] for line in lines] == list(range(11))


class Named(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": INPUTS[index], "sample_id": f"image-{index}"}


def test_ids_of_the_data_set_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    _predict(path, model=OutputModel(lambda batch: batch["inputs"]), dataset=Named())
    assert [line["sample_id"] for line in _lines(path)] == [f"image-{at}" for at in range(5)]


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    special = torch.tensor([math.nan, math.inf, -math.inf])
    _predict(path, model=OutputModel(lambda x: special.expand(len(x[0]), 3)))
    assert _lines(path)[0]["prediction"] == ["NaN", "Infinity", "-Infinity"]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Any:
        return iter(zip(INPUTS, TARGETS % 2, strict=True))


def test_streams_on_one_process_count_the_samples(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    assert _predict(path, dataset=Stream(), batch_size=3) == 11
    assert [line["preds"] for line in _lines(path)] == INPUTS.tolist()


def _predict_stream(path: Path) -> None:
    _predict(path, dataset=Stream())


def test_streams_on_several_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="several ranks need .*build_loader"):
        run_ranks(_predict_stream, 2, tmp_path / "predictions.jsonl")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("predictions.csv", r"end in \.jsonl, \.parquet or \.npz, got 'predictions.csv'"),
        ("predictions", "got 'predictions'"),
    ],
)
def test_unknown_formats(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _predict(tmp_path / name)


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"new file, .*predictions\.jsonl exists"):
        _predict(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("option", ["shuffle", "drop_last", "train"])
def test_loaders_that_do_not_keep_the_order(option: str, tmp_path: Path) -> None:
    options: Any = {option: True}
    loader = build_loader(TensorDataset(INPUTS), batch_size=2, **options)
    with pytest.raises(ValueError, match=f"once and in order, .*has {option}"):
        PredictionHook(tmp_path / "predictions.jsonl", loader)


@pytest.mark.parametrize(
    "options",
    [{"shuffle": True}, {"drop_last": True}, {"sampler": [4, 1]}, {"batch_sampler": [[0], [3]]}],
)
def test_own_loaders_that_do_not_keep_the_order(options: Any, tmp_path: Path) -> None:
    loader: Any = DataLoader(TensorDataset(INPUTS), **options)
    with pytest.raises(ValueError, match="once and in order, .*has"):
        PredictionHook(tmp_path / "predictions.jsonl", loader)
    PredictionHook(tmp_path / "predictions.jsonl", DataLoader(TensorDataset(INPUTS)))


def _rising(x: Any) -> list[Any]:
    return [int(value) if value < 9 else float(value) + 0.5 for value in x[0][:, 0]]


def test_arrays_of_numbers_that_become_fractions_keep_them(tmp_path: Path) -> None:
    path = tmp_path / "predictions.npz"
    _predict(path, model=OutputModel(_rising))
    with np.load(path, allow_pickle=False) as arrays:
        expected = [*range(0, 9, 2), *(number + 0.5 for number in range(10, 22, 2))]
        assert arrays["prediction"].tolist() == expected


def _predict_rows(path: Path, rows: list[Any]) -> None:
    def outputs(x: Any) -> list[Any]:
        return [rows[int(value)] for value in x[0][:, 0]]

    dataset = TensorDataset(torch.arange(float(len(rows)))[:, None])
    _predict(path, model=OutputModel(outputs), dataset=dataset, batch_size=100)


# Rows of the first samples, the last row, and what a file of .parquet has of the two.
EXACT_ROWS: list[Any] = [
    ({"n": 1}, {"n": 2, "score": 0.5}, {"n": 1, "score": None}, {"n": 2, "score": 0.5}),
    ({"n": 1, "score": 0.5}, {"n": 2}, {"n": 1, "score": 0.5}, {"n": 2, "score": None}),
    ({"v": {"a": 1}}, {"v": {"a": 1, "b": 2}}, {"v": {"a": 1, "b": None}}, {"v": {"a": 1, "b": 2}}),
    ({"v": None}, {"v": [1, 2]}, {"v": None}, {"v": [1, 2]}),
    ({"v": [[]]}, {"v": [[], [0.5, None]]}, {"v": [[]]}, {"v": [[], [0.5, None]]}),
    ({"v": 1}, {"v": 2.5}, {"v": 1.0}, {"v": 2.5}),
    ({"v": [0.5]}, {"v": [2**53]}, {"v": [0.5]}, {"v": [float(2**53)]}),
    ({"v": [{"a": 1}]}, {"v": [{"b": "x"}]}, {"v": [{"a": 1, "b": None}]},
     {"v": [{"a": None, "b": "x"}]}),
]  # fmt: skip


@pytest.mark.parametrize("first_rows", [1, 1024])
@pytest.mark.parametrize(("early", "late", "read_early", "read_late"), EXACT_ROWS)
def test_parquet_has_the_fields_of_all_samples(
    early: Any, late: Any, read_early: Any, read_late: Any, first_rows: int, tmp_path: Path
) -> None:
    path = tmp_path / "predictions.parquet"
    _predict_rows(path, [early] * first_rows + [late])
    rows = parquet.read_table(path).to_pylist()
    assert repr(rows[0]) == repr({"index": 0, **read_early})
    assert repr(rows[-1]) == repr({"index": first_rows, **read_late})
    assert len(rows) == first_rows + 1


@pytest.mark.parametrize("first_rows", [1, 1024])
@pytest.mark.parametrize(
    ("early", "late", "message"),
    [
        (True, 5, "'v' has bool before and int64 here"),
        (5, True, "'v' has int64 before and bool here"),
        (0.5, True, "'v' has double before and bool here"),
        (0.5, "0.25", "'v' has double before and string here"),
        ([0.5], [0.5, True], "'v' has double before and bool here"),
        ([1], 1, "'v' has a list before and int64 here"),
        ({"a": 1}, {"a": "1"}, "'v' has int64 before and string here"),
        ({"a": 1}, [1], "'v' has a mapping before and a list here"),
        (0.5, 2**53 + 1, "'v' .* has the type double, which cannot hold this value"),
        (1, 2**63, "'v' .* has the type int64, which cannot hold this value"),
    ],
)
def test_parquet_refuses_values_that_it_would_change(
    early: Any, late: Any, message: str, first_rows: int, tmp_path: Path
) -> None:
    path = tmp_path / "predictions.parquet"
    with pytest.raises(ValueError, match=f"sample {first_rows}: .*{message}.* to .jsonl"):
        _predict_rows(path, [{"v": early}] * first_rows + [{"v": late}])
    assert list(tmp_path.iterdir()) == []


def test_parquet_refuses_mappings_without_entries(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot hold the predictions .*to \.jsonl"):
        _predict_rows(tmp_path / "predictions.parquet", [{"v": {}}])
    assert list(tmp_path.iterdir()) == []


def test_arrays_refuse_integers_that_floats_round(tmp_path: Path) -> None:
    rows = [{"v": 0.5}, {"v": 2**53}, {"v": 2**53 + 1}]
    with pytest.raises(ValueError, match="sample 2: 'v' has integers that float64, "):
        _predict_rows(tmp_path / "predictions.npz", rows)
    _predict_rows(tmp_path / "exact.npz", rows[:2])
    with np.load(tmp_path / "exact.npz", allow_pickle=False) as arrays:
        assert arrays["v"].tolist() == [0.5, 2**53]


def test_fields_that_are_not_numeric_are_left_out_of_arrays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "predictions.npz"
    texts = np.array(["ab", "abcdef"])
    _predict(path, model=OutputModel(lambda x: [{"a": s, "t": texts[1]} for s in x[0]]))
    assert re.search("leaves out .*not numeric: t$", caplog.text, re.M)
    with np.load(path, allow_pickle=False) as arrays:
        assert set(arrays) == {"index", "a"}


def test_a_stopped_evaluation_writes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    loader = build_loader(TensorDataset(INPUTS), batch_size=2)
    hook = PredictionHook(path, loader)
    state = LoopState(SingleDevice(OutputModel(lambda x: x[0])))
    hook.on_eval_start(state)
    state.stop_reason = "asked"
    hook.on_eval_batch_end(state, [INPUTS[:2]], INPUTS[:2])
    hook.on_eval_end(state, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("suffix", "outputs", "error", "message"),
    [
        (".jsonl", lambda x: {"index": x[0][:, 0]}, ValueError, "test_step returns a field of"),
        (".jsonl", lambda x: x[0].to(torch.complex64), TypeError, "got complex numbers"),
        (".npz", lambda x: ["a"] * len(x[0]), ValueError, "is one; write to .jsonl or .parquet"),
        (".jsonl", lambda x: x[0].mean(), TypeError, "each of the 2 samples of a batch, got float"),
        (".jsonl", lambda x: {"loss": 0.5}, TypeError, "each of the 2 samples"),
        (
            ".jsonl",
            lambda x: [object()] * len(x[0]),
            TypeError,
            "made of real numbers, .* got object",
        ),
        (".npz", lambda x: [s[: 1 + int(s[0] > 9)] for s in x[0]], ValueError, "same fields and"),
    ],
)
def test_outputs_that_cannot_be_written_leave_no_file(
    suffix: str, outputs: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        _predict(tmp_path / f"predictions{suffix}", model=OutputModel(outputs))
    assert list(tmp_path.iterdir()) == []


def _predict_ragged(path: Path) -> None:
    _predict(path, model=OutputModel(lambda x: [s[: 1 + int(s[0] > 9)] for s in x[0]]))


def test_a_failed_merge_is_an_error_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as failed:
        run_ranks(_predict_ragged, 3, tmp_path / "predictions.npz")
    assert len(failed.value.reports) == 3
    assert all("same fields and shapes" in report for report in failed.value.reports.values())
    assert list(tmp_path.iterdir()) == []
