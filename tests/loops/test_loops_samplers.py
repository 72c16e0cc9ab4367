"""Samplers of loaders: their draws, divided among ranks, after a resume, and their mistakes."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_runs import Follow, make_data, make_net, make_optimizer, wrapped
from marks import slow
from ranks import RanksError, run_ranks
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from stepwrap.loops import (
    EpochTrainLoop,
    HookList,
    LoopState,
    SubsetSampler,
    ValLoop,
    WeightedSampler,
    build_loader,
    find_checkpoint,
    load_checkpoint,
    mix_seed,
    save_checkpoint,
    seed_rng,
)
from stepwrap.loops.data.loaders import batches_from, read_aside
from stepwrap.loops.data.tensors import TensorLoader
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel

SEED, EPOCHS, SAMPLES, GLOBAL_BATCH = 7, 3, 36, 12
WEIGHTS = [1.0 + index % 4 for index in range(SAMPLES)]


class ByEpoch:
    """A sampler whose order is a function of the epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(self.size), self.size))


class InPlace:
    """A sampler that shuffles its own list, so that each order depends on all earlier ones."""

    def __init__(self, size: int) -> None:
        self.indices = list(range(size))

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(list(self.indices))


def own_generator() -> RandomSampler:
    return RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(3))


def make_sampler(kind: str) -> Any:
    samplers: dict[str, Callable[[], Any]] = {
        "weighted": lambda: WeightedSampler(make_data(SAMPLES), WEIGHTS),
        "subset": lambda: SubsetSampler(make_data(SAMPLES), "0-23", shuffle=True),
        "torch": lambda: WeightedRandomSampler(WEIGHTS, 24),
        "set_epoch": lambda: ByEpoch(SAMPLES),
        "in place": lambda: InPlace(SAMPLES),
        "generator": own_generator,
        "list": lambda: list(range(SAMPLES - 1, -1, -1)),
    }
    return samplers[kind]()


def plain_orders(sampler: Any) -> Iterator[list[Any]]:
    """Yield the order of each epoch that a loop written by hand would use."""
    for epoch in range(EPOCHS):
        seed_rng(mix_seed(SEED, epoch))
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        yield list(sampler)


def plain_weights(updates: list[list[list[int]]]) -> dict[str, torch.Tensor]:
    """Return the weights of plain PyTorch; an update is the mean of its batches' losses."""
    net, data = make_net(), make_data(SAMPLES)
    optimizer = make_optimizer(net)
    for batches in updates:
        optimizer.zero_grad()
        for indices in batches:
            inputs, target, _ = data[indices]
            (nn.functional.cross_entropy(net(inputs), target) / len(batches)).backward()
        optimizer.step()
    return {f"net.{name}": weight.detach() for name, weight in net.state_dict().items()}


def train(
    options: dict[str, Any], folder: Path, stop: int | None, wrapper: str = "ddp"
) -> dict[str, Any]:
    """Resume from the latest checkpoint, train until update `stop` and save, on every rank."""
    model = wrapped(wrapper, SupervisedModel(make_net(), nn.CrossEntropyLoss()))
    state, follow = LoopState(model, OptimWrapper(make_optimizer(model))), Follow(stop)
    samplers = {name: make() for name, make in options.items() if callable(make)}
    loader = build_loader(make_data(SAMPLES), train=True, seed=SEED, **{**options, **samplers})
    loop = EpochTrainLoop(loader, max_epochs=EPOCHS, log_every_steps=1000)
    path = find_checkpoint(folder)
    if path is not None:
        load_checkpoint(path).restore(state)
    loop.run(state, HookList([follow]))
    if stop is not None:
        save_checkpoint(folder, state)
    weights = {
        name: getattr(value, "full_tensor", lambda v=value: v)().detach().clone()
        for name, value in model.module.state_dict().items()
    }
    return {"seen": follow.seen, "weights": weights, "step": state.step}


