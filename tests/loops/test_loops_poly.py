"""The polynomial schedule with a minimum rate, compared with its formula and with torch's."""

import pytest
import torch
from hook_runs import rates
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler, PolynomialLR

from stepwrap.loops import PolyLR
from stepwrap.registry import PARAM_SCHEDULERS


def two_groups() -> SGD:
    param, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    return SGD([{"params": [param], "lr": 0.2}, {"params": [second], "lr": 0.05}])


def get_rates(scheduler: LRScheduler, steps: int) -> list[list[float]]:
    return rates(scheduler.optimizer, steps, scheduler)


@pytest.mark.parametrize("power", [0.9, 1.0, 2.0])
def test_it_ends_at_the_lowest_rate(power: float) -> None:
    scheduler = PARAM_SCHEDULERS.build(
        {"type": "PolyLR", "total_iters": 6, "power": power, "eta_min": 0.01},
        default_args={"optimizer": two_groups()},
    )
    for step, group_rates in enumerate(get_rates(scheduler, 9)):
        share = (1 - min(step, 6) / 6) ** power
        assert group_rates == pytest.approx([(lr - 0.01) * share + 0.01 for lr in (0.2, 0.05)])


def test_without_a_lowest_rate_it_is_torchs() -> None:
    ours = get_rates(PolyLR(two_groups(), 6, power=0.9), 9)
    theirs = get_rates(PolynomialLR(two_groups(), 6, power=0.9), 9)
    assert [rate for pair in ours for rate in pair] == pytest.approx(
        [rate for pair in theirs for rate in pair], abs=1e-15
    )


def test_it_resumes_from_its_state() -> None:
    expected = get_rates(PolyLR(two_groups(), 6, eta_min=0.01), 8)
    optimizer = two_groups()
    scheduler = PolyLR(optimizer, 6, eta_min=0.01)
    assert get_rates(scheduler, 3) == expected[:3]
    again = two_groups()
    second = PolyLR(again, 6, eta_min=0.01)
    second.load_state_dict(scheduler.state_dict())
    again.load_state_dict(optimizer.state_dict())
    assert get_rates(second, 5) == expected[3:]


def test_a_schedule_of_no_steps() -> None:
    with pytest.raises(ValueError, match="total_iters must .*>= 1, got 0"):
        PolyLR(two_groups(), 0)
