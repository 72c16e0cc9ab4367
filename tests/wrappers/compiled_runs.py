"""Training with compiled and eager steps, and changes between steps."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from stepwrap.wrappers import OptimWrapper, SupervisedModel, wrap_model
from stepwrap.wrappers import compile_step as compile_wrapper

STEPS = 24
CHANGED_AT = 8
Change = Callable[[Any, OptimWrapper], object]


class Net(nn.Module):
    sign = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(6, 6), nn.Linear(6, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(self.first(x))) * self.scale

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.sign


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        wide = nn.Conv2d(4, 4, 3, padding=1)
        layers = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), wide]
        super().__init__(*layers, nn.Flatten(), nn.Linear(24, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def batch_at(index: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(3, (8,), generator=generator)


def train(
    compiled: bool,
    net: Callable[[], nn.Module] = Net,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    before_step: Callable[[int, Any, OptimWrapper], object] = lambda *_: None,
    around: Callable[[int], AbstractContextManager[Any]] = lambda _: nullcontext(),
    *,
    dtype: torch.dtype = torch.float64,
    make_batch: Callable[[int, torch.dtype], Any] = batch_at,
    data: list[Any] | None = None,
    wrap: Callable[..., OptimWrapper] = OptimWrapper,
    make: Callable[[Any], OptimWrapper] | None = None,
    device: str = "cpu",
    **options: Any,
) -> tuple[dict[str, Tensor], list[float], Any]:
    """Return weights and optimizer state after the steps, their losses, and the wrapper.

    Args:
        data: the batches (default: `make_batch`).
        make: creates the optimizer wrapper of a model, instead of `optimizer` and `wrap`.
        options: options of `compile_step`.
    """
    torch.manual_seed(0)
    random.seed(0)
    model_net = net().to(dtype)
    model = (
        model_net
        if hasattr(model_net, "losses")
        else SupervisedModel(model_net, nn.CrossEntropyLoss())
    )
    wrapper: Any = wrap_model(None, model, device=device)
    if compiled:
        compile_wrapper(wrapper, **{"backend": "eager", "min_steps": 0, **options})
    optim = wrap(optimizer(model.parameters())) if make is None else make(model)
    wrapper.train()
    losses = []
    with classes_restored():
        for index in range(STEPS if data is None else len(data)):
            before_step(index, model, optim)
            batch = make_batch(index, dtype) if data is None else data[index]
            with around(index):
                logs = wrapper.train_step(batch, optim)
            losses.append(float(logs["loss"]))
    state = dict(model.state_dict())
    for index, entries in optim.optimizer.state_dict()["state"].items():
        state |= {f"{index}.{k}": v for k, v in entries.items() if isinstance(v, Tensor)}
    return state, losses, wrapper


def at(changes: dict[int, Change]) -> Any:
    """Return a function that changes the training before some steps."""

    def before_step(index: int, model: Any, optim: OptimWrapper) -> None:
        if index in changes:
            changes[index](model, optim)

    return before_step


def steps_compiled(wrapper: Any) -> int:
    """Return the number of steps run by compiled programs."""
    return sum(program._uses for program in wrapper.batch_runner.programs)


def assert_same(tolerance: float, *args: Any, **options: Any) -> Any:
    """Train both ways; return the wrapper with the compiled step."""
    usual, usual_losses, _ = train(False, *args, **options)
    compiled, losses, wrapper = train(True, *args, **options)
    assert list(usual) == list(compiled)
    # A program for a GPU keeps step counts on the GPU.
    close = {"rtol": tolerance, "atol": tolerance, "check_device": False}
    torch.testing.assert_close(compiled, usual, **close)
    assert losses == pytest.approx(usual_losses, rel=tolerance, abs=tolerance, nan_ok=True)
    return wrapper


def weight(model: Any) -> nn.Parameter:
    return next(model.parameters())


def orthonormal(model: Any, _: OptimWrapper) -> None:
    weight(model).data = torch.linalg.qr(weight(model).data)[0]


def transposed(model: Any, _: OptimWrapper) -> None:
    weight(model).data = weight(model).data.t()


def moved(model: Any, _: OptimWrapper) -> None:
    weight(model).data = weight(model).data.clone()


def clear_state(_: Any, optim: OptimWrapper) -> None:
    optim.optimizer.state.clear()


def remove_state(model: Any, optim: OptimWrapper) -> None:
    optim.optimizer.state.pop(weight(model), None)


def change_state(_: Any, optim: OptimWrapper) -> None:
    for state in optim.optimizer.state.values():
        state.update({name: tensor.clone() / 2 for name, tensor in state.items()})


def not_in_a_group(_: Any, optim: OptimWrapper) -> None:
    removed = optim.optimizer.param_groups[0]["params"].pop(0)
    optim.optimizer.state.pop(removed, None)


def clamped(model: Any, optim: OptimWrapper) -> None:
    """Clamp the weights after each step by replacing the instance's `step`."""
    optimizer: Any = optim.optimizer
    usual = optimizer.step

    def step(*args: Any) -> None:
        usual(*args)
        for param in model.parameters():
            param.data.clamp_(-0.1, 0.1)

    optimizer.step = step


