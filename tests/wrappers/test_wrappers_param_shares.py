"""Which of several optimizers has which parameters."""

from __future__ import annotations

import pytest
from torch import nn

from stepwrap.wrappers import SingleDevice
from stepwrap.wrappers.optimizers.param_groups import share_parameters


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"disc": nn.Linear(2, 2), "aux": nn.Linear(1, 1)})
        self.gen = nn.Linear(2, 2)


def test_parameters_are_shared_out_by_child_path_and_pattern() -> None:
    shares = share_parameters(SingleDevice(Gan()), {"gen": None, "disc": ["net.d*", "net.aux"]})
    assert {name: [one.name for one in share] for name, share in shares.items()} == {
        "gen": ["gen.weight", "gen.bias"],
        "disc": ["net.disc.weight", "net.disc.bias", "net.aux.weight", "net.aux.bias"],
    }


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"gen": None, "disc": None}, "no optimizer has net.aux.weight, net.aux.bias; every"),
        ({"gen": None, "dics": None}, "neither the model nor its net has a child 'dics'"),
        ({"gen": ["gne.*"], "disc": ["net"]}, r"gen: no parameter matches 'gne\.\*'; did you mean"),
        (
            {"gen": ["*"], "disc": ["net.disc"]},
            "gen and disc both have net.disc.weight, net.disc.b",
        ),
    ],
)
def test_every_trained_parameter_has_one_optimizer(
    chosen: dict[str, list[str] | None], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        share_parameters(Gan(), chosen)


def test_frozen_parameters_need_no_optimizer() -> None:
    model = Gan()
    model.net["aux"].requires_grad_(False)
    assert len(share_parameters(model, {"gen": None, "disc": None})["disc"]) == 2
