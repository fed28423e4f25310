"""The operators `norm_quantize`, `norm_quantize_per_token` and `norm_quantize_per_token_e4m3`.

Also: where a graph calls them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.op_table import Constraint, OpRow
from pt2e_quant.graph.ops import arguments
from pt2e_quant.graph.pattern import Match, find_matches
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.read_graph import output_arguments
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.norm_quantize import reference
from pt2e_quant.kernels.norm_quantize.norm import CONSTRAINTS, NORM_SCHEMA, NORMS, read_norm
from pt2e_quant.kernels.profiler_range import label_of
from pt2e_quant.kernels.quantize_per_token.op import (
    QuantizeRows,
    QuantizeRowsE4m3,
    fake_rows,
    fake_rows_e4m3,
)
from pt2e_quant.kernels.quantized_values import REWRITTEN_RESULT
from pt2e_quant.kernels.shape_classes import by_columns
from pt2e_quant.kernels.site import Site

_GPU = "pt2e_quant.kernels.norm_quantize.gpu"


def _fake(x: Tensor, *rest: Any, out_dtype: torch.dtype = torch.int8, **named: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


NormQuantize = define(
    f"norm_quantize(Tensor x, str kind, {NORM_SCHEMA}, *, ScalarType out_dtype=int8, "
    "float out_scale=1.0, int out_zero_point=0, int out_min=-128, int out_max=127, "
    'str label="") -> Tensor',
    reference=reference.norm_quantize,
    triton=triton_kernel(_GPU, "norm_quantize"),
    fake=_fake,
)
"""int8, uint8 or float8_e4m3fn[..., K] of the normalized rows of x, to static qparams.

    x: float32, float16 or bfloat16[..., K], K of 1 .. 16384.
    kind, weight, …, value_dtype: of `norm.Norm`.
    out_dtype, …, out_max: of `epilogue.Epilogue`.
    label: the node, for the profiler.
"""

NormQuantizePerToken = define(
    f"norm_quantize_per_token(Tensor x, str kind, {NORM_SCHEMA}, *, int quant_min=-128, "
    'int quant_max=127, str label="") -> (Tensor, Tensor, Tensor)',
    reference=reference.norm_quantize_per_token,
    triton=triton_kernel(_GPU, "norm_quantize_per_token"),
    fake=fake_rows,
)
"""Integers int8[..., K], scales float32[..., 1] and zero points int32[..., 1] of normalized rows.

    x: float32, float16 or bfloat16[..., K], K of 1 .. 16384.
    kind, weight, …, value_dtype: of `norm.Norm`.
    quant_min, quant_max: what the integers are clamped to; qparams are chosen for -128..127.
    label: the node, for the profiler.
"""

NormQuantizePerTokenE4m3 = define(
    f"norm_quantize_per_token_e4m3(Tensor x, str kind, {NORM_SCHEMA}, *, "
    'str label="") -> (Tensor, Tensor)',
    reference=reference.norm_quantize_per_token_e4m3,
    triton=triton_kernel(_GPU, "norm_quantize_per_token_e4m3"),
    fake=fake_rows_e4m3,
)
"""Codes float8_e4m3fn[..., K] and scales float32[..., 1] of normalized rows.

    x: float32, float16 or bfloat16[..., K], K of 1 .. 16384.
    kind, weight, …, value_dtype: of `norm.Norm`.
    label: the node, for the profiler.
"""


def cost(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Cost:
    """Bytes of one call, and about ten operations an element."""
    return Cost(
        bytes=moved_bytes(x, weight, bias) + x.numel(),
        operations=10 * x.numel(),
    )


def build(site: Site) -> Node:
    """`norm_quantize` to the qparams of the quantizes behind the norm."""
    norm, now = read_norm(site.match), site.editor.now
    assert site.output is not None  # REWRITTEN_RESULT
    return site.call(
        NormQuantize,
        now(norm.x),
        str(norm.kind),
        None if norm.weight is None else now(norm.weight),
        None if norm.bias is None else now(norm.bias),
        norm.eps,
        norm.rounds_first,
        norm.value_dtype,
        **output_arguments(site),
    )


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph."""
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


_FUSED: dict[object, Any] = {
    QuantizeRows: NormQuantizePerToken,
    QuantizeRowsE4m3: NormQuantizePerTokenE4m3,
}
"""Operators that quantize rows, to those that normalize them too."""


def _one_reader(match: Match) -> bool:
    return [n.target in _FUSED for n in match.anchor.users] == [True]


_ONE_READER = Constraint(text="nothing but one quantize per token that reads it", holds=_one_reader)


@graph_pass(needs=(HAS_VALUES,), gives=())
def fuse_norm_per_token(gm: GraphModule) -> PassResult:
    """Replace a norm and the `quantize_per_token` that alone reads it by one operator.

    Before:  q, s, z = pt2e_quant.quantize_per_token(layer_norm(x, w, b))
    After:   q, s, z = pt2e_quant.norm_quantize_per_token(x, "layer", w, b)

    To run after `fuse_choose_quantize`.
    """
    return _fuse(gm, QuantizeRows)


@graph_pass(needs=(HAS_VALUES,), gives=())
def fuse_norm_per_token_e4m3(gm: GraphModule) -> PassResult:
    """Replace a norm and the `quantize_per_token_e4m3` that alone reads it by one operator.

    Before:  q, s = pt2e_quant.quantize_per_token_e4m3(layer_norm(x, w, b))
    After:   q, s = pt2e_quant.norm_quantize_per_token_e4m3(x, "layer", w, b)

    To run after `fuse_choose_e4m3`.
    """
    return _fuse(gm, QuantizeRowsE4m3)


def _fuse(gm: GraphModule, quantize: object) -> PassResult:
    """Replace norms that this operator alone reads."""
    patterns = [(name, op) for name, found in NORMS.items() for op in found]
    refused: dict[str, Note] = {}

    def fits(name: str, match: Match) -> bool:
        if not any(n.target is quantize for n in match.anchor.users):
            return False
        broken = next((c for c in (*CONSTRAINTS, _ONE_READER) if not c.holds(match)), None)
        if broken is not None:
            node = match.anchor.name
            refused[node] = Note(node, f"{name} needs {broken.text}", skipped=True)
        return broken is None

    matches = find_matches(gm.graph, patterns, fits)
    editor = Editor(gm)
    for _, match in matches:
        _replace(editor, match)
    done = tuple(
        Note(match.anchor.name, "normalized and quantized at once") for _, match in matches
    )
    return PassResult(changed=editor.finish(), notes=(*done, *refused.values()))


def _replace(editor: Editor, match: Match) -> None:
    norm = read_norm(match)
    (quantize,) = match.anchor.users
    asked = arguments(quantize)
    limits = {n: asked[n] for n in ("quant_min", "quant_max") if n in asked}
    tensors: list[Node | None] = [
        None if node is None else editor.now(node) for node in (norm.weight, norm.bias)
    ]
    made = editor.call(
        _FUSED[quantize.target],
        editor.now(norm.x),
        str(norm.kind),
        *tensors,
        norm.eps,
        norm.rounds_first,
        norm.value_dtype,
        **limits,
        label=label_of(match.anchor),
        like=match.anchor,
        before=quantize,
        val=quantize.meta["val"],
    )
    editor.replace(quantize, made)
    editor.discard([*match.covered, match.node("x")])
