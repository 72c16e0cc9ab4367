"""The worked steps of examples/custom_steps on every wrapper, and the same in plain PyTorch."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Must be imported before the modules of that folder.
import custom_step_folder
import distillation
import gan
import gradient_penalty
import lbfgs
import sam
import streams
import tbptt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softplus
from weights import apart, whole_weights

from stepwrap.configs.digits import Digits, SmallCNN
from stepwrap.wrappers import (
    OptimWrapper,
    OptimWrapperDict,
    Preparation,
    SeparateDistributedDataParallel,
    SingleDevice,
    StepDataParallel,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
    build_mesh,
    wrap_model,
)

FOLDER = custom_step_folder.FOLDER
Batches = Sequence[tuple[Tensor, ...]]
COUNT, SIZE = 4, 16
BASES: dict[str, Any] = {
    "single": SingleDevice,
    "dp": StepDataParallel,
    "ddp": StepDistributedDataParallel,
    "separate": SeparateDistributedDataParallel,
    "fsdp": StepFullyShardedDataParallel,
    "tensor": SingleDevice,
}
ALONE = ("single", "dp")
# A line search amplifies rounding differences.
TOLERANCE = defaultdict(lambda: 1e-12, lbfgs=1e-9)


def fixed_noise(self: Any, images: Tensor) -> Tensor:
    """Return noise that is the same on all ranks."""
    return torch.sin(7 * images.flatten(1)[:, 20:36]) - 0.5


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.9))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)


def searching(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=1.0, max_iter=5, line_search_fn="strong_wolfe")


def plain_gan(model: Any, batches: Batches) -> None:
    maker, judge = adam(model.generator.parameters()), adam(model.discriminator.parameters())
    for images, _ in batches:
        real, noise = images.flatten(1), fixed_noise(None, images)
        fake = model.generator(noise).sigmoid().detach()
        judge.zero_grad()
        loss = softplus(model.discriminator(fake)).mean()
        (loss + softplus(-model.discriminator(real)).mean()).backward()
        nn.utils.clip_grad_norm_(model.discriminator.parameters(), 1.0)
        judge.step()
        maker.zero_grad()
        softplus(-model.discriminator(model.generator(noise).sigmoid())).mean().backward()
        maker.step()


def windows(model: nn.Module, batches: Batches, length: int, backward: Any) -> None:
    """Train with AdamW and clipping; ``backward(batch)`` adds to the gradients."""
    weights = [param for param in model.parameters() if param.requires_grad]
    optimizer = adamw(weights)
    for at, batch in enumerate(batches):
        backward(batch, length)
        if (at + 1) % length == 0:
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()


def plain_gradient_penalty(model: Any, batches: Batches) -> None:
    def backward(batch: Any, length: int) -> None:
        images, labels = batch[0].clone().requires_grad_(), batch[1]
        losses = cross_entropy(model.net(images), labels, reduction="none")
        slopes = torch.autograd.grad(losses.sum(), images, create_graph=True)[0].flatten(1)
        ((losses + 0.1 * slopes.square().sum(1)).mean() / length).backward()

    windows(model, batches, 2, backward)


def plain_sam(model: Any, batches: Batches) -> None:
    weights = list(model.net.parameters())

    def gradients(net: Any, batch: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(cross_entropy(net(batch[0]), batch[1]), list(net.parameters()))

    def backward(batch: Any, length: int) -> None:
        slopes = gradients(model.net, batch)
        norm = torch.cat([slope.flatten() for slope in slopes]).norm()
        above = copy.deepcopy(model.net)
        with torch.no_grad():
            for weight, slope in zip(above.parameters(), slopes, strict=True):
                weight += 0.05 * slope / (norm + 1e-12)
        for weight, slope in zip(weights, gradients(above, batch), strict=True):
            weight.grad = slope / length + (0 if weight.grad is None else weight.grad)

    windows(model, batches, 2, backward)


def plain_distillation(model: Any, batches: Batches) -> None:
    def backward(batch: Any, length: int) -> None:
        scores, taught = model.net(batch[0]), model.teacher.net(batch[0]).detach()
        soft, aim = log_softmax(scores / 4, 1), log_softmax(taught / 4, 1)
        loss = 16 * kl_div(soft, aim, log_target=True, reduction="batchmean")
        ((loss + 0.3 * cross_entropy(scores, batch[1])) / length).backward()

    model.teacher.eval()
    windows(model, batches, 2, backward)


def plain_lbfgs(model: Any, batches: Batches) -> None:
    optimizer = searching(model.parameters())
    for images, labels in batches:

        def closure(images: Tensor = images, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model.net(images), labels)
            loss.backward()
            return loss

        optimizer.step(closure)


def plain_tbptt(model: Any, batches: Batches) -> None:
    states: list[Tensor] = []

    def backward(batch: Any, length: int) -> None:
        before = states[-1] if states and batch[2][0, 1] else None
        out, final_state = model.gru(model.characters(batch[0]), before)
        states.append(final_state.detach())
        cross_entropy(model.head(out).flatten(0, 1), batch[1].flatten()).backward()

    windows(model, batches, 1, backward)


@contextmanager
def doubles() -> Iterator[None]:
    """Use float64 for new tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def supervised() -> nn.Module:
    return SupervisedModel(SmallCNN(width=4, dropout=0.0), nn.CrossEntropyLoss())


