"""Integer products that are wrong on this machine: found by trial, left float with that reason."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.backends.fuse_kernels import ANCHOR_KEY, KERNEL_KEY, Decide
from pt2e_quant.backends.target.float_retries import fallback_of
from pt2e_quant.core.export_dims import DimRange
from pt2e_quant.core.qdq import is_dequantize, is_qdq
from pt2e_quant.core.read_capture import dims_of
from pt2e_quant.core.size_expression import evaluate_size
from pt2e_quant.core.unpack_op import Unpack
from pt2e_quant.flow.report.report import FloatRegion
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.pattern import Match
from pt2e_quant.graph.pipeline import GraphPass, Note, PassResult
from pt2e_quant.graph.subgraphs import named_graphs
from pt2e_quant.kernels.int4_linear.any_rows_op import LinearOfGroups
from pt2e_quant.kernels.int8_linear.op import Int8Linear
from pt2e_quant.kernels.int8_linear.rows_op import Int8LinearRows
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.onednn.limbs_op import LinearOfLimbs
from pt2e_quant.kernels.onednn.operators import ConvSum, LinearSum, QConv, QLinear
from pt2e_quant.kernels.product_trial.product import Operator, PostOpKind, Product
from pt2e_quant.kernels.product_trial.verdicts import verdicts_of

FAILED_PRODUCT = "integer product that fails here"
"""The reason in the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A kernel that does not compute what it should, at one place of a graph.

    Args:
        row: the kernel's.
        anchor: the last operator that its fused call took the place of.
        reason: what is wrong with its product.
    """

    row: str
    anchor: str
    reason: str

    @property
    def float_region(self) -> FloatRegion:
        """The entry of the report."""
        return FloatRegion(
            node=self.anchor,
            what=FAILED_PRODUCT,
            reason=f'{self.reason}: "{self.row}" is not used',
            cost="float operators, weights held in float",
        )


def find_failures(program: GraphModule) -> tuple[tuple[Failure, ...], str]:
    """The fused calls of a program whose products are wrong on this machine.

    Each distinct product is tried once on random integers, in a child process; what is found is
    kept for later programs.

    Returns:
        Those calls, and why nothing could be tried, "" if it could.
    """
    nodes = (node for graph in named_graphs(program) for node in graph.gm.graph.nodes)
    by_node = {node: products_of(node) for node in nodes if KERNEL_KEY in node.meta}
    wanted = dict.fromkeys(product for products in by_node.values() for product in products)
    if not wanted:
        return (), ""
    reasons, untried = verdicts_of(wanted)
    failures = []
    for node, products in by_node.items():
        reason = next((reasons[product] for product in products if reasons[product]), "")
        if reason:
            row, anchor = node.meta[KERNEL_KEY].name, node.meta[ANCHOR_KEY]
            failures.append(Failure(row=row, anchor=anchor, reason=reason))
    return tuple(failures), untried


def deciding_without(decide: Decide, failures: Sequence[Failure]) -> Decide:
    """A decision that also refuses kernels where they failed, or were refused."""
    reasons = {(failure.row, failure.anchor): failure.reason for failure in failures}

    def decide_by_trial(
        gm: GraphModule, refused: dict[str, str]
    ) -> Callable[[Kernel, Match], bool]:
        takes = decide(gm, refused)

        def takes_tried(kernel: Kernel, match: Match) -> bool:
            reason = reasons.get((kernel.name, match.anchor.name))
            if reason is None and any(map(fallback_of, match.covered)):
                reason = "its lowering was refused in integers"
            if reason is None:
                return takes(kernel, match)
            refused.setdefault(match.anchor.name, reason)
            return False

        return takes_tried

    return decide_by_trial


def hold_weights(failures: Sequence[Failure]) -> GraphPass:
    """A pass that dequantizes the weights of failed and refused products once, not in every call.

    Before:  conv2d(x, dq(weight), b)
    After:   conv2d(x, weight_float, b)

    A compiler would also see the integer product in the first form, and fuse it again.
    """
    failed = {failure.anchor for failure in failures}

    def edit(gm: GraphModule) -> PassResult:
        editor = Editor(gm)
        anchors = failed | {node.name for node in gm.graph.nodes if fallback_of(node)}
        notes = []
        for node in [n for n in gm.graph.nodes if is_dequantize(n)]:
            value = _held(gm, node)
            if value is None or not _leads_to(node, anchors):
                continue
            held = editor.constant(f"{node.name}.held", value, like=node)
            editor.replace(node, held)
            notes.append(Note(node.name, "held in float"))
        return PassResult(changed=editor.finish(), notes=tuple(notes))

    return GraphPass("hold_weights", edit, needs=(), gives=())


def _leads_to(node: Node, anchors: set[str]) -> bool:
    """True if a weight's product, or what was to be fused with it, is among the anchors."""
    reached = list(node.users)
    for _ in range(_LONGEST_CHAIN):
        if any(reader.name in anchors for reader in reached):
            return True
        reached = [user for reader in reached if not is_qdq(reader) for user in reader.users]
    return False


