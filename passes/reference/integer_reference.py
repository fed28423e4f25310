"""Write a q/dq graph in exact integer arithmetic: what every lowering is held against."""

from torch.fx import GraphModule

from pt2e_quant.graph.pipeline import PassResult, graph_pass
from pt2e_quant.graph.rewrite import rewrite
from pt2e_quant.passes.reference.integer_products import PRODUCT_RULES
from pt2e_quant.passes.reference.integer_sums import SUM_RULES

__all__ = ["integer_reference"]


@graph_pass()
def integer_reference(gm: GraphModule) -> PassResult:
    """Compute in integers what stands between dequantizes and a quantize.

    Before:  quantize(relu(conv2d(dequantize(x), dequantize(w), b)))
    After:   total = out_dtype(convolution, int32, x.to(int16) - x_zero, w.to(int16)) + b_q
             clamp(round(total.to(float32) * factor), 0, …).to(int32) + zero).to(int8)

    The definitions are those of `core.integer_ops`. Where a pattern declines, its q/dq stay.
    """
    return rewrite(gm, (*PRODUCT_RULES, *SUM_RULES))
