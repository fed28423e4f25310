"""Programs in float8_e4m3fn: every quantize is in a kernel, where the GPU has 8-bit floats."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pt2e_quant.backends.cuda.lower import lower_graph
from pt2e_quant.backends.cuda.policy import Measures
from pt2e_quant.backends.cuda.table import REGISTRY, TABLE
from pt2e_quant.backends.fuse_kernels import REFUSED_KEY
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from tests.kernels.lowering import calls_of

HOPPER = Measures(device="", allow_unmeasured=True, capability=90)
AMPERE = Measures(device="nvidia_a100", allow_unmeasured=True, capability=80)


class Block(nn.Module):
    """Norms, an activation and products in front of products."""

    def __init__(self):
        super().__init__()
        self.norm, self.root = nn.LayerNorm(64), nn.RMSNorm(64)
        self.up, self.down = nn.Linear(64, 48), nn.Linear(48, 64)
        self.left, self.right = nn.Linear(64, 32), nn.Linear(64, 32)
        self.last = nn.Linear(32, 64)

    def forward(self, x):
        x = x + self.down(F.relu(self.up(self.norm(x))))
        rows = self.root(x)
        return self.last(F.silu(self.left(rows) * self.right(rows)))


def quantized(name):
    """The canonical graph, and what goes into it."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 64)
    ep = torch.export.export(Block().eval(), (x,))
    prepared = prepare_pt2e(ep, TableQuantizer(TABLE, scheme_named(name)))
    prepared(x)
    return convert_pt2e(prepared), x


CALLS = {
    "fp8": "norm_quantize fp8_linear fp8_linear norm_quantize fp8_linear fp8_linear quantize "
    "fp8_linear",
    "fp8_dynamic": "norm_quantize_per_token_e4m3 fp8_linear quantize_per_token_e4m3 fp8_linear "
    "norm_quantize_per_token_e4m3 fp8_linear fp8_linear quantize_per_token_e4m3 fp8_linear",
    "fp8_dynamic_per_tensor": "quantize_per_tensor_e4m3 fp8_linear quantize_per_tensor_e4m3 "
    "fp8_linear quantize_per_tensor_e4m3 fp8_linear fp8_linear quantize_per_tensor_e4m3 "
    "fp8_linear",
}


@pytest.mark.parametrize("name", CALLS)
def test_lowering_when_the_gpu_has_8_bit_floats_then_every_quantize_is_in_a_kernel(name):
    gm, x = quantized(name)
    lowered = lower_graph(gm, REGISTRY, HOPPER)
    assert " ".join(calls_of(lowered)) == CALLS[name]
    # Norms and products are rounded otherwise, and a value beside a tie goes to the next code.
    assert sqnr_db([gm(x)], [lowered(x)]) > 55


def test_fp8_linear_when_its_result_is_quantized_then_it_is_written_in_8_bits():
    gm, _ = quantized("fp8")
    lowered = lower_graph(gm, REGISTRY, HOPPER)
    products = [n for n in lowered.graph.nodes if "fp8_linear" in str(n.target)]
    kinds = [n.kwargs["out_dtype"] for n in products]
    assert kinds == [torch.float8_e4m3fn, *[torch.float32] * 4]
    assert products[0].kwargs["activation"] == "relu"
    assert products[1].args[0] is products[0]


@pytest.mark.parametrize("name", CALLS)
def test_lowering_when_the_gpu_lacks_8_bit_floats_then_stays_float_with_the_reason(name):
    gm, x = quantized(name)
    lowered = lower_graph(gm, REGISTRY, AMPERE)
    assert {"dequantize_float", "quantize_float"} <= set(calls_of(lowered))
    assert not {"fp8_linear", "norm_quantize", "quantize"} & set(calls_of(lowered))
    reasons = lowered.meta[REFUSED_KEY]
    assert "needs compute capability 8.9 (Ada) or later for 8-bit floats" in reasons["relu"]
    assert "nvidia_a100 has 8.0" in reasons["relu"]
    assert torch.equal(lowered(x), gm(x))