def train_in_stages(
    options: dict[str, Any], folder: Path, stages: list[tuple[int, int | None]], **more: Any
) -> tuple[list[Counter[int]], dict[str, torch.Tensor]]:
    """Return the samples of each update over all ranks, and the weights at the end."""
    seen: dict[int, Counter[int]] = {}
    for ranks, stop in stages:
        sized = dict(options)
        if "batch_sampler" not in options:
            sized["batch_size"] = GLOBAL_BATCH // ranks
        results = run_ranks(train, ranks, sized, folder, stop, **more)
        for result in results:
            for step, samples in result["seen"]:
                seen.setdefault(step, Counter()).update(samples)
    return [seen[step] for step in sorted(seen)], results[0]["weights"]


def largest_difference(weights: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> float:
    return max((weights[name] - value).abs().max().item() for name, value in plain.items())


class Make:
    """A picklable function that makes a sampler on each rank."""

    def __init__(self, kind: str, batched: int = 0) -> None:
        self.kind, self.batched = kind, batched

    def __call__(self) -> Any:
        sampler = make_sampler(self.kind)
        return BatchSampler(sampler, self.batched, False) if self.batched else sampler


@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [
        ("weighted", "ddp"),
        ("in place", "ddp"),
        *slow(("subset", "ddp"), ("torch", "ddp"), ("set_epoch", "ddp"), ("generator", "ddp")),
        *slow(("list", "ddp"), ("weighted", "fsdp"), ("in place", "fsdp")),
    ],
)
def test_a_run_on_one_three_and_two_ranks_equals_plain_pytorch(
    kind: str, wrapper: str, tmp_path: Path
) -> None:
    orders = list(plain_orders(make_sampler(kind)))
    per_epoch = -(-len(orders[0]) // GLOBAL_BATCH)
    # In the middle of an epoch, at its end, and in the middle.
    stages = [(1, 1), (3, per_epoch), (1, 2 * per_epoch - 1), (2, None)]
    seen, weights = train_in_stages({"sampler": Make(kind)}, tmp_path, stages, wrapper=wrapper)
    updates = [
        order[start : start + GLOBAL_BATCH]
        for order in orders
        for start in range(0, len(order), GLOBAL_BATCH)
    ]
    assert seen == [Counter(update) for update in updates]
    assert largest_difference(weights, plain_weights([[update] for update in updates])) <= 1e-12


@pytest.mark.parametrize("kind", ["weighted", *slow("in place", "set_epoch")])
def test_batches_stay_whole_on_two_one_and_two_ranks(kind: str, tmp_path: Path) -> None:
    """Each rank takes whole batches, so that an update is the mean of two of them."""
    orders = plain_orders(BatchSampler(make_sampler(kind), 3, False))
    if kind == "set_epoch":
        # BatchSampler has no set_epoch of its own.
        orders = iter(
            [[*BatchSampler(order, 3, False)] for order in plain_orders(ByEpoch(SAMPLES))]
        )
    updates = [batches[at : at + 2] for batches in orders for at in range(0, len(batches), 2)]
    stages = [(2, 4), (1, 8), (2, None)]
    seen, weights = train_in_stages({"batch_sampler": Make(kind, 3)}, tmp_path, stages)
    assert seen == [Counter(index for batch in update for index in batch) for update in updates]
    assert largest_difference(weights, plain_weights(updates)) <= 1e-12


def test_batches_that_ranks_cannot_share_are_an_error(tmp_path: Path) -> None:
    options = {"batch_sampler": Make("weighted", 3)}
    run_ranks(train, 2, options, tmp_path, 1)
    with pytest.raises(RanksError, match="has 2 batches, which 3 ranks cannot.*Use 1, 2 as"):
        run_ranks(train, 3, options, tmp_path, None)


def test_weighted_draws_equal_those_of_torchs_sampler() -> None:
    loader = build_loader(
        make_data(SAMPLES), batch_size=5, sampler=WeightedSampler(make_data(SAMPLES), WEIGHTS),
        seed=SEED,
    )  # fmt: skip
    for epoch in range(2):
        generator = torch.Generator().manual_seed(mix_seed(SEED, epoch))
        expected = list(WeightedRandomSampler(WEIGHTS, SAMPLES, generator=generator))
        drawn = [index for batch in batches_from(loader, epoch) for index in batch[2].tolist()]
        assert drawn == expected


def test_drawing_leaves_the_random_streams_as_they_are() -> None:
    loader = build_loader(make_data(SAMPLES), batch_size=6, sampler=InPlace(SAMPLES), seed=SEED)
    before = random.getstate(), torch.get_rng_state()
    assert len(list(batches_from(loader, 0))) == 6
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"in_memory": False}])
def test_every_way_of_reading_gets_the_same_batches(options: dict[str, Any]) -> None:
    def read(**more: Any) -> list[list[int]]:
        loader = build_loader(make_data(SAMPLES), seed=SEED, **more)
        return [batch[2].tolist() for batch in batches_from(loader, 1, 2)]

    sampler = WeightedSampler(make_data(SAMPLES), WEIGHTS)
    order = list(plain_orders(sampler))[1]
    expected = [order[start : start + 5] for start in range(10, SAMPLES, 5)]
    assert read(sampler=sampler, batch_size=5, **options) == expected
    batched = BatchSampler(sampler, 5, False)
    assert read(batch_sampler=batched, **options) == expected
    assert isinstance(build_loader(make_data(SAMPLES), batch_sampler=batched), TensorLoader)


