"""Scales in forms that no kernel takes become float32 of the same value."""

from torch.fx import GraphModule, Node

from pt2e_quant.core.formats.format_ops import DequantizeBlock
from pt2e_quant.graph.pattern import Match, find_matches
from pt2e_quant.graph.pipeline import GraphPass, PassResult
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.read_scheme import slots_fit
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.passes.qdq.widen_scales import widen_chosen_scales


def widen_untaken_scales(registry: Registry) -> GraphPass:
    """A pass that widens scales as `passes.widen_scales` does, but for those that a kernel reads.

    Before:  linear(x, dequantize_block(weight_q: int4, weight_scale: bfloat16, …))
             linear(x, dequantize_block(weight_q: int8, weight_scale: bfloat16, …))
    After:   linear(x, dequantize_block(weight_q: int4, weight_scale: bfloat16, …))
             linear(x, dequantize_per_channel(weight_q: int8, scale: float32, …))

    Kernels for 4-bit weights read scales of 16 bits as they are: fewer bytes in every call.

    Args:
        registry: the kernels.
    """

    def takes(kernel: Kernel, match: Match) -> bool:
        gm = match.anchor.graph.owning_module
        assert isinstance(gm, GraphModule)
        return slots_fit(gm, kernel.row, match) and kernel.row.refusal(match) is None

    def edit(gm: GraphModule) -> PassResult:
        blocks = [n for n in gm.graph.nodes if n.target is DequantizeBlock]
        if not blocks:
            return PassResult(changed=False)
        patterns = [(kernel, op) for kernel in registry for op in kernel.row.find]
        taken = {
            value
            for _, match in find_matches(gm.graph, patterns, takes)
            for value in match.values.values()
            if isinstance(value, Node)
        }
        return widen_chosen_scales(gm, [n for n in blocks if n not in taken])

    return GraphPass("widen_untaken_scales", edit, needs=(), gives=())
