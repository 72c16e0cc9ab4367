"""Models of torchvision and timm. `make test-vision` runs these tests if torchvision works."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run
from ranks import run_ranks

from stepwrap.wrappers import (
    OptimWrapper,
    SingleDevice,
    StepDataParallel,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
)

try:
    import timm
    from torchvision.models import detection
except Exception as error:  # noqa: BLE001 - a build for another torch raises RuntimeError
    reason = f"torchvision and timm cannot be used ({error}): make test-vision"
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()


def retinanet() -> Any:
    torch.manual_seed(0)
    backbone = torch.nn.Conv2d(3, 8, 3, stride=8, padding=1)
    backbone.out_channels = 8  # type: ignore[assignment]
    sizes = detection.anchor_utils.AnchorGenerator(((16,),), ((1.0,),))
    return detection.RetinaNet(backbone, 3, anchor_generator=sizes, min_size=32, max_size=64)


def batch() -> Any:
    generator = torch.Generator().manual_seed(1)
    images = [torch.rand(3, 32, 32 + 8 * at, generator=generator) for at in range(4)]
    box = torch.tensor([[4.0, 4.0, 20.0, 20.0]])
    return images, [{"boxes": box + at, "labels": torch.tensor([1 + at % 2])} for at in range(4)]


def train_both(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights of our training and of a plain loop over both halves."""
    plain, model = retinanet(), retinanet()
    images, targets = batch()
    wrapper: Any = {
        "single": SingleDevice,
        "dp": lambda net: StepDataParallel(net, ["cpu", "cpu"]),
        "ddp": StepDistributedDataParallel,
        "fsdp": StepFullyShardedDataParallel,
    }[kind](model)
    rank = torch.distributed.get_rank() if kind in ("ddp", "fsdp") else None
    rows = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    row_groups = [slice(None)] if kind == "single" else [slice(0, 2), slice(2, 4)]
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(2):
        wrapper.train_step((images[rows], targets[rows]), optim)
        optimizer.zero_grad()
        for group_rows in row_groups:
            (
                sum(plain(images[group_rows], targets[group_rows]).values()) / len(row_groups)
            ).backward()
        optimizer.step()
    ours = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters()}
    return {n: p.detach() for n, p in ours.items()}, {
        n: p.detach() for n, p in plain.named_parameters()
    }


@pytest.mark.parametrize("kind", ["single", "dp", "ddp", "fsdp"])
def test_a_detector_trains_like_a_plain_loop(kind: str) -> None:
    results = run_ranks(train_both, 2, kind) if kind in ("ddp", "fsdp") else [train_both(kind)]
    for ours, plain in results:
        assert ours.keys() == plain.keys()
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_the_configs_of_the_page_train(tmp_path: Path) -> None:
    assert timm.is_model("resnet10t")
    for name in ("draw_shapes.py", "shapes.yaml", "boxes.yaml"):
        (code,) = re.findall(rf"```\w+\n(# {re.escape(name)}\n.*?)```", PAGE, flags=re.DOTALL)
        (tmp_path / name).write_text(code)
    run("draw_shapes.py", cwd=tmp_path)
    for name, key in (("shapes", "accuracy"), ("boxes", "boxes/map")):
        command = ("-m", "stepwrap.runner", "train", f"{name}.yaml")
        run(*command, cwd=tmp_path, timeout=900.0)
        lines = (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert any(key in str(record) for record in records)
    # Detectors pad the images of a batch, so that predictions depend on the other images in it.
    for ranks in (1, 2):
        words = ("--data", "val", "--out", f"{ranks}.jsonl", "data.test.batch_size=1")
        run(
            "-m", "stepwrap.runner", "predict", "runs/boxes", "--nproc", ranks, *words, cwd=tmp_path
        )
    text_1, two = ((tmp_path / f"{ranks}.jsonl").read_text() for ranks in (1, 2))
    assert text_1 == two
    rows = [json.loads(line) for line in text_1.splitlines()]
    assert len(rows) == 8
    assert all({"boxes", "scores", "labels"} <= {*row["preds"]} for row in rows)
    run("-m", "stepwrap.runner", "export", "runs/boxes", "--to", "safetensors", cwd=tmp_path)
