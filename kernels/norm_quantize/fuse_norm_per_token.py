"""A norm whose rows are quantized per token becomes one launch with the quantize."""

from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.ops import arguments
from pt2e_quant.graph.pattern import Match, find_matches
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.kernels.norm_quantize.op import NormQuantizePerToken, NormQuantizePerTokenE4m3
from pt2e_quant.kernels.norm_quantize.read_norm import CONSTRAINTS, NORMS, read_norm
from pt2e_quant.kernels.profiler_range import label_of
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows, QuantizeRowsE4m3

_FUSED: dict[object, Any] = {
    QuantizeRows: NormQuantizePerToken,
    QuantizeRowsE4m3: NormQuantizePerTokenE4m3,
}
"""What quantizes rows to what normalizes them too."""


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
