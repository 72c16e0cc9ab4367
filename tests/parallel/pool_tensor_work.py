"""Functions on tensors for the workers of the pool tests."""

import torch


def increase(tensor):
    tensor.add_(1)
    return tensor


def total(tensor):
    return float(tensor.sum())


def plus_first(tensor, number):
    return int(tensor[0]) + number


def make(size):
    return torch.arange(size, dtype=torch.float32)


def same_memory(tensor, second):
    return tensor.data_ptr() == second.data_ptr()
