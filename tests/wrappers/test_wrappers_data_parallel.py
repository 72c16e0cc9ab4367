"""Several copies of a model in one process: steps, threads, errors."""

import copy
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from copy_threads import run_in_thread
from step_models import HalfUsed, OwnStep, PlainModel, batches, classifier, flat, sgd
from torch import Tensor, nn

from stepwrap.registry import ConfigError, load_config
from stepwrap.runner import Runner
from stepwrap.wrappers import (
    AmpOptimWrapper,
    BaseModel,
    CallbackContext,
    ReplicationCallbackDataParallel,
    SingleDevice,
    StepDataParallel,
    is_model_wrapper,
    wrap_model,
)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if "stepwrap copy" in thread.name] == []


def step(model: nn.Module, copies: int = 2, **options: Any) -> StepDataParallel:
    return StepDataParallel(model, ["cpu"] * copies, timeout_s=10, **options)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("size", "copies"), [(5, 3), (4, 3), (4, 2), (1, 2), (6, 1)])
def test_training_follows_the_whole_batch(
    size: int, copies: int, dtype: torch.dtype, bound: float
) -> None:
    model, single = step(classifier(dtype), copies), SingleDevice(classifier(dtype))
    ours, theirs = sgd(model, momentum=0.9), sgd(single, momentum=0.9)
    for batch in batches(6, size, dtype):
        logs, expected = model.train_step(batch, ours), single.train_step(batch, theirs)
        assert logs["loss"].shape == ()
        assert abs(logs["loss"].item() - expected["loss"].item()) <= bound
    assert (flat(model) - flat(single)).abs().max() <= bound


class Losses(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 1).double()

    def forward(self, inputs: Tensor, mode: str = "tensor") -> Any:
        scores = self.net(inputs).squeeze(1)
        if mode == "predict":
            return [float(score) for score in scores]
        return {
            "loss_mean": scores.square().mean(),
            "loss_each": scores.sigmoid(),
            "loss_list": [scores.cos().mean(), scores.sin()],
            "penalty_loss": self.net.weight.square().sum(),
            "positive": (scores > 0).sum(),
        }


def test_kinds_of_losses() -> None:
    model = Losses()
    inputs = batches(1, 5, torch.float64)[0][0]
    expected, expected_logs = model.parse_losses(model(inputs, mode="loss"))
    total, logs = model.parse_losses(step(model, 3)(inputs, mode="loss"))
    assert abs(total - expected) <= 1e-12
    assert abs(logs["penalty_loss"] - expected_logs["penalty_loss"]) <= 1e-12
    for ours, theirs in zip(
        torch.autograd.grad(total, list(model.parameters())),
        torch.autograd.grad(expected, list(model.parameters())),
        strict=True,
    ):
        assert (ours - theirs).abs().max() <= 1e-12


def test_predictions_and_evaluation() -> None:
    model = step(PlainModel(), 3)
    inputs, target = batches(1, 5)[0]
    predictions = model(inputs, mode="predict")
    assert isinstance(predictions, list)
    assert torch.allclose(torch.stack(predictions), model.module.net(inputs), rtol=0, atol=1e-6)
    assert torch.equal(torch.stack(model.val_step([inputs])), model.module.net(inputs))
    assert len(model.test_step([inputs, target])) == 5
    assert model(inputs).shape == (5, 3)
    full = step(classifier()).val_step([inputs, target])
    assert set(full) == {"preds", "target", "loss", "num_samples"}


def test_mixed_precision_reaches_every_copy() -> None:
    dtypes: list[torch.dtype] = []
    model = step(classifier(), 3)
    model.module.net[0].register_forward_hook(lambda *args: dtypes.append(args[2].dtype))
    amp = AmpOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), dtype="bfloat16")
    model.train_step(batches(1, 5)[0], amp)
    assert dtypes == [torch.bfloat16] * 3


