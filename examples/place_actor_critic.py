"""Place the models of an actor-critic agent on the available devices.

Without a GPU, the placement is computed for two imaginary small GPUs, and no model is moved.
"""

import copy
import sys

import torch
from torch import nn

from stepwrap.parallel import ModelAssigner

BATCH, FEATURES, ACTIONS = 32, 256, 6


def head(inputs: int, outputs: int, width: int = 1024) -> nn.Sequential:
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def agent() -> dict[str, nn.Module]:
    """Return the models of TD3, an image encoder, and a world model."""
    convolutions = [nn.Conv2d(3, 32, 4, 2), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()]
    encoder = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 14 * 14, FEATURES))
    critics = {f"critic{i}": head(FEATURES + ACTIONS, 1) for i in (1, 2)}
    models = {"encoder": encoder, "actor": head(FEATURES, ACTIONS), **critics}
    targets = {f"target_{name}": copy.deepcopy(models[name]) for name in ("actor", *critics)}
    return {**models, **targets, "world": head(FEATURES + ACTIONS, FEATURES, width=2048)}


def connections(models: dict[str, nn.Module]) -> dict[tuple[str, str], float]:
    """Return the bytes sent between models in one step, including gradients."""
    features, actions = BATCH * FEATURES * 4, BATCH * ACTIONS * 4
    weights = {
        ("encoder", name): 2.0 * features for name in ("actor", "critic1", "critic2", "world")
    }
    for critic in ("critic1", "critic2"):
        weights["actor", critic] = 2.0 * actions
        weights["target_actor", f"target_{critic}"] = actions
        weights["encoder", f"target_{critic}"] = features
    weights["encoder", "target_actor"] = features
    for name in ("actor", "critic1", "critic2"):
        # Each step updates a target with all weights of its model.
        weights[name, f"target_{name}"] = sum(
            4.0 * param.numel() for param in models[name].parameters()
        )
    return weights


def main(picture: str | None = None) -> ModelAssigner:
    torch.manual_seed(0)
    models = agent()
    inputs = {
        name: torch.randn(BATCH, next(model.parameters()).shape[1])  # of the first layer
        for name, model in models.items()
        if name != "encoder"
    }
    inputs["encoder"] = torch.randn(BATCH, 3, 64, 64)
    imaginary = {"cuda:0": 350, "cuda:1": 350, "cpu": 2000}
    assigner = ModelAssigner(
        models,
        connections(models),
        free_mib=None if torch.cuda.is_available() else imaginary,
        move_models=torch.cuda.is_available(),
        example_inputs=inputs,
        optimizer=torch.optim.Adam,
    )
    if picture is not None:
        assigner.plot(picture)
    return assigner


if __name__ == "__main__":
    print(main(*sys.argv[1:]).report())
