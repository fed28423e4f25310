"""Where int4_linear goes: weight-only graphs of every recipe's groups and dtypes."""

import copy

import pytest
import torch

from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.flow.calibrate.sample import sqnr_db
from tests.kernels.grouped_models import fused, quantized

HALF = ScaleFormat(dtype=torch.float16)
SCHEMES = {
    "rows": scheme_named("w4"),
    "g32": scheme_named("w4_g32"),
    "zero points": scheme_named("w4_g32", symmetric=False),
    "float16 scales": scheme_named("w4_g32", scales=HALF),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_weight_only_linears_when_lowered_then_are_one_call_each(name):
    gm, x = quantized(SCHEMES[name])
    wanted = copy.deepcopy(gm)(x)
    names, refused = fused(gm)
    assert (names, refused) == (["int4_linear", "int4_linear"], {})
    # The definition's sums are float64, the q/dq graph's float32.
    torch.testing.assert_close(gm(x), wanted, rtol=1e-5, atol=1e-5)
    first, second = (n for n in gm.graph.nodes if "int4_linear" in str(n.target))
    assert first.kwargs["activation"] == "silu"
    assert second.kwargs["residual"].op == "placeholder"
    assert (first.args[3] is None) == (name != "zero points")


def test_weight_only_linears_when_the_model_is_bfloat16_then_keep_its_dtype():
    gm, x = quantized(scheme_named("w4_g32"), torch.bfloat16)
    wanted = copy.deepcopy(gm)(x)
    assert fused(gm)[0] == ["int4_linear", "int4_linear"]
    made = gm(x)
    assert made.dtype is torch.bfloat16
    # The q/dq graph rounds weights and each step to bfloat16, the call only its result.
    assert sqnr_db([wanted], [made]) > 40
