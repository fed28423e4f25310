"""Write scaled_dot_product_attention out to quantize and fuse its parts, or compute it narrower."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import (
    ATTENTION_DROPOUT_KEY,
    constant_nodes,
    constant_of,
    source_constant,
)
from pt2e_quant.graph.ops import (
    CASTS,
    MASKED_FILL,
    SDPA,
    VIEWS,
    arguments,
    aten,
    fill_number,
    is_call,
)
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite


def masked_score(dtype: torch.dtype) -> float:
    """The number added to masked scores: finite, and so low that softmax gives exactly 0.

    Three quarters of the range: a score can be added without reaching infinity, and the sum
    stays below half of the range, where observers stop counting entries as data.
    """
    return 0.75 * torch.finfo(dtype).min


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask in the form that attention is written out with.

    Attributes:
        additive: what is added to the scores.
        gate: 0.0 in the rows that are masked as a whole, 1.0 elsewhere; None if no row can be.
    """

    additive: Node
    gate: Node | None


def _is_finite(gm: GraphModule, value: object) -> bool:
    """True if a float mask is known to hold no infinity, from how it is made."""
    if isinstance(value, (int, float)):
        return math.isfinite(value)
    if not isinstance(value, Node):
        return False
    tensor = constant_of(gm, value)
    if tensor is not None:
        return bool(torch.isfinite(tensor).all())
    fake = value.meta.get("val")
    if isinstance(fake, Tensor) and not fake.is_floating_point():
        return True
    if is_call(value, _SELECTIONS):
        return _is_finite(gm, value.args[0])
    if is_call(value, MASKED_FILL):
        return _is_finite(gm, value.args[0]) and _is_finite(gm, value.args[2])
    if value.target in _CHOICES:
        return all(_is_finite(gm, v) for v in value.args[1:3])
    if value.target in _ARITHMETIC:
        return all(_is_finite(gm, v) for v in value.args[:2])
    number = fill_number(value)
    return number is not None and _is_finite(gm, number)


