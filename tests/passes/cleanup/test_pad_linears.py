"""Zero columns so that groups divide a linear's weight."""

import pytest
import torch
from torch import nn

from pt2e_quant.graph.ops import LINEAR, argument, is_call
from pt2e_quant.passes.cleanup.linear_forms import pad_linears


def exported(columns: int, *, bias: bool = True, dynamic: bool = False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, 12, bias=bias), nn.ReLU(), nn.Linear(12, 3)).eval()
    shapes = ({0: torch.export.Dim("n", max=64)},) if dynamic else None
    inputs = (torch.randn(4, columns),)
    return model, torch.export.export(model, inputs, dynamic_shapes=shapes).module()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("columns", [1, 7, 33])
def test_padded_when_groups_do_not_divide_then_equal_to_the_float_model(columns, bias, dynamic):
    model, gm = exported(columns, bias=bias, dynamic=dynamic)
    result = pad_linears(lambda node: 8).edit(gm)
    assert result.changed
    assert len(result.notes) == 2
    linears = [n for n in gm.graph.nodes if is_call(n, LINEAR)]
    assert all(argument(n, "weight").meta["val"].shape[-1] % 8 == 0 for n in linears)
    x = torch.randn(5 if dynamic else 4, columns)
    torch.testing.assert_close(gm(x), model(x), rtol=1e-6, atol=1e-6)


def test_pad_when_groups_divide_or_there_are_none_then_left_alone():
    _, gm = exported(16)
    before = gm.code
    sizes = iter([16, None])
    assert not pad_linears(lambda node: next(sizes)).edit(gm).changed
    assert gm.code == before
