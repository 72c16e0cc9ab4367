"""The gates of an optimizer wrapper: their order, and the methods that change its counters."""

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepwrap.wrappers import OptimWrapper, OptimWrapperDict
from stepwrap.wrappers.features import optim_features
from stepwrap.wrappers.optimizers.gates import NO_GATE, FreezeGate, Gate


class Recorder(Gate):
    """A gate that records its calls, halves losses and leaves the gradients as they are."""

    def __init__(self, calls: list[str], name: str = "user") -> None:
        self.calls, self.name = calls, name

    def scale(self, loss: Tensor) -> Tensor:
        self.calls.append(f"{self.name} scales {loss.item():.0f}")
        return loss / 2

    def allows(self, optim_wrapper: Any) -> bool:
        self.calls.append(f"{self.name} allows")
        return True


class Guard:
    """A guard that records losses and which parameters have gradients."""

    def __init__(self, calls: list[str], parameters: list[nn.Parameter]) -> None:
        self.calls, self.parameters = calls, parameters

    def note(self, loss: Tensor) -> None:
        self.calls.append(f"guard gets {loss.item():.0f}")

    def allows(self, optim_wrapper: Any) -> bool:
        has_gradient = [parameter.grad is not None for parameter in self.parameters]
        self.calls.append(f"guard sees {has_gradient}")
        return True


def wrapped(count: int = 2, **options: Any) -> tuple[list[nn.Parameter], OptimWrapper]:
    parameters = [nn.Parameter(torch.ones(())) for _ in range(count)]
    return parameters, OptimWrapper(torch.optim.SGD(parameters, lr=0.1), **options)


@pytest.mark.parametrize("order", [*permutations(("guard", "freeze", "user"))])
def test_the_order_of_gates_is_not_that_in_which_they_are_set(order: tuple[str, ...]) -> None:
    parameters, optim = wrapped()
    calls: list[str] = []
    for name in order:
        if name == "guard":
            optim.guard = Guard(calls, parameters)
        elif name == "freeze":
            optim.gates.freeze = FreezeGate(lambda: 0, {1: parameters[:1]})
        else:
            optim.gates.append(Recorder(calls))
    optim.update_params(8 * sum(parameters))
    assert calls == ["guard gets 16", "user scales 16", "user allows", "guard sees [False, True]"]
    assert [parameter.item() for parameter in parameters] == pytest.approx([1.0, 0.6])


def test_a_gate_that_leaves_its_slot_in_a_call_does_not_affect_the_others() -> None:
    parameters, optim = wrapped()
    calls: list[str] = []
    optim.gates.freeze = FreezeGate(lambda: 1, {1: parameters})
    optim.guard = Guard(calls, parameters)
    # The check of the first update leaves in the same call.
    optim.update_params(sum(parameters))
    assert calls[-1] == "guard sees [True, True]"
    optim.guard = None
    assert optim.gates.active == ()
    assert optim.gates.freeze is optim.gates.first_update is optim.gates.guard is NO_GATE


def test_several_gates_of_a_user() -> None:
    parameters, optim = wrapped()
    calls: list[str] = []
    for name in ("first", "second"):
        optim.gates.append(Recorder(calls, name))
    optim.update_params(8 * sum(parameters))
    expected = ["second scales 16", "first scales 8", "first allows", "second allows"]
    assert calls == expected


def test_an_unknown_slot() -> None:
    _, optim = wrapped()
    with pytest.raises(AttributeError, match="no slot 'frozen'"):
        optim.gates.frozen = Gate()  # type: ignore[attr-defined]


def test_a_micro_batch_that_is_left_out() -> None:
    parameters, optim = wrapped(accumulative_counts=2, loss_weight="samples")
    optim.weigh(torch.zeros(3))
    assert optim.last_weight == 3
    optim.skip_micro_batch()
    assert (optim.inner_count, optim.last_weight) == (1, 0.0)
    assert optim.should_update() is False
    group = OptimWrapperDict(weighted=optim, other=wrapped(1)[1])
    group["weighted"].weigh(torch.zeros(3))
    group.skip_micro_batch()
    assert (group.inner_count, group.last_weight) == (1, 0.0)


def test_a_window_that_is_continued() -> None:
    """Without a restored count it is the number of batches, as with one."""
    for restored in (0, 5):
        parameters, optim = wrapped(accumulative_counts=3)
        optim.load_state_dict({**optim.state_dict(), "stepwrap.inner_count": restored})
        optim.continue_window(nn.Linear(1, 1), 5, 12)
        assert (optim.inner_count, optim.resumed_at, optim.window_length()) == (5, 3, 3)
        group = OptimWrapperDict(one=wrapped(accumulative_counts=3)[1])
        group.continue_window(nn.Linear(1, 1), 5, 12)
        assert group["one"].inner_count == 5


def test_counters_are_changed_by_methods() -> None:
    _, optim = wrapped()
    with pytest.raises(AttributeError):
        optim.inner_count = 3
    optim.count_micro_batch()
    assert optim.inner_count == 1


def test_counters_of_another_librarys_wrapper() -> None:
    """mmengine's wrapper has no methods for them, and may not have saved its count."""
    reason = "mmengine, the extra of that name, cannot be imported"
    mmengine = pytest.importorskip("mmengine.optim", reason=reason, exc_type=ImportError)
    optimizer = torch.optim.SGD(wrapped()[0], lr=0.1)
    optim = mmengine.OptimWrapper(optimizer, accumulative_counts=3)
    started: list[int] = []
    optim.initialize_count_status = lambda model, start, end: started.append(start)
    for restored in (0, 5):
        optim._inner_count = restored
        optim_features(optim).continue_window(nn.Linear(1, 1), 5, 12)
        assert (optim._inner_count, started.pop()) == (5, 3)
    optim_features(optim).skip_micro_batch()
    assert optim._inner_count == 6
    assert optim_features(optim).pop_empty_updates() == 0
    assert not optim_features(optim).can_close_window
