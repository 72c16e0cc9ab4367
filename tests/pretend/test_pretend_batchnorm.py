"""Synchronised BatchNorm over three ranks with a device each: values, waits and late errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pretend

PROGRAM = """
import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from pretend_devices import recording_work
from torch import nn

from stepwrap.runner import launch
from stepwrap.wrappers import SynchronizedBatchNorm2d


def compare(dtype, mean=0.0, **options):
    "Return the largest difference from BatchNorm2d on the whole batch, waits and launches."
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3, momentum=options.get("momentum", 0.1)).double()
    plain.weight.data.uniform_()
    layer = SynchronizedBatchNorm2d(3, **options).cuda()
    layer = layer.double() if dtype is torch.float64 else layer
    layer.load_state_dict(plain.state_dict())
    errors = []
    for _ in range(3):
        whole = (torch.randn(5, 3, 4, 4) + mean).to(dtype).double()
        cotangent = torch.randn(5, 3, 4, 4).to(dtype).double()
        # Rank 1 has no samples.
        samples = (slice(0, 2), slice(2, 2), slice(2, 5))[rank]
        x, dy = (tensor[samples].to(dtype).cuda() for tensor in (whole, cotangent))
        x.requires_grad_()
        whole.requires_grad_()
        expected = plain(whole)
        expected.backward(cotangent)
        with recording_work() as work:
            y = layer(x)
            y.backward(dy)
        pairs = [(y, expected[samples]), (x.grad, whole.grad[samples])]
        pairs += zip(layer.buffers(), plain.buffers())
        errors += [
            (value.double().cpu() - right).abs().max().item()
            for value, right in pairs
            if value.numel()
        ]
    gradients = torch.stack([layer.weight.grad, layer.bias.grad]).double().cpu()
    dist.all_reduce(gradients)
    expected = torch.stack([plain.weight.grad, plain.bias.grad])
    errors.append((gradients - expected).abs().max().item())
    return max(errors), work.waits, sum(work.launches.values())


def values():
    return {
        "float32": compare(torch.float32),
        "precision fp64": compare(torch.float32, 64.0, precision="fp64"),
        "float64": compare(torch.float64, 1000.0),
        "bfloat16": compare(torch.bfloat16),
        "momentum None": compare(torch.float32, momentum=None),
    }


def left_out():
    "Return the means of the ranks after rank 2 and after all ranks were left out."
    x = torch.full((4, 3, 2, 2), float(dist.get_rank() + 1))
    x[:, :, 0] += 1
    x = x.cuda().requires_grad_()
    layer = SynchronizedBatchNorm2d(3, momentum=1.0).cuda()
    means = []
    for uncounted_ranks in ([], [], [2], [0, 1, 2]):
        layer.leaves_out = dist.get_rank() in uncounted_ranks
        y = layer(x)
        y.sum().backward()
        means.append(layer.running_mean[0].item())
    return means, layer.num_batches_tracked.item(), y.isfinite().all().item()


def different_order(layers, x):
    return layers[dist.get_rank() % 2](x)


def one_value(layers, x):
    return layers[0](x[: int(dist.get_rank() == 0), :, :1, :1])


def failure(layers, x):
    return layers[0](x[:, :2] if dist.get_rank() else x)


def gradients_of_one_rank(layers, x):
    # The input of rank 1 required a gradient in the calls before, that of rank 0 never.
    layers[1](x if dist.get_rank() else x.detach()).sum().backward()
    y = layers[1](x.detach())
    if dist.get_rank():
        raise ValueError("rank 0 has an error now")
    return y


def mistakes():
    "Return the error of each mistake, and whether the output before it was NaN."
    x = torch.randn(4, 3, 2, 2).cuda().requires_grad_()
    results = {}
    for mistake in (different_order, one_value, failure, gradients_of_one_rank):
        group = dist.new_group(timeout=timedelta(seconds=20))
        layers = [SynchronizedBatchNorm2d(3, process_group=group).cuda() for _ in range(2)]
        for layer in layers:
            layer(x).sum().backward()
        output = None
        try:
            output = mistake(layers, x)
            torch.cuda.synchronize()
            layers[0](x)
        except Exception as error:
            is_nan = None if output is None else output.isnan().all().item()
            results[mistake.__name__] = f"{type(error).__name__}: {error}", is_nan
    return results


def main():
    assert dist.get_backend_config() == "cpu:gloo,cuda:nccl"
    return globals()[sys.argv[1]]()


if __name__ == "__main__":
    print(json.dumps(launch(main, nproc=3, oversubscribe=True, timeout_s=60)))
"""


def _run(folder: Path, function: str) -> dict[str, Any]:
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py", function],
        cwd=folder,
        env={**os.environ, "PRETEND_CUDA": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


def test_values_without_waits(tmp_path: Path) -> None:
    bounds = {"float64": 1e-11, "bfloat16": 2e-2}
    for rank, results in _run(tmp_path, "values").items():
        for name, (error, waits, launches) in results.items():
            assert error <= bounds.get(name, 1e-6), name
            assert waits == [], name
            # A rank without samples merges the moments of the others by ordinary operations.
            if rank != "1":
                assert launches <= (80 if name != "precision fp64" else 105), name


def test_ranks_that_are_left_out(tmp_path: Path) -> None:
    for means, num_batches, is_finite in _run(tmp_path, "left_out").values():
        # The means of the ranks are 1.5, 2.5 and 3.5.
        assert means == [2.5, 2.5, 2.0, 2.0]
        assert num_batches == 3
        assert is_finite


def test_mistakes_are_nan_and_then_an_error(tmp_path: Path) -> None:
    errors = _run(tmp_path, "mistakes")
    expected = {
        "different_order": ("CollectiveError", "[0, 2] and [1]", "different calls"),
        "one_value": ("ValueError", "more than 1 value"),
        "failure": ("CollectiveError", "failed on ranks [1, 2]"),
        "gradients_of_one_rank": ("CollectiveError", "requires a gradient"),
    }
    for mistake, facts in expected.items():
        message, is_nan = errors["0"][mistake]
        assert all(fact in message for fact in facts), message
        # One value has a finite output, its bias.
        assert is_nan or mistake == "one_value"
    assert "3 channels" in errors["1"]["failure"][0]
