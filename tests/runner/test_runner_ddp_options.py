"""Every option of the distributed wrappers and optimizers from a config on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from stepwrap.registry import ConfigError
from stepwrap.runner import Runner
from stepwrap.wrappers import BaseModel

HERE = "test_runner_ddp_options"
SAMPLES, BATCH, EPOCHS = 24, 3, 2
SGD = {"lr": 0.5, "momentum": 0.9}
POWER = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.1}


class Points(TensorDataset):
    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
        super().__init__(inputs, (inputs.sum(1) > 0).long())


class Net(nn.Sequential):
    """A net with fixed initial weights; `spare` adds an unused layer."""

    def __init__(self, spare: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.spare = nn.Linear(3, 3) if spare else None
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self[2](self[1](self[0](inputs)))
        return scores


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.norm(inputs))


class Factor:
    def __init__(self, value: float) -> None:
        self.value = value


def scaled(state: Factor, bucket: GradBucket) -> Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0].mul_(state.value))


def mean(state: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    assert state is dist.group.WORLD
    return scaled(Factor(1.0), bucket)


def settings(wrapper: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "model": {
            "type": "SupervisedModel",
            "net": {"type": f"{HERE}.Net"},
            "loss": {"type": "CrossEntropyLoss"},
        },
        "wrapper": wrapper,
        "optimizer": {"type": "SGD", **SGD},
        "data": {"train": {"dataset": {"type": f"{HERE}.Points"}, "batch_size": BATCH}},
        "train": {"type": "EpochTrainLoop", "max_epochs": EPOCHS},
        "hooks": {"progress": False},
        "launch": {"nproc": 2},
        "device": "cpu",
        **changes,
    }


def train(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    runner = Runner.from_config({**config, "run_dir": str(folder)})
    runner.train()
    model: Any = runner.state.model
    return {
        "weights": flat(model),
        "names": list(model.module.state_dict()),
        "step": runner.state.step,
        "flags": {name: getattr(model, name, None) for name in _FLAGS},
        "buffers": [buffer.clone() for buffer in model.buffers()],
    }


_FLAGS = (
    "static_graph",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "forward_sync_buffers",
    "uneven_inputs",
)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def global_batches(samples: int = SAMPLES) -> list[list[Tensor]]:
    """Return the combined batches of both ranks in their order."""
    inputs, target = Points(samples).tensors
    size = 2 * BATCH
    return [[inputs[at : at + size], target[at : at + size]] for at in range(0, samples, size)]


def alone(samples: int = SAMPLES) -> Tensor:
    """Train in plain PyTorch on both ranks' batches; a single rank's batch has half the weight."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for _ in range(EPOCHS):
        for inputs, target in global_batches(samples):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), target)
            (loss if len(inputs) > 1 else loss / 2).backward()
            optimizer.step()
    return flat(net)


def farthest(results: Any, expected: Tensor) -> float:
    """Return the largest difference of a weight on any rank."""
    return max((result["weights"] - expected).abs().max().item() for result in results)


EXACT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"static_graph": True}, {"static_graph": True}),
    ({"find_unused_parameters": True}, {"find_unused_parameters": True}),
    ({"comm_hook": [{"type": f"{HERE}.Factor", "value": 1.0}, f"{HERE}.scaled"]}, {}),
    ({"uneven_inputs": True}, {"uneven_inputs": {}}),
    ({"type": "separate"}, {}),
    *slow(
        ({"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": True}),
        ({"broadcast_buffers": False}, {"forward_sync_buffers": False}),
        ({"comm_hook": "allreduce"}, {}),
        ({"comm_hook": f"{HERE}.mean"}, {}),
        ({"type": "separate", "comm_hook": "allreduce", "find_unused_parameters": True}, {}),
    ),
]


@pytest.mark.parametrize(
    ("options", "flags"), EXACT, ids=lambda options: ",".join(map(str, options))
)
def test_options_that_change_no_number(
    options: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:
    results = run_ranks(train, 2, settings({"type": "ddp", **options}), tmp_path)
    assert farthest(results, alone()) <= 1e-12
    for result in results:
        assert result["names"] == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
        assert flags.items() <= result["flags"].items()


@pytest.mark.parametrize(("name", "bound"), [("fp16_compress", 2e-2), ("bf16_compress", 1e-1)])
def test_compressing_hooks(name: str, bound: float, tmp_path: Path) -> None:
    config = settings({"type": "ddp", "comm_hook": name})
    assert 1e-9 < farthest(run_ranks(train, 2, config, tmp_path), alone()) <= bound


def train_with_torch(hook: str) -> Tensor:
    """Train with torch's own parts; return the weights."""
    net = Net()
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    averager = None
    if hook == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, **POWER)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        local = PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
        wrapped.register_comm_hook(local, post_localSGD_hook)
        averager = PeriodicModelAverager(3, 2)
    for _ in range(EPOCHS):
        for inputs, target in global_batches():
            mine = slice(dist.get_rank(), None, 2)
            nn.functional.cross_entropy(wrapped(inputs[mine]), target[mine]).backward()
            optimizer.step()
            if averager is not None:
                averager.average_parameters(net.parameters())
            optimizer.zero_grad()
    return flat(net)