_LONGEST_CHAIN = 3
"""A product, a sum and a function are the longest pattern."""


def _held(gm: GraphModule, node: Node) -> Tensor | None:
    """The value of a dequantize of a constant, None for other nodes."""
    found = constant_of(gm, node)
    if found is not None or not (is_dequantize(node) or node.target is Unpack):
        return found
    inputs: Mapping[Node, Tensor | None] = {n: _held(gm, n) for n in node.all_input_nodes}
    if any(value is None for value in inputs.values()):
        return None
    target: Any = node.target
    with torch.no_grad():
        made: Tensor = target(
            *map_arg(node.args, inputs.__getitem__), **map_arg(node.kwargs, inputs.__getitem__)
        )
    return made


_MOST = 1 << 22
"""A symbolic size is tried at no more activations than this: 4 MB."""
_UNBOUNDED = 4
"""A size without a bound is tried at this many times the example's."""


def products_of(node: Node) -> tuple[Product, ...]:
    """The products of a node at the example's, the smallest and the largest captured sizes.

    None of a node that calls no product of oneDNN.
    """
    read = _READERS.get(node.target)
    if read is None:
        return ()
    found = dict.fromkeys(p for p in read(node) if not p.is_empty and _has_result(p))
    return tuple(found)


def _has_result(product: Product) -> bool:
    """True if the window fits the image, which the smallest captured size may be too small for."""
    sizes = zip(product.x[2:], product.weight[2:], product.padding, product.dilation, strict=False)
    spans = (size + 2 * pad - gap * (kernel - 1) for size, kernel, pad, gap in sizes)
    return product.operator is not Operator.CONV or all(span > 0 for span in spans)


