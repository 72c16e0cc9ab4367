"""The runner from plain objects and from configs, on one and two ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runner_parts import assert_identical, final_weights, points_config, write_run
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from stepwrap.loops import (
    CheckpointError,
    CheckpointHook,
    EpochTrainLoop,
    EvalSets,
    GradNormHook,
    Hook,
    HookList,
    LogHook,
    LoopState,
    NanGuardHook,
    ProgressHook,
    RunInfoHook,
    TestLoop,
    ThroughputHook,
    ValLoop,
    build_loader,
)
from stepwrap.registry import ConfigError, load_config
from stepwrap.runner import Runner
from stepwrap.runner.run_folder import ConfigWriter
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel

QUIET = ["hooks.progress=false"]


def points(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 3, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def make_runner(model: nn.Module | None = None, **options: Any) -> Runner:
    torch.manual_seed(0)
    model = model or SupervisedModel(nn.Linear(3, 2), nn.CrossEntropyLoss())
    metrics = {"accuracy": MulticlassAccuracy(num_classes=2, average="micro")}
    return Runner(
        model,
        EpochTrainLoop(
            build_loader(points(24), batch_size=4, train=True),
            max_epochs=2,
            val_loop=ValLoop(build_loader(points(9), batch_size=4, train=False), metrics),
        ),
        optim_wrapper=OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)),
        test_loop=TestLoop(build_loader(points(10), batch_size=4, train=False), metrics),
        **options,
    )


class Sized(ValLoop):
    """A loop with a length, which is falsy."""

    def __len__(self) -> int:
        return 0


def test_a_loop_may_have_a_length() -> None:
    runner = make_runner(val_loop=Sized(build_loader(points(9), batch_size=4, train=False)))
    assert runner.validate() == {}


@pytest.mark.slow
def test_objects_train_like_a_loop_by_hand() -> None:
    state = make_runner().train()
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs, labels = points(24).tensors
    for _ in range(2):
        for start in range(0, 24, 4):
            rows = slice(start, start + 4)
            nn.functional.cross_entropy(net(inputs[rows]), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert state.step == 12
    assert torch.equal(state.model.module.net.weight, net.weight)
    assert torch.equal(state.model.module.net.bias, net.bias)


def test_a_wrapped_model_is_taken_as_it_is() -> None:
    wrapped = SingleDevice(SupervisedModel(nn.Linear(3, 2), nn.CrossEntropyLoss()))
    assert make_runner(wrapped).state.model is wrapped


def test_validate_and_test_return_metrics() -> None:
    runner = make_runner()
    assert set(runner.validate()) == {"accuracy"}
    assert set(runner.test()) == {"accuracy"}


class Steps(SupervisedModel):
    """A model that records which of its steps are called."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 2), nn.CrossEntropyLoss())
        self.called: set[str] = set()

    def val_step(self, data: Any) -> Any:
        self.called.add("val")
        return super().val_step(data)

    def test_step(self, data: Any) -> Any:
        self.called.add("test")
        return super().test_step(data)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", [ValLoop, TestLoop])
def test_the_method_decides_the_phase_not_the_class_of_the_loop(
    tmp_path: Path, kind: type[ValLoop | TestLoop], several: bool
) -> None:
    def loop(samples: int) -> Any:
        metrics = {"accuracy": MulticlassAccuracy(num_classes=2, average="micro")}
        single = kind(build_loader(points(samples), batch_size=4, train=False), metrics)
        return EvalSets({"set": single}) if several else single

    name = "set/accuracy" if several else "accuracy"
    model, validation = Steps(), loop(9)
    train = EpochTrainLoop(build_loader(points(8), batch_size=4), max_epochs=1, val_loop=validation)
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    # The same loop may be used for both.
    for test in (loop(40), validation):
        hooks = [LogHook()]
        runner = Runner(
            model, train, optim_wrapper=optim, test_loop=test, hooks=hooks, run_dir=tmp_path
        )
        state = runner.state
        assert runner.validate()[name] == state.metrics[name]
        assert model.called == {"val"}
        before = dict(state.metrics)
        model.called.clear()
        runner.test()
        assert state.metrics == before
        assert "test" in model.called
        model.called.clear()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    phases = [json.loads(line)["phase"] for line in lines]
    assert phases == ["val", "test"] * 2
    train.run(state, HookList())
    assert model.called == {"val"}
    assert state.evaluated_at == state.step == 2


