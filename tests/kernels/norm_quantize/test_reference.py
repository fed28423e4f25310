"""The norms' definition, held to torch's norms and to float64."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.kernels.norm_quantize.norm import Norm
from pt2e_quant.kernels.norm_quantize.op import NormQuantize, NormQuantizePerToken, cost
from pt2e_quant.kernels.norm_quantize.reference import norm_quantize, normalize
from tests.kernels.norm_quantize.norms import norms
from tests.kernels.operands import float_rows


@settings(max_examples=60)
@given(st.data(), st.integers(2, 40))
def test_normalize_when_inputs_are_drawn_then_is_torchs_norm_but_for_last_bits(data, K):
    x = data.draw(float_rows((3, K), dtypes=(torch.float32,)))
    named = {**data.draw(norms(K)), "value_dtype": torch.float32}
    norm = Norm(**named)
    weight, bias = (None if t is None else t.double() for t in (norm.weight, norm.bias))
    if norm.kind == "layer":
        wanted = F.layer_norm(x.double(), (K,), weight, bias, norm.eps)
    else:
        wanted = F.rms_norm(x.double(), (K,), weight, norm.eps) + (0 if bias is None else bias)
    torch.testing.assert_close(normalize(x, norm).double(), wanted, rtol=1e-4, atol=1e-4)


@settings(max_examples=30)
@given(st.data(), st.integers(2, 40), st.integers(-128, 127))
def test_norm_quantize_when_inputs_are_drawn_then_gives_the_integers_of_the_normalized_values(
    data, K, zero_point
):
    x, named = data.draw(float_rows((3, K))), data.draw(norms(K))
    made = norm_quantize(x, **named, out_scale=0.04, out_zero_point=zero_point)
    values = normalize(x, Norm(**named)).float()
    steps = torch.round(values * 25.0) + zero_point
    assert torch.equal(made.float(), steps.clamp(-128, 127))


def test_operators_when_checked_by_torch_then_are_whole():
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(8).bfloat16()
    torch.library.opcheck(NormQuantize, (x, "layer", weight), {"out_dtype": torch.uint8})
    torch.library.opcheck(NormQuantizePerToken, (x.half(), "rms", weight), {"quant_min": -127})
    strided = x.transpose(0, 1)
    torch.library.opcheck(NormQuantize, (strided, "rms"), {})


def test_cost_when_counted_then_has_each_tensor_once():
    x, weight = torch.zeros(4, 8), torch.zeros(8)
    assert cost(x, weight, None).bytes == 128 + 32 + 32