def test_surroundings_of_the_copies() -> None:
    calls: list[Any] = []

    class Look(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            name = threading.current_thread().name
            modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
            calls.append((name, modes, torch.zeros(1).device.type))
            return inputs

    model = ReplicationCallbackDataParallel(Look(), ["cpu"] * 2, timeout_s=5)
    with torch.no_grad(), torch.device("meta"):
        model(torch.zeros(2, device="cpu"))
    assert {call[1:] for call in calls} == {((False, False), "meta")}
    assert len({call[0] for call in calls}) == 2
    calls.clear()
    with torch.inference_mode():
        model(torch.zeros(2))
    assert {call[1:] for call in calls} == {((False, True), "cpu")}


class Meeting(nn.Module):
    """A module whose copies wait for each other; one of them may fail before."""

    ctx: CallbackContext
    copy_id: int
    failing: int | None = None
    error: type[BaseException] = LookupError

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self.ctx, self.copy_id = ctx, copy_id

    def forward(self, inputs: Tensor) -> Tensor:
        if self.copy_id == self.failing:
            raise self.error(f"broken in {self.copy_id}")
        total = self.ctx.session.rendezvous(
            self.ctx.layer, self.copy_id, len(inputs), lambda sizes: [sum(sizes)] * len(sizes)
        )
        return inputs + total


def test_copies_rendezvous() -> None:
    model = ReplicationCallbackDataParallel(Meeting(), ["cpu"] * 2, timeout_s=10)
    for size in (4, 1, 5, 1, 2):
        assert run_in_thread(lambda size=size: model(torch.zeros(size))).tolist() == [size] * size
    assert not hasattr(model.module, "ctx")


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
@pytest.mark.parametrize("large", [False, True])
def test_a_copy_that_fails(failing: int, error: type[BaseException], large: bool) -> None:
    module = Meeting()
    if large:
        module.weight = nn.Parameter(torch.zeros(2**21))
    module.failing, module.error = failing, error
    model = ReplicationCallbackDataParallel(module, ["cpu"] * 3, timeout_s=60)
    with pytest.raises(error, match=f"broken in {failing}") as caught:
        run_in_thread(lambda: model(torch.zeros(3)), 20)
    assert f"in copy {failing} of 3 on cpu" in "\n".join(getattr(caught.value, "__notes__", []))
    assert "forward" in {entry.name for entry in caught.traceback}
    module.failing = None
    assert run_in_thread(lambda: model(torch.zeros(3))).tolist() == [3, 3, 3]


def test_a_slow_copy_is_not_a_timeout() -> None:
    class Slow(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            threading.Event().wait(0.3 * inputs[0].item())
            return inputs

    model = ReplicationCallbackDataParallel(Slow(), ["cpu"] * 2, timeout_s=0.05)
    assert run_in_thread(lambda: model(torch.arange(2))).tolist() == [0, 1]


def test_copies_of_the_wrapper_are_independent() -> None:
    model = step(classifier())
    batch = batches(1, 5)[0]
    model.train_step(batch, sgd(model))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.timeout_s == 10
        again.train_step(batch, sgd(again))
        assert not torch.equal(flat(again), flat(model))


def test_refusals() -> None:
    with pytest.raises(TypeError, match="OwnStep overrides train_step.*subclass of StepData"):
        step(OwnStep())
    with pytest.raises(ValueError, match="device_ids must .*at least one"):
        StepDataParallel(classifier(), [])
    with pytest.raises(ValueError, match="device_ids must .*CUDA .*cpu, got meta"):
        StepDataParallel(classifier(), ["cpu", "meta"])
    count = torch.cuda.device_count()
    message = f"device_ids names cuda:{count}, but there are {count} CUDA"
    with pytest.raises(ValueError, match=message):
        StepDataParallel(classifier(), [count])
    with pytest.raises(RuntimeError, match=r"device cpu \(device_ids\[0\]\) .*: meta"):
        step(classifier().to("meta"))(torch.zeros(2, 6))


def test_a_network_without_losses() -> None:
    model = step(nn.Linear(6, 3))
    with pytest.raises(TypeError, match=r"Linear\.forward has no argument 'mode'.*Supervised"):
        model.train_step(batches(1)[0][:1], sgd(model))


def test_parameters_that_the_loss_does_not_reach(caplog: pytest.LogCaptureFixture) -> None:
    model = step(HalfUsed(), detect_anomalous_params=True)
    model.train_step(batches(1)[0], sgd(model))
    assert "module.spare.weight" in caplog.text
    assert "module.used.weight" not in caplog.text


def test_a_step_of_a_subclass() -> None:
    class Twice(StepDataParallel):
        def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
            super().train_step(data, optim_wrapper)
            return super().train_step(data, optim_wrapper)

    model = Twice(OwnStep(), ["cpu", "cpu"])
    wrapper = sgd(model)
    model.train_step(batches(1)[0], wrapper)
    assert wrapper.inner_count == 2


def test_compiled_around_the_copies() -> None:
    model = step(classifier(torch.float64))
    inputs = batches(1, 5, torch.float64)[0][0]
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(
        run_in_thread(lambda: compiled(inputs), 60), model(inputs), rtol=0, atol=1e-12
    )


def test_wrapping_twice() -> None:
    model = wrap_model(StepDataParallel, classifier(), device_ids=["cpu", "cpu"])
    assert is_model_wrapper(model)
    assert wrap_model(None, model) is model


def test_ctrl_c_while_waiting_for_a_copy() -> None:
    """The interrupt is raised after the copies have ended; see also the fixture."""

    class Interrupting(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            if threading.current_thread() is not threading.main_thread():
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                threading.Event().wait(0.2)
            return inputs

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        model = ReplicationCallbackDataParallel(Interrupting(), ["cpu"] * 2, timeout_s=5)
        with pytest.raises(KeyboardInterrupt):
            model(torch.zeros(2))
    finally:
        signal.signal(signal.SIGINT, before)


DATA = """
import torch
from torch.utils.data import TensorDataset


def points():
    inputs = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())
"""


CONFIG = """
imports: [parallel_points.py]
model:
  type: SupervisedModel
  net: {type: Linear, in_features: 6, out_features: 2}
  loss: {type: CrossEntropyLoss}
device: cpu
optimizer: {type: SGD, lr: 0.1}
data:
  train: {dataset: {type: parallel_points.points}, batch_size: 7}
  val: {dataset: {type: parallel_points.points}, batch_size: 7}
train: {type: EpochTrainLoop, max_epochs: 2}
metrics: {loss: {type: MeanLoss}}
hooks: {progress: false, checkpoint: false}
"""


def test_in_a_config(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    Path("parallel_points.py").write_text(DATA)
    Path("single.yaml").write_text(CONFIG)
    options = "type: dp, device_ids: [cpu, cpu, cpu], timeout_s: 5"
    Path("parallel.yaml").write_text(f"{CONFIG}wrapper: {{{options}}}\n")
    parallel, single = (
        Runner.from_config(load_config(name)).train().model
        for name in ("parallel.yaml", "single.yaml")
    )
    assert type(parallel) is StepDataParallel
    assert type(single) is SingleDevice
    assert (flat(parallel) - flat(single)).abs().max() <= 1e-6
    with pytest.raises(ConfigError, match=r"device_id: StepDataParallel.*did you mean device_ids"):
        Runner.from_config(load_config("parallel.yaml", ["wrapper.device_id=[cpu]"]))


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [[0, 0], ["cuda:0"], ["cuda:0", "cuda", 0], None])
@pytest.mark.parametrize("size", [5, 1])
def test_training_on_devices_follows_the_whole_batch(devices: Any, size: int) -> None:
    model = StepDataParallel(classifier(torch.float64).cuda(), devices)
    single = SingleDevice(classifier(torch.float64).cuda())
    ours, theirs = sgd(model, momentum=0.9), sgd(single, momentum=0.9)
    for batch in batches(5, size, torch.float64):
        model.train_step(batch, ours)
        single.train_step(batch, theirs)
    assert (flat(model) - flat(single)).abs().max() <= 1e-12


@pytest.mark.gpu
def test_buffers_streams_and_autocast() -> None:
    calls: list[Any] = []

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.count += len(inputs)
            calls.append((torch.cuda.current_stream(), torch.is_autocast_enabled("cuda")))
            return inputs + self.count

    module = Look().cuda()
    model = ReplicationCallbackDataParallel(module, [0, 0], "cpu")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.autocast("cuda", torch.bfloat16):
        outputs = model(torch.zeros(3))
    assert outputs.tolist() == [2, 2, 1]
    assert module.count.item() == 2
    assert calls == [(stream, True)] * 2


@pytest.mark.gpu
def test_mixed_precision_on_one_device() -> None:
    model = StepDataParallel(classifier().cuda(), [0, 0])
    before = flat(model)
    amp = AmpOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), dtype="float16")
    logs = model.train_step(batches(1, 5)[0], amp)
    assert logs["loss"].is_cuda
    assert not torch.equal(flat(model), before)


@pytest.mark.gpu
def test_cuda_graphs_and_other_devices_are_refused() -> None:
    model = ReplicationCallbackDataParallel(nn.Linear(2, 2).cuda(), [0, 0])
    inputs = torch.zeros(2, 2, device="cuda")
    model(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.add_(1)
        with pytest.raises(RuntimeError, match="cannot .*captured .*CUDA graph"):
            model(inputs)
    with pytest.raises(RuntimeError, match=r"on device cpu \(device_ids\[0\]\)"):
        ReplicationCallbackDataParallel(nn.Linear(2, 2).cuda(), ["cpu"])(inputs)
