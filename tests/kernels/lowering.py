"""Small q/dq graphs, and what the CUDA lowering makes of them with some kernels."""

import torch

from pt2e_quant.backends.cuda.lower import decide_by
from pt2e_quant.backends.cuda.policy import Measures
from pt2e_quant.backends.fuse_kernels import fuse_kernels
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.kernels.kernel import Device
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize

__all__ = ["calls_of", "captured", "fuse", "q", "qdq"]


def q(x, scale, zero_point=0):
    """x in int8."""
    return QuantizePerTensor(x, scale, zero_point, -128, 127, torch.int8)


def qdq(x, scale, zero_point=0):
    """x through int8."""
    return DequantizePerTensor(q(x, scale, zero_point), scale, zero_point, -128, 127, torch.int8)


def captured(model, *inputs):
    """The graph module of a model."""
    return torch.export.export(model.eval(), inputs).module(check_guards=False)


def fuse(gm, kernels, *passes):
    """A graph module, changed by the lowering with these kernels and further passes."""
    registry = Registry(Device.CUDA, tuple(kernels))
    measures = Measures(device="", allow_unmeasured=True)
    fuse_them = fuse_kernels(registry, decide_by(measures), output=torch.int8)
    with torch.no_grad():
        run_passes(gm, (*passes, duplicate_dequantize, fuse_them))
    return gm


def calls_of(gm, namespace="pt2e_quant"):
    """The names of a library's operators that a graph calls, in order."""
    return [
        n.target._schema.name.partition("::")[2]
        for n in gm.graph.nodes
        if str(getattr(n.target, "namespace", "")) == namespace
    ]
