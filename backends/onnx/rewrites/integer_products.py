"""Integer products of what is quantized at run time: inputs of linears, and caches."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.linear_sites import LinearSite, find_linears, replace_linear
from pt2e_quant.backends.onnx.rewrites.expand_per_token import choose_rows, read_per_token
from pt2e_quant.backends.onnx.values import (
    MICROSOFT,
    call,
    constant,
    make_constant,
    only_consumer,
    permutation,
    redirect,
    remove_unread,
    sizes,
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
        redirect(site.output, _tensor_product(site, *made.outputs))
        replace_linear(site)
        changed += 1
    return changed


def _tensor_product(
    site: LinearSite, integers: ir.Value, scale: ir.Value, zero_point: ir.Value
) -> ir.Value:
    product = _product(site, integers, zero_point)
    both = _step(site, "Mul", scale, site.weight.scale_source, of="scales")
    return _with_bias(site, _step(site, "Mul", product, both, of="real"))


def multiply_one_row(graph: ir.Graph) -> int:
    """Quantize an input of one row as a tensor: ONNX Runtime has one operator for that.

    The qparams of the tensor are those of its row. Linears that read one input share its integers.

    Before:  MatMul(dq_token(q_token(x[1, K])), Transpose(dq(w int8[N, K]))) + b
    After:   Cast(MatMulInteger(x_q, w[K, N], z)) * (s * w_scale) + b,
             with x_q, s, z = DynamicQuantizeLinear(x)
    """
    changed = 0
    rounded: dict[ir.Value, tuple[ir.Value, ir.Value, ir.Value]] = {}
    for site in find_linears(graph):
        x = read_per_token(site.x)
        if x is None or not _is_int8(site) or set(sizes(x)[:-1]) - {1} or not sizes(x):
            continue
        if x not in rounded:
            rounded[x] = _quantize_tensor(site.node, x)
        redirect(site.output, _tensor_product(site, *rounded[x]))
        replace_linear(site)
        changed += 1
    return changed


def _quantize_tensor(at: ir.Node, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The integers of a tensor, its scale and its zero_point, found at run time."""
    names = (f"{x.name}_q", f"{x.name}_scale", f"{x.name}_zero_point")
    dtypes = (ir.DataType.UINT8, ir.DataType.FLOAT, ir.DataType.UINT8)
    outputs = [
        ir.Value(name=name, type=ir.TensorType(dtype))
        for name, dtype in zip(names, dtypes, strict=True)
    ]
    node = ir.node("DynamicQuantizeLinear", [x], outputs=outputs, name=f"node_{names[0]}")
    node.metadata_props.update(at.metadata_props)
    assert isinstance(at.graph, ir.Graph)
    at.graph.insert_before(at, node)
    integers, scale, zero_point = outputs
    return integers, scale, zero_point


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


def scale_products(graph: ir.Graph) -> int:
    """Take the scales of rows out of a product's right side: keys and values kept in few bits.

    Scaling all of a cache for each token reads and writes all of it once more; scores have a
    row for each new token alone. The same numbers in another order: a product differs by
    float rounding.

    Before:  q @ Transpose(Cast(codes) * scales)
    After:   (q @ Transpose(Cast(codes))) * Transpose(scales),   codes[…, S, D], scales[…, S, 1]

    Before:  p @ (Cast(codes) * scales)
    After:   (p * Transpose(scales)) @ Cast(codes)
    """
    turned: dict[ir.Value, ir.Value] = {}
    changed = 0
    for product in [n for n in graph if n.op_type == "MatMul"]:
        left, right = product.inputs
        if left is None or right is None or len(sizes(left)) == 1:
            continue
        turn = right.producer()
        is_turned = turn is not None and _swaps_last(turn)
        scaled = turn.inputs[0] if turn is not None and is_turned else right
        found = _read_rows(scaled)
        if found is None or only_consumer(right) is None:
            continue
        steps, scales = found
        if scales not in turned:
            turned[scales] = _transpose(product, scales, f"{scales.name}_turned")
        _scale(product, left, steps, turned[scales], is_turned=is_turned)
        remove_unread(graph, [product])
        changed += 1
    return changed


def _scale(
    product: ir.Node, left: ir.Value, steps: ir.Value, scales: ir.Value, *, is_turned: bool
) -> None:
    """The product without scales, which come behind it, or in front where its rows are summed."""
    output = product.outputs[0]
    name = output.name
    if is_turned:
        right = _transpose(product, steps, f"{name}_codes")
        made = call(product, "MatMul", [left, right], name=f"{name}_steps", like=output)
        made = call(product, "Mul", [made, scales], name=f"{name}_scaled", like=output)
    else:
        weighted = call(product, "Mul", [left, scales], name=f"{name}_weights")
        made = call(product, "MatMul", [weighted, steps], name=f"{name}_sums", like=output)
    redirect(output, made)


def _read_rows(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Integers as float [..., S, D] and the scales of their rows [..., S, 1], of a product."""
    node = value.producer() if value is not None else None
    if node is None or value is None or node.op_type != "Mul" or only_consumer(value) is None:
        return None
    steps, scales = node.inputs
    if steps is None or scales is None or constant(scales) is not None:
        return None
    rows, columns = sizes(steps), sizes(scales)
    if len(rows) < 2 or columns != [*rows[:-1], 1] or rows[-1] == 1 or None in rows:
        return None
    return (steps, scales) if _is_read(steps) else None


def _is_read(steps: ir.Value) -> bool:
    """True if a value is integers cast to float, or halves of rows that were packed in bytes."""
    joined = steps.producer()
    if joined is None or joined.op_type != "Concat":
        return _is_cast(joined)
    sources = [v.producer() for v in joined.inputs if v is not None]
    return [n.op_type for n in sources if n is not None] == ["Sub", "Floor"]


def _is_cast(node: ir.Node | None) -> bool:
    """True if it casts int8 to float."""
    if node is None or node.op_type != "Cast" or node.inputs[0] is None:
        return False
    to = node.attributes["to"].as_int()
    return node.inputs[0].dtype is ir.DataType.INT8 and to == ir.DataType.FLOAT


def _swaps_last(node: ir.Node) -> bool:
    """True if a Transpose swaps the last two axes and no others."""
    perm = permutation(node)
    if perm is None:
        return False
    last = len(perm) - 1
    return perm == [*range(last - 1), last, last - 1]


def _transpose(product: ir.Node, value: ir.Value, name: str) -> ir.Value:
    last = len(sizes(value)) - 1
    perm = [*range(last - 1), last, last - 1]
    made = call(product, "Transpose", [value], {"perm": perm}, name=name)
    made.type = value.type
    made.shape = ir.Shape([value.shape[axis] for axis in perm]) if value.shape is not None else None
    return made
