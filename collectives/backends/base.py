"""What a back-end is: the ranks and the two object collectives, over whatever carries them."""

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch

from ..errors import CollectiveError, attempt, text_of
from ..objects.serialize import obj2tensor, tensor2obj

T = TypeVar("T")


class BaseDistBackend(ABC):
    """What a metric needs of the ranks; a subclass provides all five members.

    Instances hold no results and are shared: one serves every metric of a process. Constructors
    raise what keeps the back-end from being used and touch no device.
    """

    @property
    @abstractmethod
    def is_initialized(self) -> bool:
        """Whether there are ranks to talk to."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The number of this process, as `src` counts; 0 when not initialised."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many ranks there are; 1 when not initialised."""

    @abstractmethod
    def all_gather_object(self, obj: T) -> list[T]:
        """Return the objects of all ranks, in rank order; every rank must call this."""

    @abstractmethod
    def broadcast_object(self, obj: T, src: int) -> T:
        """Return the object of rank `src`; every rank must call this."""


class TensorBaseDistBackend(BaseDistBackend):
    """Object collectives for a library that moves tensors only; a subclass writes five hooks.

    The hooks may work in place or not, and tensors may be of any kind. A size is a tensor of one
    element that `int()` takes. Errors of `_object_to_tensor` and `_tensor_to_object` on one rank
    are raised on all.
    """

    @abstractmethod
    def _object_to_tensor(self, obj: Any) -> tuple[Any, Any]:
        """Return the object as a flat tensor, and the tensor of its size."""

    @abstractmethod
    def _tensor_to_object(self, tensor: Any, size: int) -> Any:
        """Return the object in the first `size` elements."""

    @abstractmethod
    def _pad_tensor(self, tensor: Any, max_size: int) -> Any:
        """Return the tensor with zeros after it, `max_size` long, which is never shorter."""

    @abstractmethod
    def _all_gather(self, tensor: Any) -> list[Any]:
        """Return the tensors of all ranks, which are of one shape, in rank order."""

    @abstractmethod
    def _broadcast(self, tensor: Any, src: int) -> Any:
        """Return the tensor of rank `src`; the tensors of all ranks are of one shape."""

    def all_gather_object(self, obj: T) -> list[T]:
        """Return the objects of all ranks, in rank order; every rank must call this.

        All are copies, the own one too. With one rank the list holds the object itself.

        Raises:
            CollectiveError: on every rank, when one of them cannot encode or decode.
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
        """Return the object of rank `src` on every rank; every rank must call this.

        The source gets its own object back, the others a copy; what they pass is not looked at.

        Raises:
            ValueError: `src` is no rank.
            CollectiveError: on every rank, when the source cannot encode or another not decode.
        """
        if src not in range(self.world_size):
            raise ValueError(f"src must be a rank below {self.world_size}, got {src!r}")
        if not self.is_initialized or self.world_size == 1:
            return obj
        is_source = self.rank == src
        stand_in = self._object_to_tensor(None)
        # No rank's tensor is ever cut: all are at least as long as the one of no object.
        shortest = int(stand_in[1])
        (tensor, own_size), problem = self._encode(obj) if is_source else (stand_in, None)
        size = int(self._broadcast(own_size, src))
        tensor = self._broadcast(self._pad_tensor(tensor, max(size, shortest)), src)
        received: T | None = obj
        if not is_source:
            received, problem = attempt(lambda: self._tensor_to_object(tensor, size))
        self._raise_together(problem)
        return received  # type: ignore[return-value]

    def _encode(self, obj: object) -> tuple[tuple[Any, Any], Exception | None]:
        """Return the object encoded, or None encoded and what went wrong."""
        encoded, problem = attempt(lambda: self._object_to_tensor(obj))
        return encoded or self._object_to_tensor(None), problem

    def _gather(self, encoded: tuple[Any, Any]) -> list[tuple[Any, int]]:
        """Return every rank's tensor with its own size."""
        tensor, own_size = encoded
        sizes = [int(size) for size in self._all_gather(own_size)]
        tensors = self._all_gather(self._pad_tensor(tensor, max(sizes)))
        return list(zip(tensors, sizes, strict=True))

    def _raise_together(self, problem: Exception | None) -> None:
        own = None if problem is None else text_of(problem)
        answers = self._gather(self._object_to_tensor(own))
        texts = [self._tensor_to_object(tensor, size) for tensor, size in answers]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise CollectiveError(
                f"an object cannot be sent or received on {'; '.join(failed)}"
            ) from problem


class PicklesInTensors:
    """Three hooks of a TensorBaseDistBackend: pickles in plain tensors of torch."""

    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _object_to_tensor(self, obj: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tensor = obj2tensor(obj, self._device())
        return tensor, torch.tensor([tensor.numel()], device=tensor.device)

    def _tensor_to_object(self, tensor: torch.Tensor, size: int) -> Any:
        return tensor2obj(tensor[:size])

    def _pad_tensor(self, tensor: torch.Tensor, max_size: int) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, max_size - tensor.numel()))
