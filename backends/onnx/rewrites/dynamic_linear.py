"""Integer products of linears whose input is quantized at run time."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.linear_sites import LinearSite, find_linears, replace_linear
from pt2e_quant.backends.onnx.rewrites.expand_per_token import choose_rows, read_per_token
from pt2e_quant.backends.onnx.values import (
    MICROSOFT,
    call,
    constant,
    make_constant,
    redirect,
)


def multiply_per_tensor(graph: ir.Graph) -> int:
    """Multiply integers where DynamicQuantizeLinear made the input.

    ONNX Runtime makes DynamicQuantizeMatMul of this, or MatMulIntegerToFloat where several
    linears read one input.

    Before:  MatMul(dq(x_q, s, z), Transpose(dq(w int8[N, K]))) + b
    After:   Cast(MatMulInteger(x_q, w[K, N], z)) * (s * w_scale) + b
    """
    changed = 0
    for site in find_linears(graph):
        dequantize = site.x.producer()
        made = dequantize.inputs[0].producer() if _is_dequantize(dequantize) else None  # type: ignore[union-attr]
        if made is None or made.op_type != "DynamicQuantizeLinear" or not _is_int8(site):
            continue
        integers, scale, zero_point = made.outputs
        product = _product(site, integers, zero_point)
        both = _step(site, "Mul", scale, site.weight.scale_source, of="scales")
        result = _step(site, "Mul", product, both, of="real")
        redirect(site.output, _with_bias(site, result))
        replace_linear(site)
        changed += 1
    return changed


def multiply_per_token(graph: ir.Graph) -> int:
    """Multiply integers where the input is quantized per token.

    No kernel takes a scale for each row, so the rows' scales and zero_points come after the
    product: with q uint8, y = s * (q @ W) - s * z * colsum(W) + b. Linears that read one input
    share its integers.

    Before:  MatMul(dq_token(q_token(x)), Transpose(dq(w int8[N, K]))) + b
    After:   Gemm([-s * z, 1], [colsum(W); b], MatMulIntegerToFloat(q, w) * s)
    """
    return _multiply_rows(graph, is_portable=False)


def multiply_per_token_portable(graph: ir.Graph) -> int:
    """The same in standard operators: Cast(MatMulInteger) * w_scale for MatMulIntegerToFloat."""
    return _multiply_rows(graph, is_portable=True)


def _multiply_rows(graph: ir.Graph, *, is_portable: bool) -> int:
    changed = 0
    rows: dict[ir.Value, _Rows] = {}
    ones: dict[tuple[object, ...], ir.Value] = {}
    for site in find_linears(graph):
        x = read_per_token(site.x)
        if x is None or not _is_int8(site) or x.shape is None:
            continue
        if x not in rows:
            rows[x] = _Rows(graph, site.node, x, ones)
        redirect(site.output, _row_product(graph, site, rows[x], is_portable=is_portable))
        replace_linear(site)
        changed += 1
    return changed


class _Rows:
    """The rows of one tensor in uint8 [M, K], and what brings their products back to reals.

    Attributes:
        x: the real tensor.
        integers: uint8 [M, K].
        scale: float32 [M, 1].
        corrections: float32 [M, 2]: -scale * zero_point, and 1.

    `ones` holds the columns of 1 made so far, by the leading sizes of what they stand beside.
    """

    def __init__(
        self,
        graph: ir.Graph,
        at: ir.Node,
        x: ir.Value,
        ones: dict[tuple[object, ...], ir.Value],
    ) -> None:
        base = f"{x.name}_rows"
        assert x.shape is not None
        self.x = x
        flat = x
        if len(x.shape) != 2:
            rows = make_constant(graph, f"{base}_shape", np.array([-1, x.shape[-1]]))
            flat = call(at, "Reshape", [x, rows], name=base)
            flat.type = x.type
        chosen = choose_rows(graph, at, flat, base, keepdims=False)
        to_uint8 = {"to": int(ir.DataType.UINT8)}
        zeros = call(at, "Cast", [chosen.zero_point], to_uint8, name=f"{base}_zeros")
        inputs = [flat, chosen.scale, zeros]
        self.integers = call(at, "QuantizeLinear", inputs, {"axis": 0}, name=f"{base}_q")
        self.integers.type = ir.TensorType(ir.DataType.UINT8)
        column = make_constant(graph, f"{base}_column", np.array([-1, 1]))
        self.scale = call(at, "Reshape", [chosen.scale, column], name=f"{base}_scales")
        # Beside each other, for a product of rank 2 with the columns' sums and the bias.
        offset = call(at, "Mul", [chosen.zero_point, chosen.negated], name=f"{base}_shift")
        offset = call(at, "Reshape", [offset, column], name=f"{base}_shifts")
        lead: tuple[object, ...] = tuple(x.shape)[:-1]
        if any(getattr(size, "value", size) is None for size in lead):
            lead = (x,)  # of a size without a name nothing is known to be equal
        if lead not in ones:
            ones[lead] = call(at, "Div", [self.scale, self.scale], name=f"{base}_ones")
        both = [offset, ones[lead]]
        self.corrections = call(at, "Concat", both, {"axis": 1}, name=f"{base}_corrections")
        self._shapes: dict[int, ir.Value] = {}

    def shape(self, graph: ir.Graph, at: ir.Node, columns: int) -> ir.Value:
        """The shape of a result with so many columns: a constant with at most one dynamic size."""
        if columns in self._shapes:
            return self._shapes[columns]
        base = f"{self.x.name}_to_{columns}"
        sizes = [size if isinstance(size, int) else -1 for size in (self.x.shape or ())[:-1]]
        if sizes.count(-1) <= 1:
            made = make_constant(graph, base, np.array([*sizes, columns]))
        else:
            lead = call(at, "Shape", [self.x], {"start": 0, "end": -1}, name=f"{base}_lead")
            width = make_constant(graph, f"{base}_width", np.array([columns]))
            made = call(at, "Concat", [lead, width], {"axis": 0}, name=base)
        self._shapes[columns] = made
        return made


def _row_product(graph: ir.Graph, site: LinearSite, rows: _Rows, *, is_portable: bool) -> ir.Value:
    weight = site.weight
    if is_portable:
        product = _product(site, rows.integers, None)
        real = _step(site, "Mul", product, weight.scale_source, of="real")
    else:
        one = make_constant(graph, "one", np.array(1, np.float32))
        zero = make_constant(graph, "zero_uint8", np.array(0, np.uint8))
        inputs = [rows.integers, _columns(site), one, weight.scale_source, zero]
        real = _step(site, "MatMulIntegerToFloat", *inputs, of="real", domain=MICROSOFT)
    scaled = _step(site, "Mul", real, rows.scale, of="scaled")
    sums = weight.dequantized.sum(axis=1, dtype=np.float64).astype(np.float32)
    bias = constant(site.bias)
    bias = np.zeros_like(sums) if bias is None else bias
    name = f"{weight.source.name}_sums"
    stacked = make_constant(graph, name, np.stack([sums, bias]).astype(np.float32))
    total = _step(site, "Gemm", rows.corrections, stacked, scaled, of="total")
    if len(rows.x.shape or ()) == 2:
        return _like(total, site.output)
    shape = rows.shape(graph, site.last, len(sums))
    return _like(_step(site, "Reshape", total, shape, of="rows"), site.output)


def _product(site: LinearSite, integers: ir.Value, zero_point: ir.Value | None) -> ir.Value:
    inputs = [integers, _columns(site)]
    if zero_point is not None:
        inputs.append(zero_point)
    product = call(site.last, "MatMulInteger", inputs, name=f"{site.output.name}_integers")
    to_float = {"to": int(ir.DataType.FLOAT)}
    return call(site.last, "Cast", [product], to_float, name=f"{site.output.name}_float")


def _columns(site: LinearSite) -> ir.Value:
    """The weight as int8 [K, N]: transposed when the file is loaded, and so stored but once."""
    turned = call(
        site.last,
        "Transpose",
        [site.weight.source],
        {"perm": [1, 0]},
        name=f"{site.output.name}_columns",
    )
    turned.type = ir.TensorType(ir.DataType.INT8)
    return turned


def _with_bias(site: LinearSite, product: ir.Value) -> ir.Value:
    if site.bias is None:
        return _like(product, site.output)
    return _like(_step(site, "Add", product, site.bias, of="sum"), site.output)


def _step(site: LinearSite, op_type: str, *inputs: ir.Value, of: str, domain: str = "") -> ir.Value:
    made = call(site.last, op_type, inputs, name=f"{site.output.name}_{of}", domain=domain)
    made.type = ir.TensorType(ir.DataType.FLOAT)
    return made


def _like(value: ir.Value, old: ir.Value) -> ir.Value:
    value.type, value.shape = old.type, old.shape
    return value


def _is_int8(site: LinearSite) -> bool:
    return site.weight.bits == 8 and site.weight.is_symmetric and site.weight.scale.shape[1] == 1


def _is_dequantize(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "DequantizeLinear" and node.inputs[0] is not None
