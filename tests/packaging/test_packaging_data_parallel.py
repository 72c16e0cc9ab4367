"""The page on data parallel names what there is, and its code runs."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

import stepwrap.wrappers
from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import ReplicationCallbackDataParallel

PAGE = (Path(__file__).parents[2] / "docs/data_parallel.md").read_text()
SUBJECT = re.compile(
    r"Replication|Sync|Slave|Future|scatter|gather|replication|sync_|sbn|SingleDevice|"
    # Not those that split or separate a model.
    r"(?<!Sharded)(?<!SeparateDistributed)DataParallel"
)


def code(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return found


def test_it_names_every_public_name() -> None:
    named = set(re.findall(r"\w+", PAGE))
    offered = {name for name in stepwrap.wrappers.__all__ if SUBJECT.search(name)}
    # The page writes the classes of the layer as `SynchronizedBatchNorm1d`, `2d` and `3d`.
    short = {f"SynchronizedBatchNorm{dims}d" for dims in (2, 3)}
    assert offered - named - short == set()
    assert len(offered) > 15


def test_the_step_runs() -> None:
    names: dict[str, Any] = {}
    exec(code("python"), names)
    assert names["losses"]["loss"].isfinite()
    assert int(names["net"][1].num_batches_tracked) == 1


def test_the_callback_runs() -> None:
    names: dict[str, Any] = {"nn": nn, "partial": partial}
    exec(code("py"), names)
    wrapper = ReplicationCallbackDataParallel(names["Counts"](), device_ids=["cpu"] * 3)
    assert torch.allclose(wrapper(torch.ones(5, 2)), torch.full((5, 2), 0.2))


def test_the_wrappers_of_the_page_are_registered() -> None:
    assert yaml.safe_load(code("yaml"))["wrapper"]["sync_batchnorm"] is True
    assert all(MODEL_WRAPPERS.get(name) is not None for name in ("dp", "ddp"))
