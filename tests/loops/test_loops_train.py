"""A training run: order of events, intervals, counters, stops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from listeners import Records, failing, on, slow, stop_at
from loop_parts import Recorder, assert_identical, get_weights, make_data, make_loader, make_state
from ranks import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from stepwrap.loops import (
    EpochTrainLoop,
    Hook,
    HookList,
    IterTrainLoop,
    LoopState,
    MeanLoss,
    TestLoop,
    ValLoop,
    build_loader,
)
from stepwrap.wrappers import OptimWrapperDict, SingleDevice, wrap_model


def make_val_loop(samples: int = 4) -> ValLoop:
    return ValLoop(build_loader(make_data(samples), batch_size=2), {"loss": MeanLoss()})


_EVALUATION = ["eval_batch_start", "eval_batch_end"] * 2


def test_trace_of_the_epoch_loop() -> None:
    recorder = Recorder()
    loop = EpochTrainLoop(make_loader(4), max_epochs=1, val_loop=make_val_loop())
    loop.run(make_state(), HookList([recorder]))
    assert recorder.events == [
        *["train_start", "epoch_start 0"],
        *["batch_start 0", "batch_end 0", "update 1", "save_point 1"],
        *["batch_start 1", "batch_end 1", "update 2", "save_point 2"],
        *["epoch_end 0", "log 2", "val_start", *_EVALUATION, "val_end ['loss']", "save_point 2"],
        "train_end",
    ]


def test_trace_of_the_iteration_loop() -> None:
    """3 updates, with a validation after every second and the last one."""
    recorder = Recorder()
    loop = IterTrainLoop(
        make_loader(4), max_steps=3, val_interval=2, val_loop=make_val_loop(), log_every_steps=2
    )
    state = loop.run(make_state(), HookList([recorder]))
    validation = ["val_start", *_EVALUATION, "val_end ['loss']"]
    assert recorder.events == [
        "train_start",
        "epoch_start 0",
        *["batch_start 0", "batch_end 0", "update 1", "save_point 1"],
        *["batch_start 1", "batch_end 1", "update 2", "log 2", *validation, "save_point 2"],
        # The first pass over the data ends.
        "save_point 2",
        *["batch_start 2", "batch_end 2", "update 3", "log 3", *validation, "save_point 3"],
        "epoch_end 1",
        "train_end",
    ]
    assert (state.epoch, state.batch, state.iteration, state.step) == (1, 1, 3, 3)


@pytest.mark.parametrize(("accumulate", "passes"), [(1, [2, 3]), (2, [3, 5])])
def test_an_iteration_loop_plans_its_passes(accumulate: int, passes: list[int]) -> None:
    """A pass has 4 batches; the second loop continues after 6 of 10 updates."""
    state, planned = make_state(accumulate=accumulate), []
    for steps in (6, 10):
        IterTrainLoop(make_loader(8), max_steps=steps).run(state, HookList())
        planned.append(state.max_epochs)
    assert planned == passes


def test_trace_of_the_test_loop() -> None:
    recorder = Recorder()
    loop = TestLoop(build_loader(make_data(4), batch_size=2), {"loss": MeanLoss()})
    metrics = loop.run(make_state(), HookList([recorder]))
    assert recorder.events == ["test_start", *_EVALUATION, "test_end ['loss']"]
    assert list(metrics) == ["loss"]


def validated_at(loop: EpochTrainLoop | IterTrainLoop, **state: Any) -> list[tuple[int, int]]:
    positions: list[tuple[int, int]] = []
    noting = on(on_eval_start=lambda state: positions.append((state.epoch, state.step)))
    loop.run(make_state(**state), HookList([noting]))
    return positions


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"max_epochs": 5, "val_interval": 2, "val_begin": 3}, [3, 4, 5]),
        ({"max_epochs": 9, "val_interval": 4, "val_begin": 1}, [1, 4, 8, 9]),
        ({"max_epochs": 9, "val_interval": 4, "val_begin": 0}, [0, 4, 8, 9]),
        ({"max_epochs": 9, "val_interval": 4}, [4, 8, 9]),
        ({"max_epochs": 5, "val_interval": 2, "val_begin": 6}, []),
        # The next epoch decides which interval applies.
        (
            {"max_epochs": 10, "val_interval": 4, "dynamic_intervals": [(5, 2), (9, 1)]},
            [4, 6, 8, 9, 10],
        ),
        (
            {
                "max_epochs": 10,
                "val_interval": 4,
                "dynamic_intervals": [(5, 2), (9, 1)],
                "val_begin": 5,
            },
            [5, 6, 8, 9, 10],
        ),
    ],
)
def test_epochs_that_are_validated(settings: dict[str, Any], epochs: list[int]) -> None:
    loop = EpochTrainLoop(make_loader(4), val_loop=make_val_loop(), **settings)
    assert [epoch for epoch, _ in validated_at(loop)] == epochs


def _validated_by_the_clock(loop_type: Any, **length: int) -> tuple[list[int], list[Any]]:
    """Return the steps that were validated, and the weights with and without validations."""
    weights, steps = [], list[int]()
    noting = on(on_eval_start=lambda state: steps.append(state.step))
    for seconds in (None, 1e-9):
        # `slow` lets some time pass, so that the clock is read again between two updates.
        loop = loop_type(
            make_loader(24),
            **length,
            val_loop=make_val_loop(),
            val_begin=99,
            val_every_secs=seconds,
        )
        state = loop.run(make_state(), HookList([noting, slow(0.11)]))
        weights.append(get_weights(state))
    return steps, weights


@pytest.mark.parametrize("loop", [(EpochTrainLoop, "max_epochs"), (IterTrainLoop, "max_steps")])
@pytest.mark.parametrize("ranks", [1, 3])
def test_validations_by_the_clock(loop: tuple[Any, str], ranks: int) -> None:
    """All ranks validate at the same updates of a pass, which does not change the training."""
    loop_type, unit = loop
    length = {unit: 1 if unit == "max_epochs" else 12 // ranks}
    reports = run_ranks(_validated_by_the_clock, ranks, loop_type, init=ranks > 1, **length)
    for steps, (without, with_validations) in reports:
        assert steps == reports[0][0]
        assert 0 < min(steps) < 12 // ranks
        assert_identical(with_validations, without)


def test_seconds_between_validations_are_positive() -> None:
    with pytest.raises(ValueError, match="val_every_secs must be > 0"):
        EpochTrainLoop(make_loader(4), max_epochs=1, val_every_secs=0)


def test_intervals_of_validation_count_updates_not_batches() -> None:
    loop = IterTrainLoop(
        make_loader(4), max_steps=5, val_interval=2, val_begin=3, val_loop=make_val_loop()
    )
    # A pass has two batches, an update three.
    assert validated_at(loop, accumulate=3) == [(4, 3), (5, 4), (7, 5)]


@pytest.mark.parametrize(
    ("begin", "steps"), [(1, [1, 4, 8]), (0, [0, 4, 8]), (None, [4, 8]), (8, [8]), (9, [])]
)
def test_the_first_update_that_is_validated(begin: int | None, steps: list[int]) -> None:
    loop = IterTrainLoop(
        make_loader(4), max_steps=8, val_interval=4, val_begin=begin, val_loop=make_val_loop()
    )
    assert [step for _, step in validated_at(loop)] == steps


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"max_epochs": 2.5}, AssertionError, "max_epochs"),
        ({"max_epochs": True}, AssertionError, "max_epochs must be a whole number, got True"),
        ({"max_epochs": 0}, ValueError, "max_epochs"),
        ({"val_interval": 0}, ValueError, "val_interval"),
        ({"val_begin": -1}, ValueError, "val_begin"),
        ({"log_every_steps": 0}, ValueError, "log_every_steps"),
        ({"dynamic_intervals": [(4, 2), (3, 1)]}, ValueError, "ascend"),
        ({"dynamic_intervals": [(4,)]}, ValueError, "pairs"),
        ({"dataloader": []}, ValueError, "at least one batch"),
    ],
)
def test_bad_settings_are_refused_at_once(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    arguments = {"dataloader": make_loader(4), "max_epochs": 1, **settings}
    with pytest.raises(error, match=text):
        EpochTrainLoop(arguments.pop("dataloader"), **arguments)


def test_a_generator_without_batches_is_named() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        IterTrainLoop(iter(()), max_steps=1).run(make_state(), HookList())


def test_training_needs_a_wrapper_and_an_optimizer() -> None:
    loop = EpochTrainLoop(make_loader(4), max_epochs=1)
    with pytest.raises(ValueError, match="optim_wrapper"):
        loop.run(LoopState(model=make_state().model), HookList())
    with pytest.raises(TypeError, match="must have train_step, .*Linear"):
        loop.run(
            LoopState(model=nn.Linear(4, 3), optim_wrapper=make_state().optim_wrapper), HookList()
        )


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_same_weights_as_a_hand_written_loop(accumulate: int) -> None:
    """Windows cross the ends of epochs; only the last window of the run is short."""
    loader = make_loader(10, shuffle=True)
    state = make_state(accumulate=accumulate)
    plain = make_state()
    net = plain.model.module.net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    batches = []
    for epoch in range(3):
        loader.batch_sampler.set_position(epoch)
        batches += list(loader)
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]
        for inputs, targets in window:
            loss = cross_entropy(net(inputs), targets)
            (loss if len(window) == 1 else loss / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()

    EpochTrainLoop(loader, max_epochs=3).run(state, HookList())

    assert_identical(get_weights(state), get_weights(plain))
    assert state.step == state.max_steps == -(-15 // accumulate)
    assert (state.epoch, state.batch, state.iteration) == (3, 0, 15)


def test_log_records_average_over_their_interval() -> None:
    losses: list[float] = []

    def on_batch_end(state: LoopState, batch: Any, logs: Any) -> None:
        assert not logs["loss"].requires_grad
        losses.append(logs["loss"].item())

    def collect_logs(state: LoopState, scalars: dict[str, Any]) -> None:
        scalars |= {"rate": torch.tensor(2.0), "plain": 3.0}

    hook = Records()
    hooks = HookList([on(on_batch_end=on_batch_end, collect_logs=collect_logs), hook])
    EpochTrainLoop(make_loader(10), max_epochs=1, log_every_steps=2).run(make_state(), hooks)
    expected = [sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]]
    assert [record["loss"] for record in hook.records] == pytest.approx(expected)
    assert all(record["rate"] == 2 and record["plain"] == 3 for record in hook.records)


def test_a_custom_step_may_log_floats_and_vectors_and_new_names() -> None:
    class Talkative(SingleDevice):
        def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Any]:
            logs = super().train_step(data, optim_wrapper)
            self.count = getattr(self, "count", 0) + 1
            extra = {"odd": torch.ones(2, requires_grad=True)} if self.count % 2 else {}
            mixed = torch.ones(self.count, 1) if self.count % 2 else 4
            return {**logs, "number": self.count, "mixed": mixed, **extra}

    state, records = make_state(), Records()
    state.model = Talkative(state.model.module)
    EpochTrainLoop(make_loader(8), max_epochs=1, log_every_steps=4).run(state, HookList([records]))
    figures = {name: records.records[0][name] for name in ("number", "odd", "mixed")}
    assert figures == {"number": 2.5, "odd": 1.0, "mixed": 2.5}


def test_a_request_to_stop_is_heeded_at_the_update() -> None:
    def on_batch_end(state: LoopState, batch: Any, logs: Any) -> None:
        if state.iteration == 2:
            state.request_stop("enough")

    recorder = Recorder()
    loop = EpochTrainLoop(make_loader(12), max_epochs=2, val_loop=make_val_loop())
    hooks = HookList([on(on_batch_end=on_batch_end), recorder])
    state = loop.run(make_state(accumulate=2), hooks)
    assert (state.step, state.iteration, state.stop_reason) == (2, 4, "enough")
    assert recorder.events[-2:] == ["log 2", "train_end"]
    assert "epoch_end 0" not in recorder.events


def test_a_stopped_run_can_be_tested_and_trained_on() -> None:
    loop = EpochTrainLoop(make_loader(4), max_epochs=1)
    state = loop.run(make_state(), HookList([stop_at(1)]))
    metrics = make_val_loop().run(state, HookList())
    assert list(metrics) == ["loss"]
    EpochTrainLoop(make_loader(4), max_epochs=2).run(state, HookList())
    assert (state.epoch, state.stop_reason) == (2, "")


def test_an_error_reaches_every_hook_and_the_caller() -> None:
    heard: list[BaseException] = []

    broken = failing(RuntimeError("broken hook"))
    broken_too = failing(ValueError("broken too"), "on_exception")
    listener = on(on_exception=lambda state, error: heard.append(error))
    with pytest.raises(RuntimeError, match="broken hook"):
        EpochTrainLoop(make_loader(4), max_epochs=1).run(
            make_state(), HookList([broken, broken_too, listener])
        )
    assert [str(error) for error in heard] == ["broken hook"]


def test_hooks_are_called_in_order_and_only_for_their_events() -> None:
    calls: list[str] = []

    def named(name: str, order: int) -> Any:
        return on(order, on_update=lambda state: calls.append(name))

    hooks = HookList([named("late", 60), named("a", 50), named("b", 50), named("early", 10)])
    hooks.emit("on_update", make_state())
    assert calls == ["early", "a", "b", "late"]
    assert hooks.on_batch_end == ()
    assert len(hooks) == 4


def test_the_model_trains_in_training_mode_and_frozen_parts_survive_validation() -> None:
    flags: list[tuple[bool, bool]] = []

    class Freeze(Hook):
        def on_batch_start(self, state: LoopState, batch: Any) -> None:
            net = state.model.module.net
            if state.iteration == 0:
                net[0].eval()
            flags.append((net.training, net[0].training))

        def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
            assert not any(module.training for module in state.model.modules())
            assert not torch.is_grad_enabled()

    loop = IterTrainLoop(make_loader(8), max_steps=4, val_interval=1, val_loop=make_val_loop())
    state = make_state()
    state.model.eval()
    loop.run(state, HookList([Freeze()]))
    assert flags == [(True, False)] * 4


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = make_data(5)
        return (data[index] for index in range(5))


def test_a_run_by_steps_is_one_epoch_of_events() -> None:
    """Also a finished run, and one that still has to validate."""
    said: list[str] = []
    names = ("on_train_start", "on_epoch_start", "on_eval_start", "on_epoch_end", "on_train_end")
    hook = on(**{name: lambda *_, name=name: said.append(name.split("_", 1)[1]) for name in names})
    state = make_state()
    val_loop = make_val_loop()
    loop = IterTrainLoop(make_loader(8), max_steps=4, val_interval=4, val_loop=val_loop)
    loop.run(state, HookList([hook]))
    assert said == ["train_start", "epoch_start", "eval_start", "epoch_end", "train_end"]
    for pending in (False, True):
        said.clear()
        state.evaluated_at = -1 if pending else state.step
        loop.run(state, HookList([hook]))
        expected = ["train_start", "epoch_start", *["eval_start"] * pending, "epoch_end"]
        assert said == [*expected, "train_end"]


def _update_group(wrapper: Any, batch: Any, optims: Any) -> dict[str, Any]:
    inputs, target = batch
    optim = optims["net"]
    with optim.optim_context(wrapper):
        loss = cross_entropy(wrapper.module.net(inputs), target)
    optim.update_params(loss)
    return {"loss": loss.detach()}


def test_a_lost_last_window_of_several_optimizers_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = build_loader(Endless(), batch_size=1, train=True)
    state = make_state(accumulate=2)
    state.model = wrap_model(None, state.model.module, train_step=_update_group)
    state.optim_wrapper = OptimWrapperDict(net=state.optim_wrapper)
    EpochTrainLoop(loader, max_epochs=1).run(state, HookList())
    assert (state.iteration, state.step) == (5, 2)
    assert "accumulation window will be lost" in caplog.text


def test_a_count_that_was_not_saved_is_taken_from_the_batches() -> None:
    """A run is resumed inside a window with an optimizer wrapper that does not save its count."""
    ends = []
    for forgets in (False, True):
        state = make_state(accumulate=2)
        optim: Any = state.optim_wrapper
        stop = on(on_batch_start=stop_in_window)
        with pytest.raises(BetweenUpdatesError):
            EpochTrainLoop(make_loader(12), max_epochs=1).run(state, HookList([stop]))
        if forgets:
            optim._inner_count = 0
        EpochTrainLoop(make_loader(12), max_epochs=1).run(state, HookList())
        ends.append(get_weights(state))
        assert optim.inner_count == 6
    assert_identical(*ends)


def stop_in_window(state: LoopState, batch: Any) -> None:
    if state.iteration == 3:
        raise BetweenUpdatesError


class BetweenUpdatesError(Exception):
    """An error that ends a run between two updates."""


class _Longer(Hook):
    """Accumulates more micro-batches per update from step 3 on."""

    def __init__(self) -> None:
        self.ends: list[int] = []

    def on_update(self, state: LoopState) -> None:
        self.ends.append(state.iteration)
        if state.step == 3:
            state.optim_wrapper.accumulate(4)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("loop", "ends"),
    [
        ({"max_epochs": 3}, [2, 4, 6, 10, 14, 18]),
        ({"max_steps": 7}, [2, 4, 6, 10, 14, 18, 22]),
    ],
)
def test_windows_that_become_longer_during_the_run(loop: dict[str, int], ends: list[int]) -> None:
    kind: Any = EpochTrainLoop if "max_epochs" in loop else IterTrainLoop
    state, hook = make_state(accumulate=2), _Longer()
    plain = make_state()
    loader = make_loader(12, shuffle=False)
    kind(loader, **loop, sanity_val=False).run(state, HookList([hook]))
    assert hook.ends == ends
    batch = iter([pair for _ in range(4) for pair in loader])
    optimizer = plain.optim_wrapper.optimizer  # type: ignore[union-attr]
    for start, end in zip([0, *ends], ends, strict=False):
        losses = [plain.model(*next(batch), mode="loss")["loss"] for _ in range(start, end)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in get_weights(plain).items():
        torch.testing.assert_close(get_weights(state)[name], value, rtol=0, atol=1e-6)