def hooked_late(model: Any, _: OptimWrapper) -> None:
    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    if weight(model).requires_grad:
        weight(model).register_post_accumulate_grad_hook(halve)


def hooked(model: Any, _: OptimWrapper) -> None:
    if weight(model).requires_grad:
        weight(model).register_hook(lambda gradient: gradient * 0.5)


def hooked_module(model: Any, _: OptimWrapper) -> None:
    model.net.first.register_forward_hook(lambda *args: args[2] * 2)


def hooked_everywhere(model: Any, _: OptimWrapper) -> None:
    def double(module: nn.Module, _: Any, output: Any) -> Any:
        return output * 2 if isinstance(module, nn.Linear) else None

    torch_module.register_module_forward_hook(double)


def hooked_optimizers(model: Any, _: OptimWrapper) -> None:
    def shrink(*_: Any) -> None:
        weight(model).data.mul_(0.9)

    torch_optimizer.register_optimizer_step_post_hook(shrink)


def other_attribute(model: Any, _: OptimWrapper) -> None:
    model.net.scale *= 0.9


def other_class_attribute(*_: Any) -> None:
    Net.sign = -1.0


def other_method(*_: Any) -> None:
    Net.hidden = lambda self, x: x  # type: ignore[method-assign]


def other_forward(*_: Any) -> None:
    nn.Linear.forward = lambda self, x: nn.functional.linear(x, self.weight)  # type: ignore[method-assign]


def frozen(model: Any, _: OptimWrapper) -> None:
    weight(model).requires_grad_(False)


def evaluated(model: Any, _: OptimWrapper) -> None:
    model.eval()


def replaced(model: Any, _: OptimWrapper) -> None:
    model.net.last = nn.Linear(6, 3, bias=False).double()


def other_rates(_: Any, optim: OptimWrapper) -> None:
    optim.optimizer.param_groups[0]["lr"] *= 0.5


def other_momentum(_: Any, optim: OptimWrapper) -> None:
    optim.optimizer.param_groups[0]["weight_decay"] = 0.1


def reset(*_: Any) -> None:
    torch.compiler.reset()


_CHANGEABLE = [(Net, "sign"), (Net, "hidden"), (nn.Linear, "forward")]
_ALL_MODULES = torch_module._global_forward_hooks
_ALL_OPTIMIZERS = torch_optimizer._global_optimizer_post_hooks
CHANGES: list[Change] = [
    *(orthonormal, transposed, moved, frozen, evaluated, replaced, reset),
    *(clear_state, remove_state, change_state, not_in_a_group, clamped),
    *(hooked, hooked_late, hooked_module, hooked_everywhere, hooked_optimizers),
    *(other_attribute, other_class_attribute, other_method, other_forward),
    *(other_rates, other_momentum),
]


@contextmanager
def classes_restored() -> Iterator[None]:
    """Undo changes of classes and of global hooks of modules and optimizers."""
    saved_members = [(owner, name, getattr(owner, name)) for owner, name in _CHANGEABLE]
    try:
        yield
    finally:
        for owner, name, value in saved_members:
            setattr(owner, name, value)
        _ALL_MODULES.clear()
        _ALL_OPTIMIZERS.clear()
