"""Write blocks of integers as torch's own operators with float32 scales, where possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.formats.format_ops import DequantizeBlock
from pt2e_quant.core.qdq import DequantizePerChannel, DequantizePerGroup, float_name
from pt2e_quant.core.qparams import QParams
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.held_constants import held_constant
from pt2e_quant.graph.ops import arguments
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass


@graph_pass(needs=(HAS_VALUES,), gives=())
def widen_scales(gm: GraphModule) -> PassResult:
    """Convert scales of fewer bits to float32, for runtimes that take only that.

    Before:  dequantize_block(weight_q, weight_scale: float16, None, [1, 32], -8, 7, …)
    After:   dequantize_per_channel_group(weight_q, scale: float32, zero_point, -8, 7, …, 32, …)

    Scales in float16, bfloat16 or float8, and double-quantized ones, become float32 of the same
    value, so results are equal to the last bit. Groups of a matrix's rows and channels of any
    tensor are written so; other blocks stay, with the reason. Codes are not touched. Zero_points
    of 0 are added, which `pack_weights` packs.
    """
    return widen_chosen_scales(gm, [n for n in gm.graph.nodes if n.target is DequantizeBlock])


def widen_chosen_scales(gm: GraphModule, nodes: Sequence[Node]) -> PassResult:
    """Do as `widen_scales`, only for some dequantize_block: for runtimes that take the others.

    Args:
        gm: is changed.
        nodes: of its graph.
    """
    editor = Editor(gm)
    notes = []
    for node in nodes:
        made = _Widened.read(gm, node)
        if isinstance(made, str):
            notes.append(Note(node.name, made, skipped=True))
            continue
        editor.replace(node, made.emit(editor))
        notes.append(Note(node.name, "float32 scales"))
    return PassResult(editor.finish(), tuple(notes))


def widened_qparams(gm: GraphModule, node: Node) -> QParams | None:
    """The qparams that the pass would give a dequantize_block; None where it would let it stay."""
    made = _Widened.read(gm, node)
    if isinstance(made, str):
        return None
    named = arguments(node)
    shape = made.scale.shape if made.axis is None else (-1,)
    return QParams(
        scale=made.scale.reshape(shape),
        zero_point=made.zero_point.reshape(shape),
        quant_min=named["quant_min"],
        quant_max=named["quant_max"],
        dtype=named["dtype"],
        axis=made.axis,
        group_size=named["block_size"][1] if made.axis is None else None,
    )


@dataclass(frozen=True, slots=True)
class _Widened:
    """A dequantize_block that can be written as one of torch's own operators.

    Attributes:
        node: the dequantize_block.
        scale: its scales as float32.
        zero_point: int32, shaped like scale.
        axis: of channels; None for groups along the rows of a matrix.
    """

    node: Node
    scale: Tensor
    zero_point: Tensor
    axis: int | None

    @staticmethod
    def read(gm: GraphModule, node: Node) -> "_Widened | str":
        """The node's parts, or why it stays."""
        named = arguments(node)
        block: list[int] = list(named["block_size"])
        shape = node.meta["val"].shape
        axis = _channels(block)
        if axis is None and not (len(block) == 2 and block[0] == 1 and block[1] != WHOLE):
            return f"no operator of torch's has blocks of {block}"
        if axis is None and shape[1] % block[1]:
            return f"groups of {block[1]} end in a shorter one"
        scale = held_constant(gm, named["scales"])
        if scale is None:
            return "its scales are found at run time"
        zero_point = torch.zeros(scale.shape, dtype=torch.int32)
        if isinstance(named["zero_points"], Node):
            held = held_constant(gm, named["zero_points"])
            if held is None:
                return "its zero_points are found at run time"
            zero_point = held.to(torch.int32)
            if not torch.equal(zero_point.to(held.dtype), held):
                return "its zero_points are no integers"
        return _Widened(node, scale.to(torch.float32), zero_point, axis)

    def emit(self, editor: Editor) -> Node:
        """The dequantize of torch's."""
        node, named = self.node, arguments(self.node)
        codes: Node = named["input"]
        source = next(n for n in (codes, *codes.all_input_nodes) if n.op == "get_attr")
        base = float_name(source)
        limits = named["quant_min"], named["quant_max"], named["dtype"]

        def call(target: Any, *rest: Any, **keywords: Any) -> Node:
            value = node.meta["val"]
            return editor.call(target, codes, *rest, like=node, before=node, val=value, **keywords)

        def held(suffix: str, tensor: Tensor) -> Node:
            return editor.constant(f"{base}_{suffix}", tensor.contiguous(), like=node)

        if self.axis is None:
            grouped = held("scale", self.scale), held("zero_point", self.zero_point)
            out = named["out_dtype"] or torch.float32
            return call(DequantizePerGroup, *grouped, *limits, named["block_size"][1], out)
        scale = held("scale", self.scale.reshape(-1))
        # int64: ExecuTorch's portable dequantize_per_channel reads these bytes as such.
        zero_point = held("zero_point", self.zero_point.reshape(-1).to(torch.int64))
        given = {} if named["out_dtype"] is None else {"out_dtype": named["out_dtype"]}
        return call(DequantizePerChannel, scale, zero_point, self.axis, *limits, **given)


def _channels(block: list[int]) -> int | None:
    """The axis whose every index has a scale of its own, None if it is not so."""
    single = [axis for axis, length in enumerate(block) if length != WHOLE]
    return single[0] if len(single) == 1 and block[single[0]] == 1 else None
