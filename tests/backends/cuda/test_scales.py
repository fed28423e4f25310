"""Programs whose scales are kept in other forms than float32: the same kernels take them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pt2e_quant.backends.cuda.backend import BACKEND
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.granularity import PerBlock
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OpRow, OpTable, Slot
from pt2e_quant.graph.pattern import Op, Var

FORMS = {
    "float16": ScaleFormat(dtype=torch.float16),
    "bfloat16": ScaleFormat(dtype=torch.bfloat16),
    "float8_e8m0fnu": ScaleFormat(dtype=torch.float8_e8m0fnu),
    "float8_e4m3fn": ScaleFormat(dtype=torch.float8_e4m3fn),
    "double": ScaleFormat(double_group=256),
}
NATIVE = ("float16", "bfloat16")
"""What int4_linear and a8w4_linear read as it is."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 64)
        self.up, self.down = nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, indices):
        x = self.table(indices)
        return x + self.down(torch.relu(self.up(x)))


def quantized(recipe, form):
    torch.manual_seed(0)
    indices = torch.randint(0, 20, (2, 3))
    made = BACKEND.quantizer(recipe).with_scales(form)
    prepared = prepare_pt2e(torch.export.export(Model().eval(), (indices,)), made)
    prepared(indices)
    return convert_pt2e(prepared), indices


def scale_dtypes(artifact):
    """Of the weights of linears."""
    return {v.dtype for n, v in artifact.module.named_buffers() if n.endswith("weight_scale")}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", ["w4_g32", "a8w4", "int8_dynamic", "int8"])
def test_lower_when_scales_have_another_form_then_the_same_kernels_take_them(recipe, form):
    gm, indices = quantized(recipe, FORMS[form])
    artifact = BACKEND.lower(gm, allow_unmeasured=True, verify=False)
    plain, _ = quantized(recipe, ScaleFormat())
    expected = BACKEND.lower(plain, allow_unmeasured=True, verify=False)
    assert artifact.report.integer_ops == expected.report.integer_ops
    assert artifact.report.integer_ops["embedding_gather"] == 1
    assert not artifact.report.float_regions
    # Sums are exact here and rounded in the q/dq graph: a tie may fall to the other side.
    assert sqnr_db([gm(indices)], [artifact.run(indices)]) > 45
    reads_form = form in NATIVE and "w4" in recipe
    assert scale_dtypes(artifact) == {FORMS[form].dtype if reads_form else torch.float32}


def test_lower_when_a_convolution_has_bfloat16_scales_then_it_is_one_kernel():
    torch.manual_seed(0)
    x = torch.randn(1, 16, 6, 6)
    quantizer = BACKEND.quantizer("int8").with_scales(FORMS["bfloat16"])
    prepared = prepare_pt2e(torch.export.export(nn.Conv2d(16, 8, 3).eval(), (x,)), quantizer)
    prepared(x)
    artifact = BACKEND.lower(convert_pt2e(prepared), allow_unmeasured=True)
    assert artifact.report.integer_ops == {"quantize": 1, "int8_conv2d": 1}


def with_weights(scheme, accepted):
    """A linear with weights that no row of the backend asks for."""
    row = OpRow(
        name="linear",
        find=(Op(ops.LINEAR, Var("x"), Var("w")),),
        slots=(Slot(at="w", role=Role.WEIGHT, accepts=(accepted,)),),
        lowers_to="toy",
    )
    quantizer = TableQuantizer(OpTable(backend="Toy", rows=(row,)), scheme)
    x = torch.randn(2, 64)
    return convert_pt2e(
        prepare_pt2e(torch.export.export(nn.Linear(64, 32).eval(), (x,)), quantizer)
    )


def test_lower_when_no_kernel_takes_a_weight_then_refuses_by_its_name():
    scheme = scheme_named("w8", scales=FORMS["float16"])
    squares = replace(scheme.weight, granularity=PerBlock((16, 16)))
    gm = with_weights(replace(scheme, weight=squares), squares)
    with pytest.raises(UnsupportedError, match=r"weight of linear: no kernel has blocks of \[16"):
        BACKEND.lower(gm, allow_unmeasured=True)
    gm = with_weights(scheme_named("w3_g16"), scheme_named("w3_g16").weight)
    with pytest.raises(
        UnsupportedError, match=r"linear: no kernel has aten.linear on .*group_size=16"
    ) as e:
        BACKEND.lower(gm, allow_unmeasured=True)
    assert "allow_unmeasured" not in str(e.value)
