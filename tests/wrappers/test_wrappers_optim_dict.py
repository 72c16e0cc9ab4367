"""Several optimizers under one name."""

import pytest
import torch
from step_models import sgd
from torch import nn

from stepwrap.wrappers import OptimWrapper, OptimWrapperDict


def _members(counts: int = 1) -> OptimWrapperDict:
    def one(lr: float, count: int) -> OptimWrapper:
        weight = nn.Parameter(torch.ones(1))
        return OptimWrapper(torch.optim.SGD([weight], lr=lr, momentum=0.9), count)

    return OptimWrapperDict(gen=one(0.1, counts), disc=one(0.2, 1))


def _weight(wrapper: OptimWrapper) -> nn.Parameter:
    weight: nn.Parameter = wrapper.optimizer.param_groups[0]["params"][0]
    return weight


def test_mapping() -> None:
    group = _members()
    assert list(group) == list(group.keys()) == ["gen", "disc"]
    assert len(group) == 2
    assert "gen" in group
    assert group["gen"] is next(iter(group.values()))
    assert dict(group.items()) == {"gen": group["gen"], "disc": group["disc"]}
    names, members = repr(group).splitlines()[::2], repr(group).splitlines()[1::2]
    assert names == ["name: gen", "name: disc"]
    assert members == [repr(group["gen"]), repr(group["disc"])]


@pytest.mark.parametrize("name", ["update_params", "backward", "step", "optim_context"])
def test_methods_of_members_only(name: str) -> None:
    with pytest.raises(
        NotImplementedError, match=f"^`{name}` should be called by each optimizer separately"
    ):
        getattr(_members(), name)(torch.tensor(1.0))


def test_rates_and_groups() -> None:
    group = _members()
    assert group.get_lr() == {"gen.lr": [0.1], "disc.lr": [0.2]}
    assert group.get_momentum() == {"gen.momentum": [0.9], "disc.momentum": [0.9]}
    assert [len(groups) for groups in group.param_groups.values()] == [1, 1]
    assert set(group.param_groups) == {"gen", "disc"}


def test_zero_grad_forwards_its_arguments() -> None:
    group = _members()
    for wrapper in group.values():
        wrapper.backward(_weight(wrapper).sum())
    group.zero_grad(set_to_none=False)
    assert [_weight(wrapper).grad.item() for wrapper in group.values()] == [0, 0]
    group.zero_grad()
    assert [_weight(wrapper).grad for wrapper in group.values()] == [None, None]


def test_counters_reach_the_members() -> None:
    group = _members(counts=3)
    group["disc"].initialize_count_status(nn.Linear(1, 1), 0, 4)
    group.initialize_count_status(nn.Linear(1, 1), 0, 8)
    assert group["gen"].max_counts == 8
    assert group["gen"]._remainder_counts == 2
    assert group["disc"].max_counts == 4
    # Another training in the same process.
    group.initialize_count_status(nn.Linear(1, 1), 8, 16)
    assert group["gen"].max_counts == 16
    assert group["disc"].max_counts == 4


def test_should_update_is_any_members() -> None:
    group = _members(counts=2)
    group["gen"].update_params(_weight(group["gen"]).sum())
    assert group["gen"].should_update() is False
    group["disc"]._inner_count = 0
    assert group.should_update() is True
    assert group.inner_count == 1


def test_should_update_is_of_members_that_take_part() -> None:
    """Twice the discriminator, then the generator, each with windows of two."""
    group = _members(counts=2)
    group["disc"]._accumulative_counts = 2
    answers, updates = [], []
    for step in range(10):
        group.begin_batch()
        assert not group.should_update()
        name = "gen" if step % 3 == 2 else "disc"
        before = _weight(group[name]).item()
        group[name].update_params(_weight(group[name]).sum())
        answers.append((group.should_update(), group.should_update()))
        updates.append(_weight(group[name]).item() != before)
    assert answers == [(one, one) for one in updates]
    assert sum(updates) == 4


def test_should_update_of_steps_by_hand() -> None:
    group = _members()
    group.begin_batch()
    group["gen"].optimizer.step()
    assert group.should_update() is True
    group["gen"]._accumulative_counts = 2
    assert group.should_update() is False


def test_should_update_sees_a_window_that_ended_within_the_batch() -> None:
    group = _members(counts=2)
    for expected in (True, True, False):
        group.begin_batch()
        for _ in range(3 if expected else 0):
            group["gen"].update_params(_weight(group["gen"]).sum())
        assert group.should_update() is expected
    # A state that is loaded, and counts that are set, are no batch.
    for begin in (
        lambda: group.load_state_dict(group.state_dict()),
        lambda: group.initialize_count_status(nn.Linear(1, 1), 0, 8),
    ):
        group.begin_batch()
        begin()
        assert group.should_update() is True


def test_state_by_member() -> None:
    group = _members()
    for wrapper in group.values():
        wrapper.update_params(_weight(wrapper).sum())
    again = _members()
    again.load_state_dict(group.state_dict())
    assert [wrapper.inner_count for wrapper in again.values()] == [1, 1]
    assert again["gen"].optimizer.state_dict()["state"][0]["momentum_buffer"].item() == 1.0
    with pytest.raises(
        AssertionError, match=r"^Mismatched `state_dict`! cannot found other in .*gen"
    ):
        again.load_state_dict({"other": {}})
    with pytest.raises(KeyError, match="Cannot find other in OptimWrapperDict, it has .*'disc'"):
        again["other"]
    assert again.get("other") is None


def test_only_optimizer_wrappers() -> None:
    with pytest.raises(
        AssertionError,
        match="^`OptimWrapperDict` only accept OptimWrapper instance, but got gen: .*SGD",
    ):
        OptimWrapperDict(gen=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def test_a_member_may_have_no_gradients_in_a_step() -> None:
    """One backward for all, and the generator's turn comes later."""
    torch.manual_seed(0)
    parts = {name: nn.Linear(2, 1) for name in ("generator", "discriminator")}
    optims = OptimWrapperDict(**{name: sgd(part) for name, part in parts.items()})
    before = parts["generator"].weight.clone()
    for step in range(3):
        loss = parts["discriminator"](torch.ones(1, 2)).sum()
        if step == 2:
            loss = loss + parts["generator"](torch.ones(1, 2)).sum()
        optims["discriminator"].backward(loss)
        for optim in optims.values():
            optim.step()
        optims.zero_grad()
        assert torch.equal(parts["generator"].weight, before) == (step < 2)
