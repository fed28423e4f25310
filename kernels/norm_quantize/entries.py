"""What norm_quantize stands for in a canonical graph."""

from torch.fx import Node

from pt2e_quant.graph.op_table import OpRow
from pt2e_quant.kernels.conditions import REWRITTEN_RESULT
from pt2e_quant.kernels.cost import Cost
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.norm_quantize.op import NormQuantize, cost
from pt2e_quant.kernels.norm_quantize.read_norm import CONSTRAINTS, NORMS, read_norm
from pt2e_quant.kernels.shape_classes import by_columns
from pt2e_quant.kernels.site import Site

__all__ = ["KERNELS"]


def build(site: Site) -> Node:
    """`norm_quantize` to the qparams of the quantizes behind the norm."""
    norm, out, now = read_norm(site.match), site.output, site.editor.now
    assert out is not None  # REWRITTEN_RESULT
    return site.call(
        NormQuantize,
        now(norm.x),
        str(norm.kind),
        None if norm.weight is None else now(norm.weight),
        None if norm.bias is None else now(norm.bias),
        norm.eps,
        norm.rounds_first,
        norm.value_dtype,
        out_dtype=out.dtype,
        out_scale=out.scale,
        out_zero_point=out.zero_point,
        out_min=out.quant_min,
        out_max=out.quant_max,
        label=site.label,
    )


def node_cost(node: Node) -> Cost:
    """Of a fused call in a graph."""
    x, _, weight, bias = (a.meta["val"] if isinstance(a, Node) else None for a in node.args[:4])
    assert x is not None  # rows by schema
    return cost(x, weight, bias)


KERNELS = tuple(
    Kernel(
        # No slots: what reads the norm quantizes it, or nothing does.
        row=OpRow(
            name=name,
            find=patterns,
            slots=(),
            constraints=(*CONSTRAINTS, REWRITTEN_RESULT),
            lowers_to="pt2e_quant::norm_quantize",
            note="float rows to integers or e4m3; per token to `norm_quantize_per_token`",
        ),
        device=Device.CUDA,
        op="norm_quantize",
        build=build,
        shape_class=by_columns,
        cost=node_cost,
        writes_e4m3=True,
    )
    for name, patterns in NORMS.items()
)
