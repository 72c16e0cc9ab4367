"""Random streams of accelerators other than CUDA devices, by the functions that torch documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepwrap.loops.rng import capture_rng, restore_rng


class Streams:
    """The random stream of an accelerator; in some releases `torch.mps` takes no device."""

    def __init__(self, *index: torch.device) -> None:
        self._states = {index: torch.tensor([1], dtype=torch.uint8)}

    def get_rng_state(self, *index: torch.device) -> torch.Tensor:
        return self._states[index].clone()

    def set_rng_state(self, state: torch.Tensor, *index: torch.device) -> None:
        self._states[index] = state.clone()


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_the_stream_of_the_model_continues(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(kind, 0)
    index = () if kind == "mps" else (device,)
    module: Any = Streams(*index)
    monkeypatch.setattr(torch, kind, module)
    saved = capture_rng(device)
    module.set_rng_state(torch.tensor([2], dtype=torch.uint8), *index)
    restore_rng(saved, device)
    assert module.get_rng_state(*index).tolist() == [1]
    # A checkpoint of another kind of device has no stream for it.
    module.set_rng_state(torch.tensor([3], dtype=torch.uint8), *index)
    restore_rng(capture_rng(torch.device("cpu")), device)
    assert module.get_rng_state(*index).tolist() == [3]