def test_test_takes_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    hooks = [CheckpointHook(keep_best="accuracy", keep_last=None)]
    runner = make_runner(hooks=hooks, run_dir=tmp_path)
    runner.train()
    runner.test("latest")
    assert runner.state.step == 12
    runner.test(tmp_path / "checkpoints" / "step_00000006")
    assert runner.state.step == 6
    with pytest.raises(CheckpointError, match="has no best checkpoint"):
        make_runner(run_dir=tmp_path / "other").test("best")


def test_a_runner_has_the_hooks_of_a_config_unless_it_is_given_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = make_runner(run_dir=tmp_path / "run").train()
    assert "epoch 2/2" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("checkpoints", "metrics.csv", "metrics.jsonl"),
        *("environment.json", "events.jsonl", "phases.json"),
    }
    assert {*state.stateful} >= {"hooks.checkpoint"}
    for hooks in ((), [], False):
        make_runner(hooks=hooks, run_dir=tmp_path / "none").train()
        assert capsys.readouterr() == ("", "")
    assert list((tmp_path / "none").iterdir()) == []


DEFAULTS = {
    "progress": ProgressHook,
    "log": LogHook,
    "checkpoint": CheckpointHook,
    "throughput": ThroughputHook,
    "nan_guard": NanGuardHook,
    "run_info": RunInfoHook,
}


class Silent(ProgressHook):
    """A progress hook of the user's own."""


def test_hooks_are_added_to_the_default_hooks_in_python_as_in_a_config(run: Path) -> None:
    def kinds(hooks: Any) -> list[type]:
        chosen = [
            hook for hook in make_runner(hooks=hooks)._hooks if type(hook) is not ConfigWriter
        ]
        return sorted((type(hook) for hook in chosen), key=lambda kind: kind.__name__)

    def configured(hooks: str) -> list[type]:
        runner = Runner.from_config(points_config(run, "schedulers=[]", f"hooks={hooks}"))
        chosen = [hook for hook in runner._hooks if type(hook) is not ConfigWriter]
        return sorted((type(hook) for hook in chosen), key=lambda kind: kind.__name__)

    def but(*names: str, added: type | None = None) -> list[type]:
        kinds_left = [kind for name, kind in DEFAULTS.items() if name not in names]
        return sorted([*kinds_left, *([added] if added else [])], key=lambda kind: kind.__name__)

    assert kinds(None) == kinds({}) == configured("{}") == but()
    assert kinds({"norm": GradNormHook()}) == but(added=GradNormHook)
    assert configured("{norm: {type: GradNormHook}}") == but(added=GradNormHook)
    assert kinds([GradNormHook()]) == but(added=GradNormHook)
    assert kinds({"nan_guard": None}) == kinds({"nan_guard": False}) == but("nan_guard")
    assert configured("{nan_guard: false}") == but("nan_guard")
    assert kinds(()) == kinds(False) == configured("false") == []
    # A hook takes the place of the default one of its name or, in a list, of its class.
    assert kinds({"progress": Silent()}) == but("progress", added=Silent)
    assert kinds([Silent()]) == but("progress", added=Silent)
    guard = NanGuardHook(action="warn")
    assert [
        hook for hook in make_runner(hooks=[guard])._hooks if isinstance(hook, NanGuardHook)
    ] == [guard]


