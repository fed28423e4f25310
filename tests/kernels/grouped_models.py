"""A model with linears in every place a kernel fuses, quantized and fused for a GPU."""

import torch
from torch import nn

from pt2e_quant.backends.cuda.lower import decide_by
from pt2e_quant.backends.cuda.policy import Measures
from pt2e_quant.backends.cuda.table import TABLE
from pt2e_quant.backends.fuse_kernels import REFUSED_KEY, fuse_kernels
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.kernels.kernel import Device
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize

__all__ = ["fused", "quantized"]


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 96), nn.Linear(96, 128, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(x)))


def quantized(scheme, dtype=torch.float32):
    """The canonical graph of a scheme and what went into it."""
    torch.manual_seed(0)
    x = torch.randn(3, 128, dtype=dtype)
    ep = torch.export.export(Feed().eval().to(dtype), (x,))
    prepared = prepare_pt2e(ep, TableQuantizer(TABLE, scheme))
    prepared(x)
    return convert_pt2e(prepared), x


def fused(gm):
    """The fused graph's calls by name, in order, and why others stayed; gm is edited."""
    measures = Measures(device="", allow_unmeasured=True)
    kernels = fuse_kernels(Registry.of(Device.CUDA), decide_by(measures), output=torch.int8)
    run_passes(gm, (duplicate_dequantize, kernels))
    names = [str(n.target).split(".")[1] for n in gm.graph.nodes if "pt2e_quant." in str(n.target)]
    return names, gm.meta[REFUSED_KEY]
