"""What is optimised and what is logged."""

import pytest
import torch

from stepwrap.wrappers import parse_losses


def test_sum_of_tensors_and_lists() -> None:
    total, logs = parse_losses(
        {"loss_cls": torch.tensor(1.0), "loss_list": [torch.tensor(2.0), torch.tensor([1.0, 5.0])]}
    )
    assert total.item() == 6
    assert list(logs) == ["loss", "loss_cls", "loss_list"]
    assert [value.item() for value in logs.values()] == [6, 1, 5]


def test_total_keeps_its_name() -> None:
    total, logs = parse_losses(
        {"loss": torch.tensor(1.0), "loss_b": torch.tensor(2.0), "acc": torch.tensor(9.0)}
    )
    assert total.item() == 3
    assert {name: value.item() for name, value in logs.items()} == {
        "loss": 3,
        "loss_b": 2,
        "acc": 9,
        "loss_raw": 1,
    }
    assert next(iter(logs)) == "loss"


@pytest.mark.parametrize("losses", [{"acc": torch.tensor(9.0)}, {}, {"loss": []}])
def test_no_loss(losses: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="no loss to optimise.*" + "".join(losses)):
        parse_losses(losses)


def test_logs_are_detached_and_the_total_is_not() -> None:
    weight = torch.ones(3, requires_grad=True)
    total, logs = parse_losses({"loss_a": weight, "loss_b": [weight * 2], "acc": weight.sum()})
    assert not any(value.requires_grad for value in logs.values())
    total.backward()
    assert torch.allclose(weight.grad, torch.ones(3))


def test_names_that_contain_loss_count() -> None:
    total, _ = parse_losses({"closs": torch.tensor(1.0), "my_losses": torch.tensor([2.0, 4.0])})
    assert total.item() == 4


def test_integers_are_logged_as_floats() -> None:
    _, logs = parse_losses({"loss": torch.tensor(1.0), "correct": torch.tensor([1, 2])})
    assert logs["correct"].item() == 1.5
    assert logs["correct"].dtype == torch.float32


def test_an_empty_list_is_ignored_if_there_is_another_loss() -> None:
    total, logs = parse_losses({"loss_a": torch.tensor(1.0), "loss_b": []})
    assert total.item() == 1
    assert list(logs) == ["loss", "loss_a"]


@pytest.mark.parametrize("value", [1.0, (torch.tensor(1.0),), [1.0], None])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="loss_x is not a tensor or list of tensors"):
        parse_losses({"loss_x": value})


def test_a_bare_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="must return a dict of losses, got Tensor"):
        parse_losses(torch.tensor(1.0))