@pytest.mark.parametrize(
    ("hooks", "text"),
    [
        (GradNormHook(), r"got a GradNormHook; write hooks=\[...\]"),
        ("progress", "got a str"),
        ([GradNormHook], r"got the class; write GradNormHook\(\)"),
        ({"grad_norm": True}, "got a bool without any"),
    ],
)
def test_hooks_of_another_form_are_refused(hooks: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make_runner(hooks=hooks)


def test_the_state_at_the_end_of_a_notebook_cell_is_one_line() -> None:
    state = make_runner(hooks=()).train()
    accuracy = state.metrics["accuracy"]
    assert repr(state) == f"LoopState(epoch=2, step=12, metrics={{'accuracy': {accuracy!r}}})"
    state.request_stop("enough")
    assert repr(state).endswith(", stop_reason='enough')")


def test_missing_parts_are_named() -> None:
    runner = Runner(SupervisedModel(nn.Linear(3, 2), nn.CrossEntropyLoss()))
    with pytest.raises(ValueError, match=r"Runner\.train requires train_loop"):
        runner.train()
    with pytest.raises(ValueError, match=r"Runner\.test requires test_loop"):
        runner.test()


def test_an_optimizer_is_no_optimizer_wrapper() -> None:
    model = SupervisedModel(nn.Linear(3, 2), nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong, name in ((optimizer, "SGD"), ([optimizer], "list"), ({"net": optimizer}, "dict")):
        with pytest.raises(TypeError, match=f"got an object of type {name}; "):
            Runner(model, optim_wrapper=wrong)


def test_ranks_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="launch"):
        make_runner()


class Recorder(Hook):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.seen = 0

    def on_run_start(self, state: LoopState) -> None:
        self.events.append("run_start")

    def on_train_start(self, state: LoopState) -> None:
        self.events.append(f"train_start {state.step}")

    def on_run_end(self, state: LoopState) -> None:
        self.events.append("run_end")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 7}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.seen = state["seen"]


def test_hooks_keep_their_state_over_a_resume(tmp_path: Path) -> None:
    recorder, second = Recorder(), Recorder()
    make_runner(hooks=[CheckpointHook(), recorder], run_dir=tmp_path).train()
    make_runner(hooks=[CheckpointHook(), second], run_dir=tmp_path).train(resume=True)
    assert recorder.events == ["run_start", "train_start 0", "run_end"]
    assert second.events == ["run_start", "train_start 12", "run_end"]
    assert second.seen == 7


def test_the_checkpoints_of_another_run_are_not_overwritten(tmp_path: Path) -> None:
    runner = make_runner(hooks=[CheckpointHook()], run_dir=tmp_path)
    runner.train()
    runner.train()
    with pytest.raises(FileExistsError, match=r"step_00000012.*train\(resume=True\)"):
        make_runner(hooks=[CheckpointHook()], run_dir=tmp_path).train()
    again = make_runner(hooks=[CheckpointHook()], run_dir=tmp_path)
    again.test("latest")
    assert again.train().step == 12


def test_a_failed_resume_does_not_take_over_a_run_folder(tmp_path: Path) -> None:
    make_runner(hooks=[CheckpointHook()], run_dir=tmp_path).train()
    other = make_runner(hooks=[CheckpointHook()], run_dir=tmp_path)
    with pytest.raises(CheckpointError):
        other.train(resume="lost")
    with pytest.raises(FileExistsError, match="step_00000012"):
        other.train()


def test_resume_without_a_checkpoint_starts_from_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_runner(hooks=[CheckpointHook()], run_dir=tmp_path).train(resume=True)
    assert state.step == 12
    assert "starting from the beginning" in caplog.text


def test_a_config_may_be_a_dict(run: Path) -> None:
    settings = load_config("points.yaml", [*QUIET, "train.max_epochs=1"]).to_dict()
    assert Runner.from_config(settings).train().step == 12
    with pytest.raises(ConfigError, match="did you mean optimizer"):
        Runner.from_config({**settings, "optimzer": {}})