@pytest.mark.parametrize("kind", ["in place", "generator", "set_epoch"])
def test_another_reader_does_not_change_the_order(kind: str) -> None:
    """For example the pass that computes the statistics of BatchNorm for averaged weights."""
    orders = list(plain_orders(make_sampler(kind)))
    loader = build_loader(make_data(SAMPLES), batch_size=6, sampler=make_sampler(kind), seed=SEED)
    list(read_aside(loader))
    for epoch, order in enumerate(orders):
        drawn = []
        for batch in batches_from(loader, epoch):
            drawn += batch[2].tolist()
            list(read_aside(loader))
        assert drawn == order


def test_a_sampler_without_set_epoch_says_that_it_is_drawn_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    for kind, says in (("in place", True), ("set_epoch", False), ("weighted", False)):
        caplog.clear()
        loader = build_loader(
            make_data(SAMPLES), batch_size=6, sampler=make_sampler(kind), seed=SEED
        )
        next(iter(batches_from(loader, 2, 3)))
        assert ("InPlace" in caplog.text and "drawn again" in caplog.text) is says


def test_an_evaluation_reads_a_subset_once_on_two_ranks() -> None:
    assert run_ranks(count_evaluated, 2) == [10, 10]


def count_evaluated() -> int:
    data, seen = make_data(SAMPLES), []
    loader = build_loader(data, batch_size=3, sampler=SubsetSampler(data, "0-4, 20-24"))

    class Record:
        def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
            seen.extend(batch[2].tolist())

    model = wrapped("ddp", SupervisedModel(make_net(), nn.CrossEntropyLoss()))
    state = LoopState(model, OptimWrapper(make_optimizer(model)))
    ValLoop(loader).run(state, HookList([Record()]))
    both: list[Any] = [None, None]
    dist.all_gather_object(both, seen)
    assert sorted(both[0] + both[1]) == [*range(5), *range(20, 25)]
    return len(both[0]) + len(both[1])


