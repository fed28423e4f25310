"""Products of one row that is quantized at run time: ONNX Runtime's one operator for that."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq

pytest.importorskip("onnxruntime")

ONNX = pq.backends.get("onnx")


class Shared(nn.Module):
    """Two linears that read one input, and one behind them."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 24), nn.Linear(16, 24, bias=False)
        self.last = nn.Linear(24, 8)

    def forward(self, x):
        return self.last(self.left(x).relu() * self.right(x))


def _converted(x, sizes=None):
    torch.manual_seed(0)
    program = torch.export.export(Shared().eval(), (x,), dynamic_shapes=sizes)
    prepared = pq.prepare(program, ONNX.quantizer("int8_dynamic"))
    return pq.convert(prepared, progress=False)


@pytest.mark.parametrize("portable", [False, True], ids=["kernels", "portable"])
@pytest.mark.parametrize("shape", [(1, 16), (1, 1, 16), (16,)], ids=str)
def test_linears_when_there_is_one_row_then_it_is_quantized_as_a_tensor(shape, portable):
    torch.manual_seed(1)
    x = torch.randn(shape)
    gm = _converted(x)
    artifact = ONNX.lower(gm, portable=portable, validate=True)
    kinds = {*artifact.report.integer_ops, *artifact.report.float_ops}
    assert not kinds & {"ReduceMax", "ReduceMin", "Round"}
    if not portable:
        counts = artifact.report.integer_ops
        assert (counts["MatMulIntegerToFloat"], counts["DynamicQuantizeMatMul"]) == (2, 1)
    # Of one sign, far from zero, of nothing but zeros, and of a range that only floats have.
    for values in (x, x.abs() + 3, -x.abs(), 1e4 * x, torch.zeros(shape), 1e-3 * x):
        assert pq.sqnr_db(gm(values), artifact.run(values)) > 60


def test_linears_when_rows_are_dynamic_then_each_row_has_its_own_scale():
    x = torch.randn(2, 16)
    gm = _converted(x, ({0: torch.export.Dim.DYNAMIC},))
    artifact = ONNX.lower(gm)
    rows = torch.cat([x[:1], 100 * torch.randn(1, 16), 0.01 * torch.randn(1, 16)])
    for given in (x[:1], rows):
        for expected, found in zip(gm(given), artifact.run(given), strict=True):
            assert pq.sqnr_db(expected, found) > 60


@pytest.mark.parametrize("portable", [False, True], ids=["kernels", "portable"])
def test_linear_when_its_result_is_returned_and_read_then_all_names_differ(portable):
    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 8)

        def forward(self, x):
            y = self.first(x)
            return self.last(y), y

    torch.manual_seed(0)
    x = torch.randn(2, 3, 16)
    prepared = pq.prepare(
        torch.export.export(Adapter().eval(), (x,)), ONNX.quantizer("int8_dynamic")
    )
    gm = pq.convert(prepared, progress=False)
    artifact = ONNX.lower(gm, portable=portable, validate=True)
    for expected, found in zip(gm(x), artifact.run(x), strict=True):
        assert pq.sqnr_db(expected, found) > 60
