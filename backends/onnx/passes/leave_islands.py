"""The last pass of convert for ONNX Runtime: integers only where the whole graph is faster so."""

from torch.fx import GraphModule

from pt2e_quant.backends.target.islands import leave_slower_islands
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass


@graph_pass(needs=(HAS_VALUES,), gives=())
def leave_islands(gm: GraphModule) -> PassResult:
    """Put islands of operators in float that conversions around them make slower in integers.

    Before:  q(conv(dq(x_q), …)) -> dq -> silu -> q -> dq -> conv
    After:   conv(dq(x_q), …) -> silu -> conv
    """
    return leave_slower_islands(gm, "onnx")
