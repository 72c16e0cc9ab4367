"""Stateful loaders of several kinds, and runs that are resumed with them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loop_parts import assert_identical, get_weights, make_data, make_state
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from stepwrap.loops import (
    CheckpointHook,
    EpochTrainLoop,
    Hook,
    HookList,
    LoopState,
    build_loader,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.runner import Runner

SAMPLES = 22
# Two ranks with two workers get equal numbers of batches.
ROWS = 48


def shard() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def noisy(sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a sample with noise of two random streams; its number is exact."""
    noise = torch.randn(4) * random.random()
    noise[0] = 0
    return sample[0] + noise, sample[1]


class Lines(IterableDataset[Any]):
    """A custom stream: a generator shuffles each pass, and samples have noise."""

    def __init__(self, samples: int = SAMPLES, of: tuple[int, int] | None = None) -> None:
        self.data = make_data(samples)
        self.of = of or shard()
        self.orders = random.Random(3)
        self.start = self.orders.getstate()
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        num_workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        rows = range(len(self.data))[self.of[0] :: self.of[1]][worker::num_workers]
        self.orders.setstate(self.start)
        order = self.orders.sample(rows, len(rows))
        while self.at < len(order):
            self.at += 1
            yield noisy(self.data[order[self.at - 1]])
        self.at, self.start = 0, self.orders.getstate()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.start = state["at"], state["start"]


class Noisy(Dataset[Any]):
    """A map-style data set whose noise differs at each reading."""

    def __init__(self, samples: int = SAMPLES, noise: bool = True) -> None:
        self.data, self.noise = make_data(samples), noise

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return noisy(self.data[index]) if self.noise else self.data[index]


def batch_at(at: int) -> tuple[Tensor, ...]:
    """Return a batch of three samples with noise."""
    data = make_data(SAMPLES)
    pairs = [noisy(data[index]) for index in range(at * 3, at * 3 + 3)]
    return tuple(torch.stack(tensors) for tensors in zip(*pairs, strict=True))


class OwnLoader:
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 6:
            self.at += 1
            yield batch_at(self.at)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Cursor:
    """An iterator with a state, whose methods are named as in grain."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> Any:
        if self.at == 6:
            raise StopIteration
        self.at += 1
        return batch_at(self.at)

    def get_state(self) -> bytes:
        return b"%d" % self.at

    def set_state(self, state: bytes) -> None:
        self.at = int(state)


class CursorLoader:
    def __iter__(self) -> Cursor:
        return Cursor()


def hugging_face() -> Any:
    """Return a shuffled stream of `datasets` with noise for this rank."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    rank, world = shard()
    inputs, targets = make_data(ROWS).tensors
    rows = {"inputs": inputs.tolist(), "target": targets.tolist()}
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=4 * world)
    # Shuffle only its shards, because its state does not contain a shuffle buffer.
    stream = stream.shuffle(seed=5, buffer_size=1, max_buffer_input_shards=1).map(add_noise)
    return split_dataset_by_node(stream, rank, world)


def add_noise(row: dict[str, Any]) -> dict[str, Any]:
    inputs, _ = noisy((torch.tensor(row["inputs"]), torch.zeros(())))
    return {"inputs": inputs.tolist(), "target": row["target"]}


def as_pair(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    inputs = torch.tensor([row["inputs"] for row in rows])
    return inputs, torch.tensor([row["target"] for row in rows])


def make_stream_loader(kind: str, workers: int) -> Any:
    """Return a new loader of this kind, whose last batch is not full."""
    if kind in ("own loader", "iterator"):
        return OwnLoader() if kind == "own loader" else CursorLoader()
    if kind == "own stream":
        return build_loader(Lines(), batch_size=3, num_workers=workers, seed=shard()[0])
    if kind == "workers of a pass":
        return DataLoader(Lines(), batch_size=3, num_workers=workers)
    if kind == "drop_last":
        return build_loader(Lines(), batch_size=4, num_workers=workers, drop_last=True)
    if kind == "datasets":
        options: dict[str, Any] = {"collate": as_pair, "seed": shard()[0]}
        if workers:
            # A forked process lacks pyarrow's threads, and may wait for them.
            options["multiprocessing_context"] = "spawn"
        return build_loader(hugging_face(), batch_size=5, num_workers=workers, **options)
    from torchdata.stateful_dataloader import StatefulDataLoader

    if kind == "torchdata":
        # The loader's state does not contain the random streams of its workers.
        samples = Noisy(noise=not workers)
        return StatefulDataLoader(samples, batch_size=4, shuffle=True, num_workers=workers)
    assert kind == "datasets in torchdata"
    stream = hugging_face()
    return StatefulDataLoader(stream, batch_size=5, num_workers=workers, collate_fn=as_pair)


class SaveAll(Hook):
    """Keep the batches, and save at every save point into a separate folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.saved: list[tuple[int, Path]] = []
        self.read: list[list[Tensor]] = []

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        self.read.append([tensor.clone() for tensor in batch])

    def on_save_point(self, state: LoopState) -> None:
        if self.folder is not None:
            path = save_checkpoint(self.folder / str(len(self.saved)), state)
            self.saved.append((state.iteration, path))


def resume_from(folder: Path, kind: str, workers: int, **options: Any) -> list[int]:
    """Resume from save points of a run of three passes; return the run's sample numbers."""
    state, hook = make_state(dropout=0.5), SaveAll(folder)
    random.seed(shard()[0])
    loop = EpochTrainLoop(make_stream_loader(kind, workers), max_epochs=3, **options)
    loop.run(state, HookList([hook]))
    a_pass = len(hook.read) // 3
    # Every third save point: inside the first pass, at its end, and so on.
    for done, path in hook.saved[2 : 2 * a_pass + 2 : 3]:
        resumed, again = make_state(dropout=0.5), SaveAll()
        loop = EpochTrainLoop(make_stream_loader(kind, workers), max_epochs=3, **options)
        load_checkpoint(path).restore(resumed)
        loop.run(resumed, HookList([again]))
        assert len(again.read) == len(hook.read) - done
        for mine, theirs in zip(again.read, hook.read[done:], strict=True):
            assert all(map(torch.equal, mine, theirs)), (kind, done)
        assert_identical(get_weights(resumed), get_weights(state))
    return [int(number) for inputs, *_ in hook.read for number in inputs[:, 0].round().tolist()]


class Kill(Hook):
    """Kill the process in the middle of the step after `at` updates."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_batch_end(self, state: LoopState, batch: Any, logs: Any) -> None:
        if state.step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def train_program(run_dir: str, kill_at: str, weights: str) -> None:
    """Train or resume in a separate process; write the weights at the end."""
    state = make_state(dropout=0.5)
    loop = EpochTrainLoop(make_stream_loader("own stream", 2), max_epochs=2)
    runner = Runner(
        state.model,
        loop,
        optim_wrapper=state.optim_wrapper,
        hooks=[CheckpointHook(every_steps=1), Kill(int(kill_at))],
        run_dir=run_dir,
        seed=1,
    )
    runner.train(resume=True)
    torch.save(get_weights(runner.state), weights)
