"""The assigner of models to devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .devices import DeviceName, PerDevice, Room, find_rooms
from .display import does_not_fit, draw, placement_table
from .estimators import ModelComplexityEstimator, ModelSizeEstimator, OptimizerOf
from .inputs import (
    PerModel,
    connection_matrix,
    move,
    name_models,
    number,
    per_model,
    resident_mib,
    sharing_groups,
)
from .search import Problem, search

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ModelAssigner:
    """Places models on devices so that they fit and a weighted cost is small.

    The cost is small if connected models are close to each other and devices compute in proportion
    to their compute capacity; docs/placement.md has the formulas. Models that share parameters stay
    together. The same arguments give the same placement; the global random state is neither used
    nor changed.

    Args:
        models: a list or dict of modules (or of any objects with ``to``, if ``sizes_mib`` is
            given).
        model_connection: {(model, model): strength}, with models by index or by name; strengths
            in any unit, such as bytes per step.
        devices: the devices to use (default: the keys of ``free_mib`` if it is a dict, otherwise
            all GPUs, or the CPU if there are none). A GPU that does not exist is skipped with a
            warning in the log, unless it is in ``free_mib``.
        model_size_multiplier: factor for parameters and buffers; 2 covers weights and gradients.
        max_mem_ratio: the part of a device's free memory that the models may use.
        cpu_weight: compute capacity of the CPU; an idle GPU has 1.
        connection_weight: weight of the connection term.
        size_match_weight: no effect, because placements that are returned fit.
        complexity_match_weight: weight of the term of compute capacities.
        entropy_weight: no effect, because each model is on one device.
        iterations: maximum number of rounds of the local search.
        update_rate: no effect, because the local search has no rate.
        gpu_gpu_distance: distance between any two devices other than the CPU.
        cpu_gpu_distance: distance between the CPU and any other device.
        move_models: whether to move the models to their devices.
        free_mib: free memory in MiB by device, or in the order of ``devices``. Missing values are
            measured (GPUs: ``torch.cuda.mem_get_info``; RAM: psutil or /proc/meminfo).
        compute: compute capacity by device, or in the order of ``devices``. The default for a GPU
            is 1 minus its load, if pynvml is installed.
        sizes_mib: sizes of the models in MiB (default: estimated).
        complexities: complexities of the models, in any unit (default: their sizes).
        example_inputs: inputs of the models; the complexities are then the floating-point
            operations of one forward pass. See ``ModelComplexityEstimator``.
        optimizer: also count its state; see ``ModelSizeEstimator``.
        seed: the seed of the search.

    Raises:
        RuntimeError: no placement that fits was found; the text has the needed and free bytes of
            each device.
        TypeError: a setting has the wrong type.
        ValueError: a setting has a value that is not allowed; the text says what is allowed.

    Attributes:
        names: the names of the models: the keys of a dict; "0", "1", ... for a list.
        sizes_mib: the sizes of the models in MiB.
        rooms: the devices considered, each with ``device``, ``free_mib`` and ``compute``.
    """

    def __init__(  # noqa: PLR0913 - the documented signature
        self,
        models: Sequence[Any] | Mapping[str, Any],
        model_connection: Mapping[Any, float],
        devices: Sequence[DeviceName] | None = None,
        model_size_multiplier: float = 2,
        max_mem_ratio: float = 0.5,
        cpu_weight: float = 0,
        connection_weight: float = 2,
        size_match_weight: float = 1e-2,
        complexity_match_weight: float = 1,
        entropy_weight: float = 1,
        iterations: int = 500,
        update_rate: float = 0.01,
        gpu_gpu_distance: float = 1,
        cpu_gpu_distance: float = 10,
        move_models: bool = True,
        *,
        free_mib: PerDevice | None = None,
        compute: PerDevice | None = None,
        sizes_mib: PerModel[float] | None = None,
        complexities: PerModel[float] | None = None,
        example_inputs: PerModel[Any] | None = None,
        optimizer: OptimizerOf | None = None,
        seed: int = 0,
    ) -> None:
        self._models = name_models(models)
        self.names = list(self._models)
        self._max_mem_ratio = number("max_mem_ratio", max_mem_ratio, most=1)
        self.rooms = find_rooms(devices, free_mib, compute, cpu_weight, resident_mib(self._models))
        groups = sharing_groups(self._models)
        self.sizes_mib = self._sizes(sizes_mib, groups, model_size_multiplier, optimizer)
        weights = (connection_weight, size_match_weight, complexity_match_weight, entropy_weight)
        self._problem = Problem(
            sizes=_floats(self.sizes_mib),
            capacities=_floats([room.free_mib * self._max_mem_ratio for room in self.rooms]),
            complexities=_floats(self._complexities(complexities, example_inputs)),
            compute=_floats([room.compute for room in self.rooms]),
            connection=connection_matrix(model_connection, self.names),
            distance=_distances(self.rooms, gpu_gpu_distance, cpu_gpu_distance),
            weights=_weights(*weights),
        )
        self._placed = self._search(groups, iterations, update_rate, seed)
        if move_models:
            move(self._models, self.assignment)

    @property
    def assignment(self) -> list[torch.device]:
        """The device of each model, in the order of the models."""
        return [self.rooms[index].device for index in self._placed.tolist()]

    @property
    def placement(self) -> dict[str, torch.device]:
        """The device of each model, by the model's name."""
        return dict(zip(self.names, self.assignment, strict=True))

    @property
    def costs(self) -> dict[str, float]:
        """The unweighted terms of the cost, and their weighted sum as "total"."""
        shares = self._problem.one_hot(self._placed)
        named = {name: float(value) for name, value in self._problem.terms(shares).items()}
        return {**named, "total": float(self._problem.cost(shares))}

    @property
    def crossing(self) -> dict[tuple[str, str], float]:
        """The connections whose models are on different devices, strongest first."""
        apart = self._placed[:, None] != self._placed[None, :]
        strengths = torch.where(apart, self._problem.connection, 0.0)
        weights = {
            (self.names[source], self.names[second]): float(strengths[source, second])
            for source, second in strengths.nonzero().tolist()
        }
        return dict(sorted(weights.items(), key=lambda connection: -connection[1]))

    def report(self) -> str:
        """Return a table of the devices with their models, sizes and shares of the work."""
        return placement_table(self._problem, self.rooms, self.names, self._placed)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw a matrix of the connections between all models, with a frame for each device.

        Args:
            path: also save the figure to this file; the suffix selects the format.

        Raises:
            ImportError: matplotlib is missing (extra ``plots``).
        """
        figure = draw(self._problem, self.rooms, self.names, self._placed)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    @staticmethod
    def optimize_placement(  # noqa: PLR0913 - the documented signature
        optimizer: torch.optim.Optimizer,
        placement: Tensor,
        model_size: Tensor,
        size_capacity: Tensor,
        model_complexity: Tensor,
        complexity_capacity: Tensor,
        model_connection: Tensor,
        device_distance: Tensor,
        connection_weight: float,
        size_match_weight: float,
        complexity_match_weight: float,
        entropy_weight: float,
    ) -> Tensor:
        """Do one optimizer step on a soft placement, in place; the search does not use this.

        Args:
            optimizer: an optimizer of ``placement``.
            placement: logits that require grad, ``(models, devices)``.
            model_size: MiB, ``(1, models)``.
            size_capacity: MiB, ``(1, devices)``.
            model_complexity: in any unit, ``(1, models)``.
            complexity_capacity: in any unit, ``(1, devices)``.
            model_connection: ``(models, models)``.
            device_distance: ``(devices, devices)``, zero diagonal.
            connection_weight: weight of the connection term.
            size_match_weight: weight of the size term.
            complexity_match_weight: weight of the complexity term.
            entropy_weight: weight of the entropy term.

        Returns:
            The cost before the step, a scalar tensor.
        """
        problem = Problem(
            model_size.flatten(),
            size_capacity.flatten(),
            model_complexity.flatten(),
            complexity_capacity.flatten(),
            model_connection,
            device_distance,
            (connection_weight, size_match_weight, complexity_match_weight, entropy_weight),
        )
        optimizer.zero_grad()
        cost = problem.cost(placement.softmax(-1))
        cost.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return cost.detach()

    def _sizes(
        self,
        sizes_mib: PerModel[float] | None,
        groups: list[list[int]],
        multiplier: float,
        optimizer: OptimizerOf | None,
    ) -> list[float]:
        """Return the MiB of each model; shared parameters count for the first model only."""
        if sizes_mib is not None:
            return self._numbers("sizes_mib", sizes_mib)
        number("model_size_multiplier", multiplier)
        models = list(self._models.values())
        sizes = [0.0] * len(models)
        for group in groups:
            before = 0.0
            for count, index in enumerate(group, start=1):
                modules = [models[member] for member in group[:count]]
                together = modules[0] if count == 1 else nn.ModuleList(modules)
                size = ModelSizeEstimator(together, multiplier, optimizer=optimizer).estimate_size()
                sizes[index], before = size - before, size
        return sizes

    def _numbers(self, setting: str, numbers: PerModel[float]) -> list[float]:
        pairs = zip(self.names, per_model(setting, numbers, self.names), strict=True)
        return [number(f"{setting} of model {name}", value) for name, value in pairs]

    def _complexities(
        self, complexities: PerModel[float] | None, example_inputs: PerModel[Any] | None
    ) -> list[float]:
        if complexities is not None and example_inputs is not None:
            raise ValueError("give complexities or example_inputs, not both")
        if complexities is not None:
            return self._numbers("complexities", complexities)
        if example_inputs is None:
            return self.sizes_mib
        inputs = per_model("example_inputs", example_inputs, self.names)
        pairs = zip(self._models.values(), inputs, strict=True)
        return [float(ModelComplexityEstimator(*pair).estimate_complexity()) for pair in pairs]

    def _search(
        self, groups: list[list[int]], iterations: int, update_rate: float, seed: int
    ) -> Tensor:
        """Return the index of the device of each model."""
        number("update_rate", update_rate)
        if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0:
            raise ValueError(f"iterations must be a whole number, 0 or more, got {iterations!r}")
        merged = self._problem.merged(groups)
        result = search(merged, iterations, seed)
        if not result.fits:
            listed = [", ".join(self.names[index] for index in group) for group in groups]
            units = [
                f"model {names}" if len(group) == 1 else f"models {names} that share parameters"
                for group, names in zip(groups, listed, strict=True)
            ]
            raise RuntimeError(does_not_fit(merged, self.rooms, units, result, self._max_mem_ratio))
        placed = torch.empty(len(self.names), dtype=torch.long)
        for group, device in zip(groups, result.assignment, strict=True):
            placed[group] = device
        return placed


def _weights(*weights: float) -> list[float]:
    names = ("connection_weight", "size_match_weight", "complexity_match_weight", "entropy_weight")
    return [number(*pair) for pair in zip(names, weights, strict=True)]


def _floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _distances(rooms: Sequence[Room], gpu_gpu: float, cpu_gpu: float) -> Tensor:
    is_cpu = torch.tensor([room.device.type == "cpu" for room in rooms])
    far, near = number("cpu_gpu_distance", cpu_gpu), number("gpu_gpu_distance", gpu_gpu)
    return torch.where(is_cpu[:, None] | is_cpu, far, near).double().fill_diagonal_(0.0)