_SELECTIONS = (*VIEWS, *CASTS, aten.triu.default, aten.tril.default)
_CHOICES = frozenset(
    (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
)
_ARITHMETIC = frozenset((aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor))


class _Attention:
    """Builds attention from its parts; each mask is prepared once for all layers."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.constants: frozenset[Node] | None = None
        self.masks: dict[object, Mask | None] = {}

    def build(self, m: Match, editor: Editor) -> Node | Skip:
        node = m.nodes["attention"]
        given = arguments(node)
        query, key, value = given["query"], given["key"], given["value"]
        if given["dropout_p"] != 0.0:
            return Skip("dropout is active: export the model after eval()")
        repeats = _repeats(query, key)
        if given["enable_gqa"] and repeats is None:
            return Skip("the number of heads is known only at run time")
        mask = self._mask(given, editor, node)

        def call(target: Any, *args: Any) -> Node:
            return editor.call(target, *args, like=node)

        if given["enable_gqa"] and repeats is not None and repeats > 1:
            key, value = (_repeated(x, repeats, editor, node) for x in (key, value))
        scale = given["scale"] if given["scale"] is not None else _scale(query, editor, node)
        scores = call(aten.matmul.default, query, call(aten.transpose.int, key, -2, -1))
        if scale != 1.0:
            scores = call(aten.mul.Tensor, scores, scale)
        if mask is not None:
            scores = call(aten.add.Tensor, scores, mask.additive)
        weights = call(aten.softmax.int, scores, -1)
        if dropped := node.meta.get(ATTENTION_DROPOUT_KEY, 0.0):  # in training
            weights = call(aten.dropout.default, weights, dropped, False)
        result = call(aten.matmul.default, weights, value)
        if mask is not None and mask.gate is not None:
            result = call(aten.mul.Tensor, result, mask.gate)
        _allow_any_layout(m.anchor)
        return result

    def _mask(self, given: dict[str, Any], editor: Editor, node: Node) -> Mask | None:
        dtype = given["query"].meta["val"].dtype
        if given["is_causal"]:
            return self._causal(given, dtype, editor, node)
        mask = given["attn_mask"]
        if mask is None:
            return None
        mask = editor.now(mask)
        if (mask, dtype) not in self.masks:
            is_bool = mask.meta["val"].dtype == torch.bool
            make = self._from_bool if is_bool else self._from_float
            self.masks[mask, dtype] = make(mask, dtype, editor)
        return self.masks[mask, dtype]

    def _causal(
        self, given: dict[str, Any], dtype: torch.dtype, editor: Editor, node: Node
    ) -> Mask | None:
        """Row i sees the columns up to i, as SDPA's `is_causal` has it."""
        rows, columns = (given[k].meta["val"].shape[-2] for k in ("query", "key"))
        name = ("causal", str(rows), str(columns), dtype)
        if name in self.masks:
            return self.masks[name]
        if isinstance(rows, int) and isinstance(columns, int):
            seen = torch.ones(rows, columns, dtype=torch.bool).tril()
            self.masks[name] = _known(seen, dtype, editor, "causal_mask", node)
            return self.masks[name]
        device = given["query"].meta["val"].device
        counts = []
        for of, size in (("query", rows), ("key", columns)):
            size_node: Any = size
            if not isinstance(size, int):
                size_node = editor.call(aten.sym_size.int, given[of], -2, like=node, val=size)
            counts.append(editor.call(aten.arange.default, size_node, like=node, device=device))
        row = editor.call(aten.unsqueeze.default, counts[0], -1, like=node)
        seen_node = editor.call(aten.ge.Tensor, row, counts[1], like=node)
        self.masks[name] = Mask(additive_mask(seen_node, dtype, editor), None)
        return self.masks[name]

    def _from_bool(self, mask: Node, dtype: torch.dtype, editor: Editor) -> Mask | None:
        known = self._constant(mask)
        if known is not None:
            return _known(known, dtype, editor, _name(mask), mask)
        additive = additive_mask(mask, dtype, editor)
        return Mask(additive, _gate(mask, dtype, editor, after=additive))

    def _constant(self, mask: Node) -> Tensor | None:
        if self.constants is None:
            self.constants = constant_nodes(self.gm.graph)
        return constant_of(self.gm, mask) if mask in self.constants else None

    def _from_float(self, mask: Node, dtype: torch.dtype, editor: Editor) -> Mask:
        if mask.meta["val"].dtype != dtype:
            mask = editor.call(aten.to.dtype, mask, dtype, like=mask, after=mask)
        if _is_finite(self.gm, mask):
            return Mask(mask, None)
        low = masked_score(dtype)
        known = self._constant(mask)
        if known is not None:
            rows = (known != -math.inf).any(-1, keepdim=True).to(dtype)
            name = _name(mask)
            gate = None if bool(rows.all()) else editor.constant(f"{name}_rows", rows, like=mask)
            return Mask(editor.constant(name, known.clamp(min=low), like=mask), gate)
        additive = editor.call(aten.clamp.default, mask, low, like=mask, after=mask)
        seen = editor.call(aten.ne.Scalar, mask, -math.inf, like=mask, after=additive)
        return Mask(additive, _gate(seen, dtype, editor, after=seen))


def _scale(query: Node, editor: Editor, node: Node) -> float | Node:
    """1 / sqrt(the width of a head), a tensor where the width is known only at run time."""
    fake = query.meta["val"]
    width = fake.shape[-1]
    if isinstance(width, int):
        return 1.0 / math.sqrt(width)
    size = editor.call(aten.sym_size.int, query, -1, like=node, val=width)
    filled = editor.call(
        aten.full.default, [1], size, like=node, dtype=fake.dtype, device=fake.device
    )
    return editor.call(aten.rsqrt.default, filled, like=node)


def _known(seen: Tensor, dtype: torch.dtype, editor: Editor, name: str, like: Node) -> Mask | None:
    """A mask of constants; None if nothing is masked."""
    if bool(seen.all()):
        return None
    low = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, masked_score(dtype))
    additive = editor.constant(name, low, like=like)
    rows = seen.any(-1, keepdim=True)
    if bool(rows.all()):
        return Mask(additive, None)
    return Mask(additive, editor.constant(f"{name}_rows", rows.to(dtype), like=like))


def _name(mask: Node) -> str:
    """The name of the float form of a constant mask."""
    source = source_constant(mask)
    return f"{source.target if source is not None else 'mask'}_additive"