class ByRank:
    """A sampler with a generator that has another seed on every rank."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(dist.get_rank()).sample(range(SAMPLES), SAMPLES))


class FailsOnOneRank(ByRank):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES - dist.get_rank()))


@pytest.mark.parametrize(
    ("sampler", "text"), [(ByRank, "same order on every rank"), (FailsOnOneRank, "only 35")]
)
def test_ranks_that_draw_different_orders_are_an_error(
    sampler: type, text: str, tmp_path: Path
) -> None:
    with pytest.raises(RanksError, match=text) as error:
        run_ranks(train, 2, {"sampler": sampler, "batch_size": 6}, tmp_path, None)
    assert sampler.__name__ in str(error.value)
    assert len(error.value.reports) == 2


def test_another_order_after_a_resume_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for weights, stop in ((WEIGHTS, 1), (WEIGHTS[::-1], None)):
        data = make_data(SAMPLES)
        model = SingleDevice(SupervisedModel(make_net(), nn.CrossEntropyLoss()))
        state = LoopState(model, OptimWrapper(make_optimizer(model)))
        loader = build_loader(data, batch_size=6, sampler=WeightedSampler(data, weights))
        if stop is None:
            path = find_checkpoint(tmp_path)
            assert path is not None
            load_checkpoint(path).restore(state)
        EpochTrainLoop(loader, max_epochs=1).run(state, HookList([Follow(stop)]))
        save_checkpoint(tmp_path, state)
    assert "draws another order for pass 0" in caplog.text


def test_a_distributed_sampler_keeps_its_part() -> None:
    data = make_data(SAMPLES)
    for rank in range(2):
        options: dict[str, Any] = {"num_replicas": 2, "rank": rank, "seed": SEED}
        loader = build_loader(data, batch_size=6, sampler=DistributedSampler(data, **options))
        sampler = DistributedSampler(data, **options)
        sampler.set_epoch(1)
        drawn = [index for batch in batches_from(loader, 1) for index in batch[2].tolist()]
        assert drawn == list(sampler)


# Data sets with labels: two of class 0, four of class 1.
CLASSES = [0, 1, 1, 0, 1, 1]


class Labelled(Dataset[Any]):
    """A data set whose samples must not be read."""

    def __init__(self, **columns: Any) -> None:
        vars(self).update(columns)

    def __len__(self) -> int:
        return len(CLASSES)


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    columns = {"x": [0.0] * 6, "label": CLASSES}
    return datasets.Dataset.from_dict(columns).with_format("torch")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: Labelled(targets=CLASSES), {}),
        (lambda: Labelled(targets=torch.tensor(CLASSES)), {}),
        (lambda: Labelled(labels=["cat", "dog"], y=[torch.tensor(c) for c in CLASSES]), {}),
        (lambda: Labelled(kind=["ab"[c] for c in CLASSES]), {"labels": "kind"}),
        (lambda: Labelled(), {"labels": CLASSES}),
        (lambda: TensorDataset(torch.zeros(6, 2), torch.tensor(CLASSES)), {}),
        (lambda: Subset(TensorDataset(torch.tensor([5, *CLASSES])), range(1, 7)), {}),
        (lambda: ConcatDataset([Subset(Labelled(targets=CLASSES), [0, 1, 2])] * 2), {}),
        (hugging_face, {}),
        (hugging_face, {"labels": "label"}),
    ],
)
def test_labels_are_read_without_the_samples(
    make: Callable[[], Any], options: dict[str, Any]
) -> None:
    sampler = WeightedSampler(make(), **options)
    expected = [1 / CLASSES.count(label) for label in CLASSES]
    assert sampler.weights.tolist() in (expected, [0.5, 0.25, 0.25] * 2)


def test_weights_by_class_and_by_sample(tmp_path: Path) -> None:
    data = Labelled(targets=CLASSES, importance=torch.arange(6.0))
    by_class = [2.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    (tmp_path / "weights.txt").write_text("2 1 1 2 1 1\n")
    file = str(tmp_path / "weights.txt")
    for weights in ([2, 1], {0: 2, 1: 1}, by_class, torch.tensor(by_class), file):
        assert WeightedSampler(data, weights).weights.tolist() == by_class
    assert WeightedSampler(data, "importance").weights.tolist() == [0, 1, 2, 3, 4, 5]
    unrepeated = WeightedSampler(data, num_samples=4, replacement=False)
    assert (len(unrepeated), len(set(unrepeated))) == (4, 4)


def test_a_share_of_a_data_set_is_chosen_by_its_seed() -> None:
    data = make_data(SAMPLES)
    half = list(SubsetSampler(data, share=0.5, seed=1))
    assert half == sorted(set(half))
    assert len(half) == 18
    assert half == list(SubsetSampler(data, share=0.5, seed=1))
    assert half != list(SubsetSampler(data, share=0.5, seed=2))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Endless(ByEpoch):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


DATA, IMBALANCED = make_data(SAMPLES), Labelled(targets=CLASSES)


@pytest.mark.parametrize(
    ("make", "kind", "texts"),
    [
        (lambda: WeightedSampler(IMBALANCED, [1, 2, 3]), ValueError, "6 samples, 3 entries, 0, 1"),
        (lambda: WeightedSampler(IMBALANCED, {0: 1, 7: 1}), ValueError, "class 7, are 0, 1"),
        (lambda: WeightedSampler(IMBALANCED, {0: 1}), ValueError, "lacks 1"),
        (lambda: WeightedSampler(IMBALANCED, "class_balance"), ValueError, "did you mean class_b"),
        (lambda: WeightedSampler(IMBALANCED, labels="target"), ValueError, "mean targets"),
        (lambda: WeightedSampler(IMBALANCED, labels=[0, 1]), ValueError, "6 samples, got 2"),
        (lambda: WeightedSampler(Labelled()), ValueError, "targets, labels, set labels to"),
        (lambda: WeightedSampler(Labelled(y=[[0, 1]] * 6)), ValueError, "one class for each"),
        (lambda: WeightedSampler(range(2**24 + 1)), ValueError, "16777216, got 16777217"),
        (lambda: WeightedSampler(IMBALANCED, [0.0] * 6), ValueError, "not all of them 0"),
        (lambda: WeightedSampler(IMBALANCED, [1.0, -1, 1, 1, 1, 1]), ValueError, "0 or more"),
        (
            lambda: WeightedSampler(IMBALANCED, [0.0, 1, 1, 1, 1, 1], replacement=False),
            ValueError,
            "at most 5, got 6",
        ),
        (lambda: SubsetSampler(DATA, "0-36"), ValueError, "0 to 35, got 36"),
        (lambda: SubsetSampler(DATA, "a-b"), ValueError, "0-99, got 'a-b'"),
        (lambda: SubsetSampler(DATA), ValueError, "indices or share"),
        (lambda: SubsetSampler(DATA, share=2), ValueError, "at most 1, got 2"),
        (lambda: build_loader(DATA), ValueError, "batch_size or batch_sampler"),
        (
            lambda: build_loader(DATA, batch_size=2, sampler=[0], shuffle=True),
            ValueError,
            "shuffle and sampler",
        ),
        (
            lambda: build_loader(DATA, batch_size=2, batch_sampler=[[0]]),
            ValueError,
            "batch_size and batch_sampler",
        ),
        (lambda: build_loader(Stream(), batch_size=2, sampler=[0]), ValueError, "sampler, Stream"),
        (
            lambda: build_loader(DATA, batch_size=2, sampler=iter([0])),
            TypeError,
            "__len__, list_iterator",
        ),
        (lambda: build_loader(DATA, batch_size=2, sampler=[]), ValueError, "list yields no"),
    ],
)
def test_mistakes_are_refused_when_a_loader_is_built(
    make: Callable[[], Any], kind: type[Exception], texts: str
) -> None:
    with pytest.raises(kind) as error:
        make()
    assert [text for text in texts.split(", ") if text not in str(error.value)] == []


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"sampler": [0, SAMPLES]}, f"list, 0 to {SAMPLES - 1}, got {SAMPLES}"),
        ({"sampler": [-1]}, "got -1"),
        ({"sampler": Endless(3)}, "Endless, 3, yields more"),
        ({"sampler": [[0, 1]]}, "batch_sampler"),
        ({"batch_sampler": [0, 1]}, "pass it as sampler"),
        ({"batch_sampler": [[0], []]}, "empty batch"),
    ],
)
def test_mistakes_are_named_when_an_order_is_drawn(options: dict[str, Any], texts: str) -> None:
    if "sampler" in options:
        options = {"batch_size": 2, **options}
    loader: DataLoader[Any] = build_loader(DATA, **options)
    with pytest.raises((TypeError, ValueError)) as error:
        list(batches_from(loader, 0))
    assert [text for text in texts.split(", ") if text not in str(error.value)] == []
