"""The custom steps on the page about extending run and agree with each other."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_runs import largest_difference, network, own_batches, whole
from on_ranks import on_ranks
from torch import nn

from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import OptimWrapper, Preparation, SupervisedModel, build_mesh, wrap_model

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
NAMES = ("Penalised", "PenalisedShards")
PLAN = {"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"}


def _examples(title: str) -> list[str]:
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)


def test_the_model_trains_and_predicts() -> None:
    names: dict[str, Any] = {}
    (code,) = _examples("A model")
    exec(code, names)
    model = names["Autoencoder"]()
    wrapper, images = wrap_model(None, model), torch.rand(4, 1, 8, 8)
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    before = wrapper.train_step((images, torch.zeros(4)), optim)
    after = wrapper.train_step({"image": images}, optim)
    assert set(after) == {"loss", "loss_pixels", "code_size"}
    assert after["loss"] < before["loss"]
    assert [code.shape for code in wrapper.val_step((images,))] == [(8,)] * 4


@pytest.mark.parametrize("penalty", ["p.square().sum()", "p.abs().sum()", "p.norm()"])
@pytest.mark.parametrize("axes", [None, {"data": 1, "tensor": 2}])
@pytest.mark.slow
@on_ranks(2)
def test_penalties_of_shards_equal_penalties_of_whole_weights(
    penalty: str, axes: dict[str, int] | None
) -> None:
    for code in _examples("A training step"):
        # An earlier call may have registered them in this rank process.
        forced = code.replace("register_module()", "register_module(force=True)")
        exec(forced.replace("1e-4", "1e-1").replace("p.square().sum()", penalty), {})
    trained = []
    for name in NAMES:
        options: dict[str, Any] = {} if name == "Penalised" else {"shard": ["Block"]}
        if axes is not None and name == "PenalisedShards":
            options["mesh"] = build_mesh(axes)
            if "tensor" in axes:
                options["prepare"] = Preparation(tensor_parallel=PLAN)
        net = network("Net", torch.float64)
        model = SupervisedModel(net, nn.CrossEntropyLoss())
        wrapper = wrap_model(MODEL_WRAPPERS.get(name), model, **options)
        # Ranks of one tensor group see the same batches.
        rank = dist.get_rank() if axes is None or "tensor" not in axes else 0
        optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1), 3, {"max_norm": 1.0})
        optim.initialize_count_status(nn.Module(), 0, 7)
        for batch in own_batches(rank, torch.float64):
            logs = wrapper.train_step(batch, optim)
        assert set(logs) == {"loss", "loss_raw", "loss_penalty"}
        trained.append(whole(net))
    assert largest_difference(*trained) <= 1e-12
