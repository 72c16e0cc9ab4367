"""Checkpoints after an error never contain half a step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_parts import assert_identical, get_weights, make_loader, make_state
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

from stepwrap.loops import (
    EpochTrainLoop,
    Hook,
    HookList,
    LoopState,
    build_loader,
    find_checkpoint,
    load_checkpoint,
    save_alone,
    save_checkpoint,
)
from stepwrap.wrappers import OptimWrapper, OptimWrapperDict, SingleDevice, SupervisedModel


class Samples(Dataset[tuple[Tensor, int]]):
    """Six samples, one of which is broken or has another length."""

    def __init__(self, *, broken: int = -1, long: int = -1) -> None:
        self.broken, self.long = broken, long

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.broken:
            raise ValueError("a broken sample")
        return torch.ones(5 if index == self.long else 4), 0


def stack(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([sample for sample, _ in samples]), torch.tensor(
        [label for _, label in samples]
    )


@pytest.mark.parametrize(
    ("fault", "expected_samples"),
    [("broken", []), ("long", ["1 x [float32 (4,), int], 1 x [float32 (5,), int]"])],
)
@pytest.mark.parametrize("collate", [None, stack])
def test_only_an_error_of_the_collate_function_is_noted_with_its_samples(
    fault: str, expected_samples: list[str], collate: Any
) -> None:
    loader = build_loader(Samples(**{fault: 3}), batch_size=2, collate=collate)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        EpochTrainLoop(loader, max_epochs=1).run(make_state(), HookList())
    head_note, *other_notes = caught.value.__notes__  # type: ignore[attr-defined]
    assert re.search("reading batch 2 .*epoch 1 .*Samples at ", head_note)
    assert [note.partition(" was given ")[2] for note in other_notes] == expected_samples
    assert all(
        note.startswith("stack at " if collate else "default_collate") for note in other_notes
    )


class Boxes(list[float]):
    """A list with a shape, which is not a tensor."""

    shape = (2,)


class Boxed(Samples):
    def __getitem__(self, index: int) -> Any:
        return Boxes([0.5, 1.0])


def refuse(samples: list[Any]) -> Any:
    raise ValueError("these samples are refused")


def test_a_list_with_a_shape_is_described_by_its_items() -> None:
    loader = build_loader(Boxed(), batch_size=2, collate=refuse)
    with pytest.raises(ValueError, match="are refused") as caught:
        EpochTrainLoop(loader, max_epochs=1).run(make_state(), HookList())
    notes = caught.value.__notes__  # type: ignore[attr-defined]
    assert notes[-1].endswith("was given 2 x [float, float]")


class Fail(Hook):
    """Raise in one batch at one place; save alone after the error."""

    def __init__(
        self, folder: Path, event: str, iteration: int, error: BaseException | None = None
    ) -> None:
        self.folder = folder
        self.place = event
        self.iteration = iteration
        self.error = error or OSError("out of memory")
        self.path: Path | None = None
        self.before: dict[str, Tensor] = {}

    def fail(self, event: str, state: LoopState) -> None:
        if (event, state.iteration) == (self.place, self.iteration):
            raise self.error

    def on_train_start(self, state: LoopState) -> None:
        parameters = list(state.model.parameters())
        # The first parameter's gradient is computed before the error.
        parameters[0].register_hook(lambda gradient: self.fail("backward", state))
        optim: Any = state.optim_wrapper
        if not isinstance(optim, OptimWrapperDict):
            optim.optimizer.register_step_pre_hook(lambda *_: self.fail("step", state))

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        self.before = get_weights(state)
        self.fail("read", state)

    def on_batch_end(self, state: LoopState, batch: Any, logs: Any) -> None:
        self.fail("batch_end", state)

    def on_save_point(self, state: LoopState) -> None:
        self.fail("save_point", state)

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self.path = save_alone(self.folder, state)


def failed(
    folder: Path,
    event: str,
    iteration: int,
    error: BaseException | None = None,
    *,
    window: int = 1,
    dropout: float = 0.0,
) -> Fail:
    state = make_state(accumulate=window, dropout=dropout)
    hook = Fail(folder, event, iteration, error)
    with pytest.raises(type(hook.error)):
        EpochTrainLoop(make_loader(16), max_epochs=2).run(state, HookList([hook]))
    return hook


def uninterrupted(window: int, dropout: float = 0.0) -> dict[str, Tensor]:
    state = make_state(accumulate=window, dropout=dropout)
    EpochTrainLoop(make_loader(16), max_epochs=2).run(state, HookList())
    return get_weights(state)


@pytest.mark.parametrize(
    ("event", "iteration", "window", "start"),
    [
        ("read", 5, 1, 5),
        ("read", 5, 2, 4),
        ("backward", 5, 1, 5),
        ("backward", 5, 2, 4),
        ("backward", 8, 2, 8),
        ("batch_end", 4, 2, 4),
    ],
)
def test_a_batch_that_failed_is_repeated_with_its_window(
    tmp_path: Path, event: str, iteration: int, window: int, start: int
) -> None:
    """The saved checkpoint has nothing of the failed batch, and is not found as the latest."""
    path = failed(tmp_path, event, iteration, window=window).path
    assert path is not None
    assert path.name.startswith("incomplete_step_")
    assert find_checkpoint(tmp_path) is None
    resumed = make_state(accumulate=window)
    load_checkpoint(path).restore(resumed)
    assert resumed.iteration == start
    EpochTrainLoop(make_loader(16), max_epochs=2).run(resumed, HookList())
    assert_identical(get_weights(resumed), uninterrupted(window))


def test_a_checkpoint_after_an_error_between_two_batches_resumes_exactly(tmp_path: Path) -> None:
    path = failed(tmp_path, "save_point", 5, dropout=0.5).path
    assert path == find_checkpoint(tmp_path)
    resumed = make_state(dropout=0.5)
    load_checkpoint(tmp_path / "step_00000005").restore(resumed)
    EpochTrainLoop(make_loader(16), max_epochs=2).run(resumed, HookList())
    assert_identical(get_weights(resumed), uninterrupted(1, dropout=0.5))


def test_a_resume_from_an_incomplete_checkpoint_abandons_later_ones(tmp_path: Path) -> None:
    """Afterwards the same applies to a resume from the abandoned checkpoint."""
    path = failed(tmp_path, "backward", 5).path
    assert path is not None
    state = make_state()
    state.step = 9
    save_checkpoint(tmp_path, state, is_best=True)
    for source, step in ((path, 5), (tmp_path / "abandoned_step_00000009", 9)):
        resumed = make_state()
        load_checkpoint(source).restore(resumed)
        again = save_checkpoint(tmp_path, resumed)
        assert [*tmp_path.glob("step_*")] == [again]
        assert again.name == f"step_{step:08d}"
        assert find_checkpoint(tmp_path, "best") is None


def test_one_incomplete_checkpoint_stays(tmp_path: Path) -> None:
    for iteration in (5, 3):
        failed(tmp_path, "backward", iteration)
    assert [path.name for path in tmp_path.iterdir()] == ["incomplete_step_00000003"]


@pytest.mark.parametrize(
    ("event", "error", "reason"),
    [
        ("batch_end", OSError("away"), "before the step was counted"),
        ("step", OSError("away"), "before the step was counted"),
        ("backward", KeyboardInterrupt(), "was interrupted"),
        ("step", KeyboardInterrupt(), "was interrupted"),
    ],
)
def test_nothing_is_saved_if_weights_may_be_ahead_of_the_counters(
    tmp_path: Path, event: str, error: BaseException, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert failed(tmp_path, event, 5, error).path is None
    assert list(tmp_path.iterdir()) == []
    assert reason in caplog.text


def test_a_window_that_began_in_the_epoch_before_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Schedules and validations of the epoch's end cannot be undone."""
    assert failed(tmp_path, "backward", 8, window=3).path is None
    assert "began in the epoch before" in caplog.text