def additive_mask(seen: Node, dtype: torch.dtype, editor: Editor) -> Node:
    """0.0 where a mask is true, `masked_score` where it is false."""
    one = editor.call(aten.to.dtype, seen, dtype, like=seen, after=seen)
    shifted = editor.call(aten.sub.Tensor, one, 1.0, like=seen, after=one)
    return editor.call(aten.mul.Tensor, shifted, -masked_score(dtype), like=seen, after=shifted)


def _gate(seen: Node, dtype: torch.dtype, editor: Editor, *, after: Node) -> Node:
    """1.0 for the rows in which a mask is true anywhere, 0.0 for the others."""
    anywhere = editor.call(aten.any.dim, seen, -1, True, like=seen, after=after)
    return editor.call(aten.to.dtype, anywhere, dtype, like=seen, after=anywhere)


def _repeats(query: Node, key: Node) -> int | None:
    """Return the number of query heads that share a key head."""
    heads, shared = query.meta["val"].shape[-3], key.meta["val"].shape[-3]
    return heads // shared if isinstance(heads, int) and isinstance(shared, int) else None


def _repeated(value: Node, repeats: int, editor: Editor, node: Node) -> Node:
    """Keys or values with each head repeated: [..., heads, length, width]."""
    rank = value.meta["val"].dim()
    sizes = [-1] * (rank + 1)
    sizes[-3] = repeats
    apart = editor.call(aten.unsqueeze.default, value, -3, like=node)
    wide = editor.call(aten.expand.default, apart, sizes, like=node)
    return editor.call(aten.flatten.using_ints, wide, -4, -3, like=node)


def _allow_any_layout(attention: Node) -> None:
    """Let views of the result be copies: the written-out form lays its result out differently."""
    stack = [attention]
    while stack:
        for user in stack.pop().users:
            if is_call(user, VIEWS):
                if user.target is aten.view.default:
                    user.target = aten.reshape.default
                stack.append(user)


@graph_pass(needs=(HAS_VALUES,), gives=())
def decompose_attention(gm: GraphModule) -> PassResult:
    """Write attention out with an additive float mask, made once for all layers.

    Rows that are masked as a whole give 0, as `scaled_dot_product_attention` does. Boolean
    masks cost a delegate dozens of operators for each layer that it cannot take.

    Before:  o = scaled_dot_product_attention(q, k, v, mask)
    After:   a = (mask - 1) * big; s = matmul(q, transpose(k)) * scale + a
             o = matmul(softmax(s), v) * any(mask)
    """
    find = Op(SDPA, Var("q"), Var("k"), Var("v"), name="attention")
    return rewrite(gm, (Rule("written out", find, _Attention(gm).build),))


_OPERANDS = 3
"""query, key and value; a mask stays as it is, since attention takes a float32 one beside them."""


@graph_pass(needs=(), gives=())
def narrow_attention(gm: GraphModule) -> PassResult:
    """Cast query, key and value of float32 attention to bfloat16, and its result back.

    Its two products then run on a CPU's or GPU's bfloat16 matrix units; softmax is computed in
    float32 inside the operator. Casts err by at most 2^-9 of each value, int8 by that of a tensor's
    greatest. Attention in other dtypes is left alone.

    Before:  y = scaled_dot_product_attention(q, k, v, mask)
    After:   y = to(scaled_dot_product_attention(to(q, bf16), to(k, bf16), to(v, bf16), mask), f32)
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, SDPA)]:
        if all(_is_float32(value) for value in (node, *node.args[:_OPERANDS])):
            _narrow(editor, node)
        else:
            reason = "attention that is not float32 stays as it is"
            notes.append(Note(node.name, reason, skipped=True))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _is_float32(value: object) -> bool:
    fake = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(fake, Tensor) and fake.dtype is torch.float32


def _narrow(editor: Editor, node: Node) -> None:
    def cast(value: object, dtype: torch.dtype) -> Node:
        return editor.call(aten.to.dtype, value, dtype, like=node, before=node)

    operands = [cast(value, torch.bfloat16) for value in node.args[:_OPERANDS]]
    rest, named = node.args[_OPERANDS:], dict[str, Any](node.kwargs)
    made = editor.call(node.target, *operands, *rest, like=node, before=node, **named)
    editor.replace(node, cast(made, torch.float32))
