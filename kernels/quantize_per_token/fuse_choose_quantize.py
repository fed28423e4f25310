"""Choosing qparams per token and quantizing with them become one launch."""

from operator import getitem
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import ChoosePerToken, DequantizePerToken, QuantizePerToken
from pt2e_quant.graph.pipeline import PassResult, graph_pass
from pt2e_quant.kernels.quantize_per_token.one_launch import Choice, choose_at_once, quantizes_of
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows

READ_BY_OTHERS = "its qparams are read by others too"


@graph_pass(needs=(), gives=())
def fuse_choose_quantize(gm: GraphModule) -> PassResult:
    """Replace choose_qparams and quantize per token by `pt2e_quant::quantize_per_token`.

    Before:  s, z = choose_qparams_per_token_asymmetric(x, int8);  q = quantize_per_token(x, s, z)
    After:   q, s, z = pt2e_quant.quantize_per_token(x, -128, 127)

    All that quantize one x per token read one launch, unless something writes into x in between.
    The scales are float32 and the zero points int32 then, which a dequantize per token takes too.
    """
    return choose_at_once(gm, _read)


def _read(choose: Node) -> Choice | str | None:
    if choose.target is not ChoosePerToken:
        return None
    found = integers_of(choose, QuantizePerToken, DequantizePerToken)
    if isinstance(found, str):
        return found
    x: Any = choose.args[0]
    limits, replaced = found
    return Choice(target=QuantizeRows, x=x, arguments=limits, results=3, replaced=replaced)


def integers_of(
    choose: Node, quantize: Any, dequantize: Any
) -> tuple[tuple[int, int], tuple[tuple[Node, int], ...]] | str:
    """The one range that a node's qparams quantize to, and what stands for integers and qparams.

    Args:
        choose: gives a scale and a zero point.
        quantize: the operator whose qparams they are.
        dequantize: the operator that may read them too.

    Returns:
        The range, and each node with 0 (integers), 1 (scale) or 2 (zero point); or why there is
        none.
    """
    x: Any = choose.args[0]
    parts = list(choose.users)
    quantizes = quantizes_of(x, parts, quantize, dequantize)
    ranges: set[Any] = {n.args[3:5] for n in quantizes}
    if len(ranges) != 1 or any(part.target is not getitem for part in parts):
        return READ_BY_OTHERS
    ((low, high),) = ranges
    taken = [(n, 0) for n in quantizes] + [(n, 1 + int(n.args[1])) for n in parts]  # type: ignore[arg-type]  # of getitem
    return (int(low), int(high)), tuple(taken)