@pytest.mark.parametrize("hook", ["powerSGD", "post_localSGD"])
def test_hooks_of_torch_with_options(hook: str, tmp_path: Path) -> None:
    options: dict[str, Any] = POWER
    changes: dict[str, Any] = {}
    if hook == "post_localSGD":
        options = {"start_localSGD_iter": 2}
        averaging = {"type": "PostLocalSGD", "period": 3, "warmup_steps": 2}
        changes["optimizer"] = {**averaging, "optimizer_class": "SGD", **SGD}
    config = settings({"type": "ddp", "comm_hook": {"type": hook, **options}}, **changes)
    expected = run_ranks(train_with_torch, 2, hook)
    for result, by_hand in zip(run_ranks(train, 2, config, tmp_path), expected, strict=True):
        assert farthest([result], by_hand) <= 1e-12


@pytest.mark.parametrize("inner", ["SGD", {"_ref_": "SGD"}, {"_ref_": "torch.optim.SGD"}])
def test_zero_redundancy(inner: Any, tmp_path: Path) -> None:
    optimizer = {"type": "ZeroRedundancyOptimizer", "optimizer_class": inner, **SGD}
    config = settings({"type": "ddp"}, optimizer=optimizer)
    assert farthest(run_ranks(train, 2, config, tmp_path), alone()) <= 1e-12


def test_broadcast_buffers(tmp_path: Path) -> None:
    """Each forward starts with the first rank's running statistics if buffers are broadcast."""
    results = {}
    for on in (True, False):
        config = settings({"type": "ddp", "broadcast_buffers": on})
        config["model"]["net"] = {"type": f"{HERE}.Normed"}
        results[on] = run_ranks(train, 2, config, tmp_path / str(on))
    (_, shared), (_, apart) = results[True], results[False]
    mean_of_last = Points().tensors[0][-5::2].mean(0)
    for result, from_first in ((shared, True), (apart, False)):
        rank_0 = results[from_first][0]["buffers"][0]
        # Undo the first rank's last step, then apply the last rank's own step.
        last_of_first = Points().tensors[0][-6::2].mean(0)
        common = (rank_0 - 0.1 * last_of_first) / 0.9
        expected = 0.9 * common + 0.1 * mean_of_last
        assert torch.allclose(result["buffers"][0], expected) is from_first


def test_uneven_inputs(tmp_path: Path) -> None:
    """Only the first rank has the last sample, and reads it once."""
    config = settings({"type": "ddp", "uneven_inputs": True})
    config["data"]["train"]["dataset"]["samples"] = SAMPLES + 1
    results = run_ranks(train, 2, config, tmp_path)
    assert farthest(results, alone(SAMPLES + 1)) <= 1e-12
    assert {result["step"] for result in results} == {EPOCHS * (SAMPLES // (2 * BATCH) + 1)}


class Pair(BaseModel):
    """Two parts with an optimizer each; the second learns the outputs of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), Net()

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        inputs, target = data
        loss = nn.functional.cross_entropy(self.first(inputs), target)
        optim_wrapper["first"].update_params(loss)
        with torch.no_grad():
            teacher = self.first(inputs)
        other = (self.second(inputs) - teacher).square().mean()
        optim_wrapper["second"].update_params(other)
        return {"loss": loss.detach(), "other": other.detach()}


def test_separate_with_two_optimizers(tmp_path: Path) -> None:
    optimizer = {
        "first": {"type": "SGD", "lr": 0.5, "momentum": 0.9, "params": ["first.*"]},
        "second": {"type": "Adam", "lr": 0.01, "params": ["second.*"]},
    }
    config = settings({"type": "separate"}, model={"type": f"{HERE}.Pair"}, optimizer=optimizer)
    pair = Pair()
    optimizers = [
        torch.optim.SGD(pair.first.parameters(), lr=0.5, momentum=0.9),
        torch.optim.Adam(pair.second.parameters(), lr=0.01),
    ]
    for _ in range(EPOCHS):
        for inputs, target in global_batches():
            nn.functional.cross_entropy(pair.first(inputs), target).backward()
            optimizers[0].step()
            teacher = pair.first(inputs).detach()
            (pair.second(inputs) - teacher).square().mean().backward()
            optimizers[1].step()
            pair.zero_grad()
    for ranks in (2, 1):
        results = run_ranks(train, ranks, config, tmp_path / str(ranks))
        assert ranks == 1 or farthest(results, flat(pair)) <= 1e-12
        assert all(result["names"][0] == "first.0.weight" for result in results)


def unused(static: bool, folder: Path) -> str:
    config = settings({"type": "ddp", "static_graph": static})
    config["model"]["net"]["spare"] = True
    with pytest.raises(RuntimeError) as error:
        train(config, folder)
    return str(error.value)


def test_unused_parameters_are_named(tmp_path: Path) -> None:
    for text in run_ranks(unused, 2, False, tmp_path):
        assert "not depend on net.spare.weight, net.spare.bias" in text


@pytest.mark.parametrize(
    ("wrapper", "where", "text"),
    [
        ({"type": "ddp", "static_grap": True}, "static_grap", "static_graph"),
        ({"type": "separate", "static_grap": True}, "static_grap", "static_graph"),
        ({"type": "ddp", "comm_hook": {"type": "powerSDG"}}, "comm_hook.type", "mean PowerSGD"),
        ({"type": "ddp", "comm_hook": {"type": "powerSGD", "matrix_aproximation_rank": 2}},
         "comm_hook.matrix_aproximation_rank", "matrix_approximation_rank"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_before_anything_runs(
    wrapper: dict[str, Any], where: str, text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Runner.from_config(settings(wrapper, launch={"nproc": 1}))
    assert f"wrapper.{where}: " in str(error.value)
    assert text in str(error.value)
