"""The operators `pt2e_quant::quantize` and `pt2e_quant::quantize_pixels`.

Also: where a graph calls them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import QuantizePerTensor
from pt2e_quant.graph.conditions import LIMITS_ARE_LITERALS
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.op_table import Constraint, OpRow
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import INTEGER_OUTPUTS, OUTPUT_SCHEMA
from pt2e_quant.kernels.epilogue.read_graph import ACTIVATIONS, operand_of, output_arguments
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.launch import ELEMENTS
from pt2e_quant.kernels.profiler_range import label_of
from pt2e_quant.kernels.quantize import reference
from pt2e_quant.kernels.quantized_values import Affine, affine_of, e4m3_of, rewritten
from pt2e_quant.kernels.shape_classes import by_elements
from pt2e_quant.kernels.site import Site


def _fake(x: Tensor, *, out_dtype: torch.dtype = torch.float32, **named: Any) -> Tensor:
    return torch.empty_like(x, dtype=out_dtype)


Quantize = define(
    f"quantize(Tensor x, *, float x_scale=1.0, int x_zero_point=0, {OUTPUT_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.quantize,
    triton=triton_kernel("pt2e_quant.kernels.quantize.gpu", "quantize"),
    fake=_fake,
)
"""y = q(activation(dq(x))): what is between is float32, and each end may be float instead.

    x: int8 or uint8 with the qparams x_scale and x_zero_point, or a float dtype; any shape.
    out_dtype: int8 or uint8 with the qparams out_scale and so on, or a float dtype.
    label: the node, for the profiler.

Without an activation equal to the last bit to quantized_decomposed's quantize_per_tensor and
dequantize_per_tensor; with one, to the operators in float32 but for the last bit of exp and erf.
The result has x's strides.
"""


def _fake_pixels(x: Tensor, **named: Any) -> Tensor:
    N, _, H, W = x.shape
    return x.new_empty((N, H, W, reference.PIXEL), dtype=torch.int8).permute(0, 3, 1, 2)


QuantizePixels = define(
    "quantize_pixels(Tensor x, *, float out_scale=1.0, int out_zero_point=0, int out_min=-128, "
    'int out_max=127, str label="") -> Tensor',
    reference=reference.quantize_pixels,
    triton=triton_kernel("pt2e_quant.kernels.quantize.gpu", "quantize_pixels"),
    fake=_fake_pixels,
)
"""int8[N, 4, H, W] of images, channels-last in memory: a pixel is one aligned word of 32 bits.

    x: float32, float16 or bfloat16[N, C, H, W], C of 1 .. 4.
    out_scale, …, out_max: of `epilogue.Epilogue`; channels from C on hold out_zero_point.
    label: the node, for the profiler.
"""


def cost(x: Tensor, out: Tensor) -> Cost:
    """Bytes of one call, and about ten operations an element."""
    return Cost(bytes=moved_bytes(x, out), operations=10 * x.numel())


def _is_beside_integers(match: Match) -> bool:
    return affine_of(match["x"]) is not None or rewritten(match.anchor) is not None


BESIDE_INTEGERS = Constraint(
    text="integers that go in, or a result that all its readers quantize alike",
    holds=_is_beside_integers,
)


def build(site: Site) -> Node:
    """`quantize` on the integers in front of the dequantize, or on the floats."""
    x, scale, zero_point = operand_of(site, site.match.node("x"))
    output = output_arguments(site)
    return site.call(Quantize, x, x_scale=scale, x_zero_point=zero_point, **output)


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph."""
    return cost(node.args[0].meta["val"], node.meta["val"])  # type: ignore[union-attr]  # a node by construction


KERNELS = (
    Kernel(
        # No slots: a function alone gains nothing from integers, so no range is asked for here.
        row=OpRow(
            name="activation",
            find=(Op(ACTIVATIONS, Var("x"), name="op"),),
            slots=(),
            constraints=(BESIDE_INTEGERS, LIMITS_ARE_LITERALS),
            lowers_to="pt2e_quant::quantize",
            note="dequantize, function and quantize in one launch, where they are there",
        ),
        device=Device.CUDA,
        op="quantize",
        build=build,
        shape_class=by_elements,
        cost=node_cost,
        writes_e4m3=True,
    ),
)


@graph_pass(needs=(HAS_VALUES,), gives=())
def fuse_lone_qdq(gm: GraphModule) -> PassResult:
    """Replace every static per-tensor quantize and dequantize by `pt2e_quant::quantize`.

    Before:  quantize_per_tensor(x, s, z, -128, 127, int8)
    After:   pt2e_quant.quantize(x, out_dtype=int8, out_scale=s, out_zero_point=z, …)

    To run after everything that looks for q/dq. torch's own operators are five launches a
    quantize and three a dequantize.
    """
    editor = Editor(gm)
    notes: list[Note] = []
    for node in list(gm.graph.nodes):
        affine = affine_of(node)
        if affine is None or affine.dtype not in INTEGER_OUTPUTS:
            continue
        editor.replace(node, _launch(editor, node, affine))
        notes.append(Note(node.name, "one launch"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _launch(editor: Editor, node: Node, affine: Affine) -> Node:
    value: Tensor = node.meta["val"]
    named: dict[str, Any] = {"label": label_of(node)}
    if node.target is QuantizePerTensor:
        named |= {
            "out_dtype": affine.dtype,
            "out_scale": affine.scale,
            "out_zero_point": affine.zero_point,
            "out_min": affine.quant_min,
            "out_max": affine.quant_max,
        }
    else:
        named |= {
            "x_scale": affine.scale,
            "x_zero_point": affine.zero_point,
            "out_dtype": value.dtype,
        }
    return editor.call(Quantize, node.args[0], like=node, before=node, val=value, **named)


@graph_pass(needs=(HAS_VALUES,), gives=())
def fuse_lone_e4m3(gm: GraphModule) -> PassResult:
    """Replace every quantize of a whole tensor by a constant scale by `pt2e_quant::quantize`.

    Before:  quantize_float(x, s, None, [-1, -1], "float8_e4m3fn")
    After:   pt2e_quant.quantize(x, out_dtype=float8_e4m3fn, out_scale=s)

    To run after everything that looks for q/dq. torch's own operators are four launches.
    """
    editor = Editor(gm)
    notes: list[Note] = []
    for node in list(gm.graph.nodes):
        found = e4m3_of(node)
        if found is None or node.args[0].meta["val"].dtype not in ELEMENTS:
            continue
        made = editor.call(
            Quantize,
            node.args[0],
            out_dtype=found.dtype,
            out_scale=found.scale,
            label=label_of(node),
            like=node,
            before=node,
            val=node.meta["val"],
        )
        editor.replace(node, made)
        notes.append(Note(node.name, "one launch"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))