class TwoStep(SingleDevice):
    """A step of two optimizers, one after the other."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        losses = self.module(*data, mode="loss")
        for wrapper in optim_wrapper.values():
            wrapper.update_params(losses["loss"].detach() * next(self.parameters()).sum())
        return {}


def test_nothing_is_saved_in_a_step_of_several_optimizers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = SupervisedModel(nn.Linear(4, 3), nn.CrossEntropyLoss())
    members = {name: OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)) for name in "ab"}
    state = LoopState(TwoStep(model), OptimWrapperDict(**members))
    hook = Fail(tmp_path, "backward", 2)
    with pytest.raises(OSError, match="memory"):
        EpochTrainLoop(make_loader(8), max_epochs=1).run(state, HookList([hook]))
    assert hook.path is None
    assert "several optimizers" in caplog.text


def _failed_window_on_ranks(folder: Path) -> dict[str, Tensor]:
    # Between two steps of a window each rank has accumulated other gradients.
    path = failed(folder, "read", 3, window=2).path
    paths = [folder / "incomplete_step_00000001" if path is None else path]
    torch.distributed.barrier()
    resumed = make_state(accumulate=2)
    load_checkpoint(paths[0]).restore(resumed)
    assert resumed.iteration == 2
    EpochTrainLoop(make_loader(16), max_epochs=2).run(resumed, HookList())
    assert_identical(get_weights(resumed), uninterrupted(2))
    return get_weights(resumed)


def test_several_ranks_repeat_the_unfinished_window(tmp_path: Path) -> None:
    run_ranks(_failed_window_on_ranks, 2, tmp_path)
