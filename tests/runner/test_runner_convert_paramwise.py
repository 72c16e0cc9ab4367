"""Options by parameter in converted configs give mmengine's numbers for any settings."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Its import fails if OpenCV does not find libGL.
    reason = "mmengine, the extra of that name, cannot be imported"
    pytest.importorskip("mmengine.runner", reason=reason, exc_type=ImportError)
    from mmengine.optim import build_optim_wrapper

from stepwrap.runner.convert.convert import convert_config
from stepwrap.wrappers import SynchronizedBatchNorm2d, param_groups


class ScaleNorm(nn.Module):
    """A layer that counts as a norm only because of its name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(()))


class Net(nn.Module):
    """Layers of all types that options distinguish, here or in mmengine."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(4, 8, 3),
                nn.Conv2d(4, 8, 3, groups=4),
                nn.Conv2d(4, 4, 1, groups=2),
                nn.Conv2d(1, 2, 1),
                nn.Conv1d(4, 4, 1, groups=4),
                nn.ConvTranspose2d(4, 4, 1, groups=4),
            ]
        )
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm2d(4),
                SynchronizedBatchNorm2d(4),
                nn.InstanceNorm1d(4, affine=True),
                nn.GroupNorm(2, 4),
                nn.LayerNorm(4),
                nn.LayerNorm((4, 4)),
                nn.RMSNorm(4),
                ScaleNorm(),
            ]
        )
        self.attention, self.lstm = nn.MultiheadAttention(4, 2), nn.LSTM(4, 4)
        self.nested = nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.LayerNorm(4)))
        self.token, self.bias = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1, 4))


NAMES = [name for name, _ in Net().named_parameters()]
MULTIPLES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0])
OPTIONS = ["bias_lr_mult", "bias_decay_mult", "norm_decay_mult", "flat_decay_mult"]
OPTIONS += ["dwconv_decay_mult"]


@st.composite
def keys(draw: st.DrawFn) -> str:
    """Return a part of a parameter's name in mmengine."""
    name = draw(st.sampled_from([*NAMES, ".token", ".bias"]))
    begin = draw(st.integers(0, len(name) - 1))
    return name[begin : draw(st.integers(begin + 1, len(name)))]


CUSTOM = st.fixed_dictionaries({}, optional={"lr_mult": MULTIPLES, "decay_mult": MULTIPLES})
PARAMWISE = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(OPTIONS, MULTIPLES),
        "custom_keys": st.dictionaries(keys() | st.just("of no parameter"), CUSTOM, max_size=3),
        "bypass_duplicate": st.booleans(),
    },
)


def options(groups: list[dict[str, Any]], model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return learning rate and weight decay by parameter name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


@given(PARAMWISE.filter(bool))
@example({"bias_decay_mult": 0.0})
@example({"bias_decay_mult": 0.0, "norm_decay_mult": 3.0, "dwconv_decay_mult": 0.5})
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.slow
def test_rates_and_decays_equal_mmengines(tmp_path: Path, paramwise: dict[str, Any]) -> None:
    model, optimizer = Net(), {"type": "SGD", "lr": 0.3, "weight_decay": 0.7}
    given_to_both = {"optimizer": optimizer, "paramwise_cfg": paramwise}
    (tmp_path / "mm.py").write_text(f"optim_wrapper = {given_to_both!r}\n")
    logging.disable(logging.WARNING)
    try:
        wrapper = build_optim_wrapper(model, given_to_both)
        ours = convert_config(tmp_path / "mm.py").config["optimizer"]
        groups = param_groups(
            model, lr=ours["lr"], weight_decay=ours["weight_decay"], paramwise=ours["paramwise"]
        )
    finally:
        logging.disable(logging.NOTSET)
    assert options(groups, model) == options(wrapper.optimizer.param_groups, model)
