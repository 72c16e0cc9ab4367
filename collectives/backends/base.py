"""Base classes of the backends: the ranks and two object collectives."""

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch

from ..errors import CollectiveError, attempt, get_text
from ..objects.serialize import obj2tensor, tensor2obj

T = TypeVar("T")


class BaseDistBackend(ABC):
    """Base class of backends, which provide the ranks and object collectives that metrics need.

    Subclasses must override all five members. All metrics of a process share one instance, so an
    instance must not keep results. A constructor must raise if the backend cannot be used, and must
    not use a device.
    """

    @property
    @abstractmethod
    def is_initialized(self) -> bool:
        """Whether the backend can communicate, possibly with one rank only."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this process, as used for ``src``; 0 when not initialised."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of ranks; 1 when not initialised."""

    @abstractmethod
    def all_gather_object(self, obj: T) -> list[T]:
        """Return the objects of all ranks, in rank order; every rank must call this."""

    @abstractmethod
    def broadcast_object(self, obj: T, src: int) -> T:
        """Return the object of rank ``src``; every rank must call this."""


class TensorBaseDistBackend(BaseDistBackend):
    """Base class of object collectives for a library that only moves tensors.

    Subclasses must override the five hooks that begin with an underscore, and the properties of
    ``BaseDistBackend``. The hooks may work in place, and tensors may be objects of any class. Their
    sizes are sent as tensors of one element, which ``int()`` must accept. If ``_object_to_tensor``
    or ``_tensor_to_object`` fails on one rank, every rank raises.
    """

    @abstractmethod
    def _object_to_tensor(self, value: Any) -> tuple[Any, Any]:
        """Return the object as a flat tensor, and its number of elements as a tensor."""

    @abstractmethod
    def _tensor_to_object(self, tensor: Any, size: int) -> Any:
        """Return the object in the first ``size`` elements."""

    @abstractmethod
    def _pad_tensor(self, tensor: Any, max_size: int) -> Any:
        """Return the tensor padded with zeros to ``max_size`` elements (at least its own size)."""

    @abstractmethod
    def _all_gather(self, tensor: Any) -> list[Any]:
        """Return the tensors of all ranks in rank order; all have the same shape."""

    @abstractmethod
    def _broadcast(self, tensor: Any, src: int) -> Any:
        """Return the tensor of rank ``src``; the tensors of all ranks have the same shape."""

    def all_gather_object(self, obj: T) -> list[T]:
        """Return the objects of all ranks, in rank order; every rank must call this.

        All of them, including the caller's, are copies. With one rank the list contains the object
        itself.

        Raises:
            CollectiveError: on every rank, if one of them cannot convert an object.
        """
        if not self.is_initialized or self.world_size == 1:
            return [obj]
        encoded, problem = self._encode(obj)
        received = self._gather(encoded)
        decode = self._tensor_to_object
        gathered, undecoded = attempt(lambda: [decode(tensor, size) for tensor, size in received])
        self._raise_together(problem or undecoded)
        return gathered or []

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src`` on every rank; every rank must call this.

        The source gets its own object back and the others a copy; their own ``obj`` is ignored.

        Raises:
            ValueError: ``src`` is not a rank.
            CollectiveError: on every rank, if one of them cannot convert the object.
        """
        if src not in range(self.world_size):
            raise ValueError(f"src must be a rank below {self.world_size}, got {src!r}")
        if not self.is_initialized or self.world_size == 1:
            return obj
        is_source = self.rank == src
        placeholder = self._object_to_tensor(None)
        (tensor, own_size), problem = self._encode(obj) if is_source else (placeholder, None)
        size = int(self._broadcast(own_size, src))
        # Receivers pad a placeholder to receive into. Padding cannot shorten it, so if it is longer
        # than the object, the source pads the object to the length of the placeholder.
        padded_size = max(size, int(placeholder[1]))
        tensor = self._broadcast(self._pad_tensor(tensor, padded_size), src)
        received: T | None = obj
        if not is_source:
            received, problem = attempt(lambda: self._tensor_to_object(tensor, size))
        self._raise_together(problem)
        return received  # type: ignore[return-value]

    def _encode(self, value: object) -> tuple[tuple[Any, Any], Exception | None]:
        """Return the encoded object and None; after an error, an encoded None and the error."""
        encoded, problem = attempt(lambda: self._object_to_tensor(value))
        return encoded or self._object_to_tensor(None), problem

    def _gather(self, encoded: tuple[Any, Any]) -> list[tuple[Any, int]]:
        """Return every rank's tensor with its own size."""
        tensor, own_size = encoded
        sizes = [int(size) for size in self._all_gather(own_size)]
        tensors = self._all_gather(self._pad_tensor(tensor, max(sizes)))
        return list(zip(tensors, sizes, strict=True))

    def _raise_together(self, problem: Exception | None) -> None:
        message = None if problem is None else get_text(problem)
        answers = self._gather(self._object_to_tensor(message))
        texts = [self._tensor_to_object(tensor, size) for tensor, size in answers]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise CollectiveError(
                f"an object cannot be sent or received on {'; '.join(failed)}"
            ) from problem


class PicklesInTensors:
    """Three hooks of a TensorBaseDistBackend: objects are pickled into uint8 tensors."""

    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _object_to_tensor(self, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tensor = obj2tensor(value, self._device())
        return tensor, torch.tensor([tensor.numel()], device=tensor.device)

    def _tensor_to_object(self, tensor: torch.Tensor, size: int) -> Any:
        return tensor2obj(tensor[:size])

    def _pad_tensor(self, tensor: torch.Tensor, max_size: int) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, max_size - tensor.numel()))