def student() -> nn.Module:
    """Return a student without loading its teacher from a run."""
    model: Any = supervised()
    model.__class__ = distillation.Student
    model.teacher = teacher().requires_grad_(False)
    return model


def teacher() -> nn.Module:
    torch.manual_seed(1)
    return supervised()


def digit_batches() -> Batches:
    data = Digits("train", "float64")
    rows = [slice(at * SIZE, (at + 1) * SIZE) for at in range(COUNT)]
    return [(data.images[indices], data.labels[indices]) for indices in rows]


def text_batches() -> Batches:
    data = streams.SourceStreams(streams=SIZE, block=8, limit=COUNT * SIZE)
    samples = [data[at] for at in range(COUNT * SIZE)]
    batches = [samples[at * SIZE : (at + 1) * SIZE] for at in range(COUNT)]
    return [tuple(map(torch.stack, zip(*batch, strict=True))) for batch in batches]


@dataclass
class Step:
    """A worked step: its wrapper, its plain PyTorch version, and a model, optimizers and data."""

    wrapper: Any
    plain: Callable[[Any, Batches], None]
    model: Callable[[], nn.Module] = supervised
    optims: Callable[[Any], Any] = lambda model: OptimWrapper(
        adamw([param for param in model.parameters() if param.requires_grad]), 2, {"max_norm": 1.0}
    )
    batches: Callable[[], Batches] = digit_batches
    shard: list[str] = field(default_factory=lambda: ["Conv2d", "Linear"])
    plan: dict[str, str] = field(default_factory=lambda: {"net.7": "colwise_replicate_output"})


def _pair(model: Any) -> OptimWrapperDict:
    inner = model.module
    return OptimWrapperDict(
        generator=OptimWrapper(adam(inner.generator.parameters())),
        discriminator=OptimWrapper(
            adam(inner.discriminator.parameters()), clip_grad={"max_norm": 1.0}
        ),
    )


STEPS = {
    "gan": Step(
        gan.AdversarialSteps,
        plain_gan,
        gan.DigitGan,
        _pair,
        shard=["generator", "discriminator"],
        plan={
            "generator.0": "colwise",
            "generator.2": "rowwise",
            "discriminator.0": "colwise",
            "discriminator.2": "rowwise",
        },
    ),
    "gradient_penalty": Step(gradient_penalty.SmoothDDP, plain_gradient_penalty),
    "sam": Step(sam.SharpnessAwareDDP, plain_sam),
    "distillation": Step(distillation.DistillingDDP, plain_distillation, student),
    "lbfgs": Step(
        lbfgs.ClosureDDP,
        plain_lbfgs,
        batches=lambda: digit_batches()[:2],
        optims=lambda model: OptimWrapper(searching(model.parameters())),
    ),
    "tbptt": Step(
        tbptt.TruncatedDDP,
        plain_tbptt,
        lambda: streams.CharGRU(width=8),
        lambda model: OptimWrapper(adamw(model.parameters()), clip_grad={"max_norm": 1.0}),
        text_batches,
        shard=["Linear", "GRU"],
        plan={"head": "colwise_replicate_output"},
    ),
}


def rebased(cls: Any, base: Any) -> Any:
    members = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(f"{cls.__name__}On{base.__name__}", (base,), members)


def fresh_model(step: Step) -> nn.Module:
    torch.manual_seed(0)
    with doubles():
        return step.model()


def expected(name: str) -> dict[str, Tensor]:
    """Return the weights after training in plain PyTorch on whole batches."""
    step = STEPS[name]
    model = fresh_model(step)
    step.plain(model, step.batches())
    return {key: value.detach() for key, value in model.named_parameters()}


def stepped(name: str, wrapper: str, **options: Any) -> dict[str, Tensor] | str:
    """Return the weights after training on a wrapper, or the error that the first step raises."""
    step, base = STEPS[name], BASES[wrapper]
    gan.DigitGan.noise = fixed_noise
    split: dict[str, Any] = {}
    model: Any = None
    if wrapper == "dp":
        split = {"device_ids": ["cpu", "cpu"]}
    elif wrapper == "fsdp":
        split = {"shard": step.shard}
    elif wrapper == "tensor":
        mesh = build_mesh({"tensor": 2})
        split = {"mesh": mesh, "prepare": Preparation(tensor_parallel=step.plan)}
    split |= options
    try:
        model = wrap_model(rebased(step.wrapper, base), fresh_model(step), **split)
        model.train()
        before = whole_weights(model.module)
        optims = step.optims(model)
        for batch in step.batches():
            is_divided = wrapper not in (*ALONE, "tensor")
            rank_batch = [
                tensor[dist.get_rank() :: 2] if is_divided else tensor for tensor in batch
            ]
            model.train_step(rank_batch, optims)
        return whole_weights(model.module)
    except (RuntimeError, ValueError, TypeError) as error:
        if model is not None:
            assert apart(whole_weights(model.module), before) == 0, "there has been an update"
        return f"{type(error).__name__}: {error}"


def stepped_in_group(name: str) -> dict[str, Any]:
    """Return the results of all wrappers of several ranks."""
    return {base: stepped(name, base) for base in BASES if base not in ALONE}