def _shapes(shape: Sequence[int | torch.SymInt]) -> Iterator[tuple[int, ...]]:
    """A shape at the example's sizes, the smallest and the largest."""
    dims: dict[str, DimRange] = {}
    for size in shape:
        dims |= dims_of(size)
    hints = {name: dim.hint for name, dim in dims.items()}
    yield from _at(shape, hints)
    if not dims:
        return
    yield from _at(shape, {name: max(1, dim.minimum) for name, dim in dims.items()})
    largest = {name: dim.maximum or _UNBOUNDED * dim.hint for name, dim in dims.items()}
    while True:
        found = list(_at(shape, largest))
        if not found or math.prod(found[0]) <= _MOST or largest == hints:
            yield from found
            return
        largest = {name: max(hints[name], size // 2) for name, size in largest.items()}


def _at(shape: Sequence[int | torch.SymInt], sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    found = [
        evaluate_size(str(size.node.expr), sizes) if isinstance(size, torch.SymInt) else int(size)
        for size in shape
    ]
    known = tuple(size for size in found if size is not None and size >= 0)
    if len(known) == len(found):
        yield known


def _shape(value: Any) -> tuple[Any, ...]:
    return tuple(value.meta["val"].shape)


def _post_op(name: str, numbers: Sequence[float], algorithm: str) -> PostOpKind:
    bounds = tuple(_sign(number) for number in numbers) if name == "hardtanh" else ()
    return PostOpKind(name=name, algorithm=algorithm, bounds=bounds)


def _sign(number: float) -> str:
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    return "0" if number == 0 else "+" if number > 0 else "-"


def _dtype(value: torch.dtype) -> str:
    return str(value).removeprefix("torch.")


def _conv(node: Node) -> Iterator[Product]:
    args: Any = node.args
    pack = args[3]
    is_sum = node.target is ConvSum
    summand = _dtype(args[6].meta["val"].dtype) if is_sum else ""
    bias, stride, padding, dilation, groups, _, zero_point, dtype = args[6 + is_sum : 14 + is_sum]
    unary = args[-3:]
    for x in _shapes(_shape(args[0])):
        yield Product(
            operator=Operator.CONV,
            x=x,
            weight=_shape(pack.args[0]),
            stride=tuple(stride),
            padding=tuple(padding),
            dilation=tuple(dilation),
            groups=groups,
            is_shifted=args[2] != 0,
            is_packed_for_x=pack.args[-1] is not None,
            has_bias=bias is not None,
            result=_dtype(dtype),
            is_result_shifted=zero_point != 0,
            summand=summand,
            is_summand_shifted=is_sum and args[16] != 0,
            post_op=_post_op(*unary),
        )


def _linear(node: Node) -> Iterator[Product]:
    args: Any = node.args
    is_sum = node.target is LinearSum
    bias, _, zero_point, dtype = args[6 + is_sum : 10 + is_sum]
    for x in _shapes(_shape(args[0])):
        product = Product(
            operator=Operator.LINEAR,
            x=x,
            weight=(int(node.meta["val"].shape[-1]), x[-1]),
            is_shifted=args[2] != 0,
            is_packed_for_x=args[3].args[-1] is not None,
            has_bias=bias is not None,
            result=_dtype(dtype),
            is_result_shifted=zero_point != 0,
            summand=_dtype(args[6].meta["val"].dtype) if is_sum else "",
            is_summand_shifted=is_sum and args[12] != 0,
            post_op=_post_op(*args[-3:]),
        )
        yield product


def _rows(node: Node) -> Iterator[Product]:
    """`int8_linear_rows`: flat rows; one of them has its zero_point in the product."""
    x: Any = node.args[0]
    columns = int(node.meta["val"].shape[-1])
    for shape in _shapes(_shape(x)):
        rows = math.prod(shape[:-1])
        yield Product(
            operator=Operator.LINEAR,
            x=(rows, shape[-1]),
            weight=(columns, shape[-1]),
            is_shifted=rows == 1,
        )


def _limbs(node: Node) -> Iterator[Product]:
    """Two limbs of each row, both 128 above what they stand for."""
    x: Any = node.args[0]
    columns = int(node.meta["val"].shape[-1])
    for shape in _shapes(_shape(x)):
        yield Product(
            operator=Operator.LINEAR,
            x=(2, *shape),
            weight=(columns, shape[-1]),
            is_shifted=True,
        )


def _int_mm(node: Node) -> Iterator[Product]:
    x: Any = node.args[0]
    columns = int(node.meta["val"].shape[-1])
    for shape in _shapes(_shape(x)):
        if shape[-1] > 1:  # of one feature the definition runs
            rows = math.prod(shape[:-1])
            yield Product(
                operator=Operator.INT_MM, x=(rows, shape[-1]), weight=(columns, shape[-1])
            )


_READERS: dict[Any, Callable[[Node], Iterator[Product]]] = {
    QConv: _conv,
    ConvSum: _conv,
    QLinear: _linear,
    LinearSum: _linear,
    Int8LinearRows: _rows,
    LinearOfLimbs: _limbs,
    LinearOfGroups: _limbs,
    Int8Linear: _int_mm,
}
