import torch
from torch.export import Dim

from pt2e_quant.graph.editor import Editor


class Column(torch.nn.Module):
    def forward(self, x):
        return x[:, :1].relu()


def test_fake_like_when_a_stride_is_a_symbol_then_a_value_of_that_stride():
    shapes = {"x": {1: Dim("width", min=2, max=9)}}
    gm = torch.export.export(Column(), (torch.randn(3, 4),), dynamic_shapes=shapes).module()
    column = next(n for n in gm.graph.nodes if n.op == "call_function" and "relu" in n.name).args[0]
    value = column.meta["val"]
    assert not isinstance(value.stride()[0], int)
    made = Editor(gm).fake_like(value, torch.int8)
    assert made.dtype == torch.int8
    assert made.shape == (3, 1)
