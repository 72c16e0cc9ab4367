"""Every helper of the collectives, called with CUDA tensors."""

from typing import Any

import torch
import torch.distributed as dist

from stepwrap.collectives import (
    all_gather,
    all_gather_object,
    all_gather_object_cpu,
    all_gather_object_gpu,
    all_reduce,
    all_reduce_dict,
    broadcast,
    collect_results,
    gather,
    gather_object,
    get_dist_backend,
    mean_scalars,
    obj2tensor,
    pad_to_largest_tensor,
    reduce_mean,
    serialize_to_tensor,
    synchronize,
    tensor2obj,
)


def call_every_helper() -> dict[str, Any]:
    """Call every helper with CUDA tensors; return the results as numbers, and their devices."""
    rank = dist.get_rank()
    tensor = torch.full((3,), float(rank + 1), device="cuda")
    reduced = tensor.clone()
    all_reduce(reduced, "sum")
    synchronize()
    sent = {"t": tensor, "large": tensor.repeat(500_000), "p": torch.nn.Parameter(tensor.clone())}
    received = [
        *all_gather_object(sent),
        *(gather_object(sent) or []),
        broadcast(sent, src=dist.get_world_size() - 1),
        *all_gather_object_cpu(sent, rank_zero_return_only=False),
        *all_gather_object_gpu(sent, rank_zero_return_only=False),
        *(collect_results([sent], 100) or []),
        *get_dist_backend("torch").all_gather_object(sent),
        tensor2obj(obj2tensor(sent)),
        tensor2obj(serialize_to_tensor(sent)),
    ]
    counts, padded = pad_to_largest_tensor(tensor[: rank + 1])
    sums = all_reduce_dict({"a": tensor, "b": tensor.long(), "c": tensor.cpu()})
    return {
        "devices": sorted(
            {
                str(received_value["t"].device)
                for received_value in received
                if received_value is not sent
            }
        ),
        "sum": (reduced.tolist(), str(reduced.device)),
        "mean": (reduce_mean(tensor).tolist(), reduce_mean(tensor).is_cuda),
        "dict": {key: (value.tolist(), value.device.type) for key, value in sums.items()},
        "scalars": mean_scalars({"a": tensor[0], "b": tensor[1].cpu(), "c": 1.0}),
        "gathered": [
            (received_value.tolist(), received_value.is_cuda)
            for received_value in all_gather(tensor * 1j)
        ],
        "on_0": [received_value.tolist() for received_value in gather(tensor.bool())],
        "padded": (counts, padded.is_cuda),
    }
