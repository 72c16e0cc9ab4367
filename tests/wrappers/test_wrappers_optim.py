"""The optimizer wrapper: windows, clipping, rates, state."""

import copy
import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from step_models import batches, classifier, flat, joined, mlp, sgd, train
from torch import Tensor, nn

from stepwrap.registry import OPTIM_WRAPPERS
from stepwrap.wrappers import AmpOptimWrapper, OptimWrapper, OptimWrapperDict, SingleDevice


def _parameter(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def _sgd(*parameters: nn.Parameter, lr: float = 0.1, **kwargs: Any) -> OptimWrapper:
    return OptimWrapper(torch.optim.SGD(parameters or [_parameter()], lr=lr), **kwargs)


def _windows(wrapper: OptimWrapper, count: int) -> tuple[list[float], list[int]]:
    """Return the divisor of each micro-batch's loss and the counts at which updates happen."""
    divisors, updates = [], []
    (weight,) = wrapper.optimizer.param_groups[0]["params"]
    for _ in range(count):
        loss = weight.sum() * 0 + 6.0
        divisors.append(6.0 / wrapper.scale_loss(loss).item())
        assert wrapper.should_sync() == _ends(wrapper)
        wrapper.update_params(loss)
        if wrapper.should_update():
            updates.append(wrapper.inner_count)
    return divisors, updates


def _ends(wrapper: OptimWrapper) -> bool:
    later = copy.copy(wrapper)
    later.count_micro_batch()
    return later.should_update()


@pytest.mark.parametrize(
    ("counts", "end", "micro_batches", "divisors", "updates"),
    [
        (3, 10, 10, [3] * 9 + [1], [3, 6, 9, 10]),
        (3, 8, 8, [3] * 6 + [2, 2], [3, 6, 8]),
        (3, 9, 9, [3] * 9, [3, 6, 9]),
        (3, 6, 9, [3] * 9, [3, 6, 9]),
        (3, None, 7, [3] * 7, [3, 6]),
        (1, None, 2, [1, 1], [1, 2]),
        (np.int64(2), None, 5, [2] * 5, [2, 4]),
    ],
)
def test_windows(
    counts: int, end: int | None, micro_batches: int, divisors: list[float], updates: list[int]
) -> None:
    wrapper = _sgd(accumulative_counts=counts)
    if end is not None:
        wrapper.initialize_count_status(nn.Linear(1, 1), 0, end)
        # mmengine's tests read these names.
        assert (wrapper._max_counts, wrapper._remainder_counts) == (end, end % 3)
    assert _windows(wrapper, micro_batches) == (divisors, updates)


def test_resume_inside_a_window(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = _sgd(accumulative_counts=3)
    with caplog.at_level(logging.WARNING):
        wrapper.initialize_count_status(nn.Linear(1, 1), 4, 9)
    assert "Resumed iteration number is not divisible" in caplog.text
    assert _windows(wrapper, 5) == ([2, 2, 3, 3, 3], [6, 9])


def test_batch_norm_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _sgd().initialize_count_status(nn.BatchNorm1d(2), 0, 8)
        assert not caplog.records
        wrapper = _sgd(accumulative_counts=2)
        both = OptimWrapperDict(a=wrapper, b=_sgd(accumulative_counts=2))
        # Also after a rollback, and with several optimizers, once.
        for _ in range(2):
            both.initialize_count_status(nn.BatchNorm1d(2), 0, 8)
            wrapper.initialize_count_status(nn.BatchNorm1d(2), 0, 8)
    (message,) = caplog.messages
    assert re.search("single micro-batches, .*accumulative_counts=2", message)


@on_ranks(2)
def test_one_rank_warns_of_batch_norm() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("stepwrap.wrappers")
    logger.addHandler(handler)
    _sgd(accumulative_counts=2).initialize_count_status(nn.BatchNorm1d(2), 0, 8)
    logger.removeHandler(handler)
    assert len(records) == 1 - dist.get_rank()


@pytest.mark.parametrize("clip", [None, {"max_norm": 0.05}, {"type": "value", "clip_value": 0.01}])
def test_accumulation_equals_the_big_batch(clip: dict[str, Any] | None) -> None:
    model, plain = classifier(), mlp()
    wrapper = sgd(model, accumulative_counts=4, clip_grad=clip, lr=1.0)
    data = batches(4)
    train(model, data, wrapper)
    inputs, target = joined(data)
    nn.functional.cross_entropy(plain(inputs), target).backward()
    norm = None
    if clip is not None and "max_norm" in clip:
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    elif clip is not None:
        nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    assert torch.allclose(flat(model), flat(plain), rtol=0, atol=1e-6)
    if norm is None:
        assert wrapper.grad_norm is None
    else:
        assert torch.allclose(wrapper.grad_norm, norm)


def test_update_order_and_arguments() -> None:
    calls: list[Any] = []

    class Recorder(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            calls.append(("step", closure, self.param_groups[0]["params"][0].grad.item()))

        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append(("zero_grad", set_to_none))

    weight = _parameter(2.0)
    wrapper = OptimWrapper(Recorder([weight], lr=0.1))
    wrapper.update_params(weight.sum(), {"closure": "c"}, {"set_to_none": False})
    assert calls == [("step", "c", 1.0), ("zero_grad", False)]


def test_gradients_are_cleared_after_the_step() -> None:
    weight = _parameter()
    wrapper = _sgd(weight, lr=0.5)
    wrapper.update_params(weight.sum())
    assert weight.grad is None
    assert weight.item() == 0.5
    wrapper.update_params(weight.sum(), zero_kwargs={"set_to_none": False})
    assert weight.grad.item() == 0


def test_settings_are_not_changed() -> None:
    clip = {"type": "norm", "max_norm": 1.0}
    groups = [{"params": [_parameter()]}, {"params": [_parameter()], "lr": 0.2}]
    wrapper = OptimWrapper(torch.optim.SGD(groups, lr=0.1), clip_grad=clip)
    assert clip == {"type": "norm", "max_norm": 1.0}
    state = wrapper.state_dict()
    keys = set(state)
    wrapper.load_state_dict(state)
    ours = {"base_param_settings", _COUNT, "stepwrap.optimizer"}
    assert set(state) == keys == {"state", "param_groups", *ours}


_COUNT = "stepwrap.inner_count"


def test_two_groups() -> None:
    groups = [{"params": [_parameter()]}, {"params": [_parameter()], "lr": 0.2, "momentum": 0.5}]
    wrapper = OptimWrapper(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    assert wrapper.get_lr() == {"base_lr": [0.1], "lr": [0.1, 0.2]}
    assert wrapper.get_momentum() == {"momentum": [0.9, 0.5]}
    assert len(wrapper.param_groups) == 3
    assert torch.equal(wrapper.param_groups[-1]["params"], torch.tensor([0.0]))
    for group in wrapper.param_groups:
        group["lr"] /= 2
    state = wrapper.state_dict()
    again = OptimWrapper(torch.optim.SGD([dict(g) for g in groups], lr=0.1, momentum=0.9))
    again.load_state_dict(state)
    assert again.get_lr() == wrapper.get_lr() == {"base_lr": [0.05], "lr": [0.05, 0.1]}


def test_rates_of_one_group() -> None:
    assert _sgd().get_lr() == {"lr": [0.1]}
    assert _sgd().get_momentum() == {"momentum": [0]}
    adam = OptimWrapper(torch.optim.AdamW([_parameter()], lr=0.1, betas=(0.8, 0.9)))
    assert adam.get_momentum() == {"momentum": [0.8]}
    rprop = OptimWrapper(torch.optim.Rprop([_parameter()], lr=0.1))
    assert rprop.get_momentum() == {"momentum": [0.0]}


def test_state_restores_the_count_and_the_optimizer() -> None:
    model = classifier()
    wrapper = sgd(model, accumulative_counts=2)
    train(model, batches(5), wrapper)
    again = sgd(classifier(), accumulative_counts=2, lr=9.0)
    again.load_state_dict(wrapper.state_dict())
    assert again.inner_count == 5
    assert again.get_lr() == {"lr": [0.1]}
    # The gradients of the open window are lost; its remaining batches are averaged alone.
    assert again.scale_loss(torch.tensor(1.0)).item() == 1.0
    bare = torch.optim.SGD(model.parameters(), lr=0.3)
    again.load_state_dict(bare.state_dict())
    assert again.inner_count == 5
    assert again.get_lr() == {"lr": [0.3]}


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"accumulative_counts": 0}, AssertionError, "^_accumulative_counts at least greater than"),
        ({"accumulative_counts": 1.5}, TypeError, "accumulative_counts must be an int, got 1.5"),
        ({"accumulative_counts": 2.0}, TypeError, "accumulative_counts must be an int, got 2.0"),
        ({"accumulative_counts": True}, TypeError, "accumulative_counts must be an int, got True"),
        ({"accumulative_counts": "2"}, TypeError, "accumulative_counts must be an int, got '2'"),
        ({"clip_grad": {}}, AssertionError, "^If `clip_grad` is not None, it should be a `dict`"),
        ({"clip_grad": 1.0}, AssertionError, "^If `clip_grad` is not None, it should be a `dict`"),
        ({"clip_grad": {"type": "norm"}}, AssertionError, "`clip_grad` should contain .*max_norm"),
        (
            {"clip_grad": {"norm_type": 1.0}},
            AssertionError,
            "at least 'max_norm', got {'norm_type'",
        ),
        ({"clip_grad": {"type": "l2", "max_norm": 1}}, ValueError, "^type of clip_grad should be"),
        ({"clip_grad": {"max_nrm": 1}}, TypeError, "did you mean max_norm"),
        ({"clip_grad": {"type": "value", "max_norm": 1}}, TypeError, "no argument 'max_norm'"),
    ],
)
def test_wrong_settings(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _sgd(**kwargs)


@pytest.mark.parametrize(("counts", "error"), [(0, AssertionError), (1.5, TypeError)])
def test_the_number_of_micro_batches_is_checked_when_it_changes(
    counts: Any, error: type[Exception]
) -> None:
    wrapper = _sgd(accumulative_counts=2)
    with pytest.raises(error, match=f"accumulative_counts .*got {counts}"):
        wrapper.accumulate(counts)
    assert wrapper.accumulative_counts == 2


def _means(model: SingleDevice, sizes: list[int], data: list[Any]) -> Tensor:
    """Return the weights after one update per number of batches, each with the plain mean."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    batch = iter(data)
    for size in sizes:
        losses = [model(*next(batch), mode="loss")["loss"] for _ in range(size)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize("loss_weight", [None, "samples"])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_new_number_of_micro_batches_counts_from_the_next_window(
    loss_weight: str | None, resumes: bool
) -> None:
    data = [[inputs.double(), target] for inputs, target in batches(16)]

    def make() -> tuple[SingleDevice, OptimWrapper]:
        model = SingleDevice(classifier(torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        optim = OptimWrapper(optimizer, accumulative_counts=2, loss_weight=loss_weight)
        optim.initialize_count_status(model, 0, 16)
        optim.begin_pass(0, 16)
        return model, optim

    model, optim = make()
    updates = []
    for at, batch in enumerate(data):
        if at == 6:
            optim.accumulate(4)
        if at == 11:
            with pytest.raises(RuntimeError, match="between two windows, .*1 of the 4"):
                optim.accumulate(3)
        if resumes and at in (10, 12):
            saved, weights, before = optim.state_dict(), model.state_dict(), optim
            gradients = [parameter.grad for parameter in model.parameters()]
            model, optim = make()
            model.load_state_dict(weights)
            optim.load_state_dict(copy.deepcopy(saved))
            optim.continue_window(model, 10, 16)
            assert optim.inner_count == at
            optim.begin_pass(0, 16)
            optim.window_weight = before.window_weight
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
        model.train_step(batch, optim)
        if optim.should_update():
            updates.append(optim.inner_count)
    assert updates == [2, 4, 6, 10, 14, 16]
    expected = _means(SingleDevice(classifier(torch.float64)), [2, 2, 2, 4, 4, 2], data)
    torch.testing.assert_close(flat(model), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "clip"),
    [(None, {"clip_value": 0.5}), ("float16", None), ("float16", {"max_norm": 0.5})],
)
@pytest.mark.parametrize("fused", [True, False])
def test_updates_without_gradients_are_skipped_and_counted(
    dtype: str | None, clip: dict[str, Any] | None, fused: bool
) -> None:
    weight, other = _parameter(), _parameter()
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    plain = torch.optim.AdamW([expected := _parameter()], lr=0.1, fused=fused)
    optim = OptimWrapper(optimizer, clip_grad=clip)
    if dtype is not None:
        optim = AmpOptimWrapper(optimizer, clip_grad=clip, dtype=dtype)
    for param, update in ((weight, True), (other, False), (other, False), (weight, True)):
        optim.update_params(param.sum() * 0.25)
        if update:
            expected.grad = torch.full_like(expected, 0.25)
            plain.step()
    assert optim.empty_updates == 2
    assert torch.equal(weight, expected)


def test_clip_value_without_a_type_clips_by_value() -> None:
    weight = _parameter()
    wrapper = _sgd(weight, lr=1.0, clip_grad={"clip_value": 0.2})
    before = weight.detach().clone()
    wrapper.update_params(weight.sum() * 100)
    torch.testing.assert_close(weight.detach(), before - 0.2)


def test_a_config_is_not_an_optimizer() -> None:
    with pytest.raises(TypeError, match=r"must .*torch\.optim\.Optimizer, got dict"):
        OptimWrapper({"type": "SGD"})


def test_non_finite_norm_can_be_an_error() -> None:
    weight = _parameter()
    wrapper = _sgd(weight, clip_grad={"max_norm": 1.0, "error_if_nonfinite": True})
    with pytest.raises(RuntimeError, match="non-finite"):
        wrapper.update_params(weight.sum() * float("inf"))


def test_frozen_and_unused_parameters_are_not_clipped() -> None:
    used, frozen, unused = _parameter(), _parameter().requires_grad_(False), _parameter()
    wrapper = _sgd(used, frozen, unused, clip_grad={"max_norm": 1.0})
    wrapper.update_params((used * 3).sum())
    assert wrapper.grad_norm.item() == 3.0


def test_no_sync_is_used_only_if_needed() -> None:
    entered: list[int] = []

    class Engine(nn.Linear):
        def no_sync(self) -> torch.autograd.profiler.record_function:
            entered.append(wrapper.inner_count)
            return torch.autograd.profiler.record_function("no_sync")

    def step(loss: Tensor) -> None:
        with wrapper.optim_context(model):
            pass
        wrapper.update_params(loss)

    model = Engine(1, 1)
    wrapper = sgd(model, accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 5)
    for _ in range(5):
        step(model.weight.sum())
    assert entered == [0, 1, 3]
    wrapper = sgd(model)
    step(model.weight.sum())
    assert entered == [0, 1, 3]
    with sgd(model, accumulative_counts=2).optim_context(nn.Linear(1, 1)):
        pass


def test_arguments_of_clipping_are_an_attribute() -> None:
    model = nn.Linear(2, 2)
    assert sgd(model).clip_grad_kwargs is None
    clip = {"type": "norm", "max_norm": 0.5}
    assert sgd(model, clip_grad=clip).clip_grad_kwargs == {"max_norm": 0.5}


def test_name_defaults_and_text() -> None:
    wrapper = _sgd()
    assert OPTIM_WRAPPERS.get("OptimWrapper") is OptimWrapper
    assert wrapper.defaults is wrapper.optimizer.defaults
    assert "accumulative_counts=1" in repr(wrapper)


def test_the_state_of_another_optimizer_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    state = OptimWrapper(torch.optim.AdamW(parameters)).state_dict()
    with pytest.raises(ValueError, match="optimizer is SGD, .*state .*AdamW"):
        OptimWrapper(torch.optim.SGD(parameters, lr=0.1)).load_state_dict(state)


@pytest.mark.parametrize("kind", [OptimWrapper, AmpOptimWrapper])
def test_an_update_without_gradients(kind: Any) -> None:
    weight, other = _parameter(), _parameter()
    optim = kind(torch.optim.SGD([weight], lr=0.1), accumulative_counts=2)
    # A window may begin with a loss that does not reach its parameters.
    optim.update_params(other.sum())
    with pytest.raises(RuntimeError, match="no parameter .*SGD .*after wrapping"):
        optim.update_params(other.sum())
    optim.update_params(weight.sum())
    optim.update_params(other.sum())
    assert weight.item() == pytest.approx(0.95)
    for _ in range(2):
        # In later updates gradients may be missing.
        optim.update_params(other.sum())


def test_frozen_parameters_need_no_gradient() -> None:
    frozen, other = _parameter().requires_grad_(False), _parameter()
    optim = OptimWrapper(torch.optim.SGD([{"params": [frozen]}], lr=0.1))
    optim.update_params(other.sum())
    frozen.requires_grad_(True)
    with pytest.raises(RuntimeError, match="no parameter of SGD .*gradient"):
        optim.update_params(other.sum())
    half = OptimWrapper(torch.optim.SGD([{"params": [frozen]}, {"params": [other]}], lr=0.1))
    half.update_params(other.sum())


def test_a_resumed_wrapper_checks_gradients_again() -> None:
    weight = _parameter()
    saved_wrapper = _sgd(weight, accumulative_counts=2)
    for _ in range(3):
        saved_wrapper.update_params(weight.sum())
    optim = _sgd(weight, accumulative_counts=2)
    optim.load_state_dict(saved_wrapper.state_dict())
    weight.grad = None
    optim.step()
    optim.update_params(weight.sum())
    later = _sgd(weight)
    later.load_state_dict(saved_wrapper.state_dict())
    with pytest.raises(RuntimeError, match="no parameter of SGD .*gradient"):
        later.update_params(_parameter().sum())


def _members(counts: int = 1) -> OptimWrapperDict:
    def one(lr: float, count: int) -> OptimWrapper:
        weight = nn.Parameter(torch.ones(1))
        return OptimWrapper(torch.optim.SGD([weight], lr=lr, momentum=0.9), count)

    return OptimWrapperDict(gen=one(0.1, counts), disc=one(0.2, 1))


def _weight(wrapper: OptimWrapper) -> nn.Parameter:
    return wrapper.optimizer.param_groups[0]["params"][0]


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
    # Start another training in the same process.
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
    """The discriminator steps twice, then the generator, each with windows of two."""
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
    assert answers == [(expected, expected) for expected in updates]
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
    # Loading a state or setting the counts does not count a batch.
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
    with pytest.raises(AssertionError, match="^Mismatched `state_dict`! .*other .*gen"):
        again.load_state_dict({"other": {}})
    with pytest.raises(KeyError, match="find other in OptimWrapperDict, .*'disc'"):
        again["other"]
    assert again.get("other") is None


def test_only_optimizer_wrappers() -> None:
    with pytest.raises(
        AssertionError,
        match="^`OptimWrapperDict` only accept .*gen: .*SGD",
    ):
        OptimWrapperDict(gen=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def test_a_member_may_have_no_gradients_in_a_step() -> None:
    """One backward serves all members; the generator steps later."""
    torch.manual_seed(0)
    members = {name: nn.Linear(2, 1) for name in ("generator", "discriminator")}
    optims = OptimWrapperDict(**{name: sgd(member) for name, member in members.items()})
    before = members["generator"].weight.clone()
    for step in range(3):
        loss = members["discriminator"](torch.ones(1, 2)).sum()
        if step == 2:
            loss = loss + members["generator"](torch.ones(1, 2)).sum()
        optims["discriminator"].backward(loss)
        for optim in optims.values():
            optim.step()
        optims.zero_grad()
        assert torch.equal(members["generator"].weight, before) == (step < 2)