def test_scheduler_ema_and_custom_hooks_come_from_the_config(run: Path) -> None:
    more = ["hooks.ema.decay=0.5", "hooks.record.type=test_runner_objects.Recorder"]
    runner = Runner.from_config(load_config("points.yaml", [*QUIET, *more]))
    names = set(runner.state.stateful)
    assert names == {"hooks.schedulers", "hooks.checkpoint", "hooks.ema", "hooks.record"}
    state = runner.train()
    assert state.optim_wrapper.get_lr()["lr"] == pytest.approx([0.0], abs=1e-9)


class Rates(Hook):
    built: "Rates"

    def __init__(self) -> None:
        Rates.built = self
        self.seen: list[float] = []

    def on_update(self, state: LoopState) -> None:
        self.seen.append(state.optim_wrapper.get_lr()["lr"][0])


def test_warm_up_by_step_from_a_nested_scheduler(run: Path) -> None:
    warm_up = (
        "schedulers={type: SequentialLR, by: step, milestones: [4], schedulers: ["
        "{type: LinearLR, start_factor: 0.5, total_iters: 4},"
        "{type: ConstantLR, factor: 0.1, total_iters: 99}]}"
    )
    rates = "hooks.rates.type=test_runner_objects.Rates"
    Runner.from_config(load_config("points.yaml", [*QUIET, warm_up, rates])).train()
    assert Rates.built.seen[:5] == pytest.approx([0.00625, 0.0075, 0.00875, 0.001, 0.001])


def test_deterministic_switches_torch(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.backends.cudnn.benchmark
    try:
        Runner.from_config(load_config("points.yaml", [*QUIET, "deterministic=true"])).train()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        torch.backends.cudnn.benchmark = before


def test_settings_of_speed_reach_torch(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    before = torch.get_float32_matmul_precision()
    speed = ["cudnn_benchmark=true", "matmul_precision=high"]
    try:
        Runner.from_config(load_config("points.yaml", [*QUIET, *speed]))
        assert torch.backends.cudnn.benchmark
        assert torch.get_float32_matmul_precision() == "high"
        # Without the settings nothing changes.
        Runner.from_config(load_config("points.yaml", QUIET))
        assert torch.backends.cudnn.benchmark
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    with pytest.raises(ConfigError, match="cudnn_benchmark: .*deterministic"):
        Runner.from_config(load_config("points.yaml", [*QUIET, *speed, "deterministic=true"]))


def train_points(folder: Path, run_dir: str, epochs: int, resume: bool) -> dict[str, Tensor]:
    changes = (f"run_dir={folder / run_dir}", f"train.max_epochs={epochs}")
    runner = Runner.from_config(points_config(folder, *changes))
    start = {name: value.clone() for name, value in runner.state.model.module.state_dict().items()}
    runner.train(resume=resume)
    return start


def first_draw(folder: Path) -> tuple[dict[str, Tensor], float]:
    start = train_points(folder, "draw", 1, resume=False)
    # The ranks may have a device each.
    return {name: weights.cpu() for name, weights in start.items()}, torch.rand(()).item()


def test_ranks_start_alike_and_draw_apart(tmp_path: Path) -> None:
    write_run(tmp_path)
    (start, draw), (other_start, other_draw) = run_ranks(first_draw, 2, tmp_path)
    assert_identical(start, other_start)
    assert draw != other_draw


@pytest.mark.parametrize(("num_ranks", "second"), [(1, 2), (2, 1)])
def test_a_checkpoint_goes_from_one_number_of_ranks_to_another(
    tmp_path: Path, num_ranks: int, second: int
) -> None:
    write_run(tmp_path)
    run_ranks(train_points, num_ranks, tmp_path, "run", 1, resume=False)
    saved = final_weights(tmp_path / "run")
    assert list(saved) == ["net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias"]
    run_ranks(train_points, second, tmp_path, "run", 2, resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"phase": "val"') == 2
