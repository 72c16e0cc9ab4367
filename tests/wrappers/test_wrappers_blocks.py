"""Selecting blocks of a model by class, path, pattern and size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stepwrap.wrappers.blocks import find_blocks


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self) -> None: ...


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = Attention(width)
        self.norm = nn.LayerNorm(width)

    def forward(self) -> None: ...


class WideBlock(Block):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block(4), WideBlock(8)])
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embed.weight

    def forward(self) -> None: ...


BOTH = ["blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("spec", "paths"),
    [
        (None, []),
        ([], []),
        ("Block", BOTH),
        (["WideBlock"], ["blocks.1"]),
        ([Block], BOTH),
        (f"{Block.__module__}.WideBlock", ["blocks.1"]),
        ("blocks.1", ["blocks.1"]),
        ("blocks.*", BOTH),
        ("*.attn", ["blocks.0.attn", "blocks.1.attn"]),
        (["head", "Block", "blocks.0"], [*BOTH, "head"]),
        (["Attention", "Block"], ["blocks.0", "blocks.0.attn", "blocks.1", "blocks.1.attn"]),
        ({"classes": "Block"}, BOTH),
        ("Net", [""]),
        # blocks.0 has 80 parameters in attention and 8 in the norm.
        ({"min_params": 80}, ["blocks.0.attn", "blocks.1", "blocks.1.attn.qkv"]),
        ({"min_params": 1e2}, ["blocks.1.attn.qkv"]),
        ({"min_params": 81}, ["blocks.0", "blocks.1.attn.qkv", "blocks.1"]),
        ({"min_params": 50, "classes": ["Block"]}, [*BOTH, "head"]),
        ({"min_params": 1000, "classes": ["Block"]}, BOTH),
    ],
)
def test_blocks_are_found_by_class_path_pattern_and_size(spec: object, paths: list[str]) -> None:
    model = Net()
    blocks = find_blocks(model, spec)
    assert sorted(blocks) == sorted(paths)
    order = list(dict(model.named_modules()))
    assert list(blocks) == sorted(blocks, key=order.index)
    assert all(module is model.get_submodule(path) for path, module in blocks.items())


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        ("Blok", ValueError, "class or path 'Blok'; did you mean Block"),
        (["Block", "block.0"], ValueError, "did you mean blocks.0"),
        (nn.Conv2d, ValueError, "no module of the model has the class or path 'Conv2d'"),
        ("zzzzzz", ValueError, "its classes: Net, Embedding, ModuleList, Block"),
        ("", ValueError, "class or path ''"),
        ("blocks", ValueError, r"'blocks' is a ModuleList, .*its children instead: blocks\.\*"),
        ({"min_params": 1e6}, ValueError, r"min_params=1e\+06 parameters; the largest has \d+"),
        ({"min_params": "many"}, TypeError, "positive number of parameters, got 'many'"),
        ({"min_params": True}, TypeError, "got True"),
        ({"min_param": 3}, TypeError, "did you mean min_params?"),
        (3, TypeError, "class names, module paths or patterns"),
        ([3], TypeError, "a string or a module class, got 3"),
    ],
)
def test_refusals(spec: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        find_blocks(Net(), spec)


@given(st.integers(1, 300))
def test_no_module_of_the_size_is_left_out(size: int) -> None:
    model = Net()
    try:
        blocks = find_blocks(model, {"min_params": size})
    except ValueError:
        blocks = {}
    for path, module in model.named_modules():
        if not path or isinstance(module, nn.ModuleList):
            continue
        inside = {
            id(param)
            for other, block in blocks.items()
            if other.startswith(path)
            for param in block.parameters()
        }
        free = [param for param in module.parameters() if id(param) not in inside]
        # The tied weight may be assigned to either of its modules.
        free = [param for param in free if param is not model.embed.weight]
        assert sum(param.numel() for param in free) < size
