"""One function of a call's leaves: what the module computes, on the module's own constants."""

import pytest
import torch
from torch import nn

from pt2e_quant.backends.cpu.artifact import flat_call


class Kept(nn.Module):
    """Containers in and out, a literal, a result that is None, and a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.register_buffer("count", torch.zeros(1))

    def forward(self, pair, *, scale, times=2):
        self.count.add_(1)
        y = self.inner(pair["a"]) * scale * times
        return {"y": y, "none": None, "both": (pair["b"] + self.count, y.sum())}


@pytest.fixture
def exported():
    torch.manual_seed(0)
    call = ({"a": torch.randn(2, 4), "b": torch.randn(1)},), {"scale": torch.randn(1)}
    program = torch.export.export(Kept().eval(), *call)
    return program.module(), call


def leaves_of(value):
    return torch.utils._pytree.tree_leaves(value, is_leaf=lambda v: v is None)


def test_flat_call_when_called_then_gives_the_leaves_that_the_module_gives(exported):
    module, (args, kwargs) = exported
    call = flat_call(module)
    start = module.count.clone()
    with torch.no_grad():
        expected = leaves_of(module(*args, **kwargs))
        module.count.copy_(start)
    found = call(leaves_of((args, kwargs)))
    assert len(found) == len(expected) == 4
    for mine, its in zip(found, expected, strict=True):
        assert mine is its is None or torch.equal(mine, its)
        assert mine is None or not mine.requires_grad


def test_flat_call_when_a_buffer_is_written_then_the_module_sees_it(exported):
    module, call = exported
    flat = flat_call(module)
    for _ in range(3):
        flat(leaves_of(call))
    assert module.count.item() == 3
    module.count.zero_()
    assert flat(leaves_of(call))[2].item() == call[0][0]["b"].item() + 1


def test_flat_call_when_made_then_the_module_is_as_it_was(exported):
    module, _ = exported
    code, names = module.code, [name for name, _ in module.named_buffers()]
    flat_call(module)
    assert module.code == code
    assert [name for name, _ in module.named_buffers()] == names
