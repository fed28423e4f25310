"""Addresses beyond 2**31 elements, read from the kernels' sources.

No test can afford tensors that large. Triton's integers have 32 bits unless they are cast, and a
product that leaves them reads somewhere else without a word.
"""

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
COUNTED = {"rows", "columns", "pixels", "places"}
"""What helpers call the indices that a kernel hands to them."""
VALUES = {"zero_point", "zeros"}
"""Arguments that values are multiplied by, not places."""
BOUNDED = {
    # Within one image, which has fewer elements than 2**31.
    "pixel // OW * stride_h",
    "pixel % OW * stride_w",
    "h0 * W",
    "(h0 * W + w0) * C",
    # Within one image's masks.
    "head % heads * mask_head",
    "rows % queries * mask_query",
    # Within the rows of one tile.
    "within[None, :] * K",
    # Within the scales of one weight, of which a group of elements has one.
    "columns * groups",
    # Rows have 64 bits where this is called.
    "rows[:, None] * width",
}


def functions():
    """Every Triton function of a kernel's file."""
    for path in sorted(KERNELS.glob("*/gpu.py")):
        for node in ast.parse(path.read_text()).body:
            decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else ()
            if any("triton.jit" in ast.unparse(d) for d in decorators):
                yield f"{path.parent.name}.{node.name}", node


def names(expression):
    return {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}


def narrow_products(function):
    """Products of an index that counts programs and an argument, in 32 bits."""
    arguments = [a for a in function.args.args if a.annotation is None]
    sizes = {a.arg for a in arguments} - VALUES
    narrow, wide = sizes & COUNTED, set()

    def is_wide(expression):
        return "int64" in ast.unparse(expression) or bool(names(expression) & wide)

    def is_index(expression):
        return "program_id" in ast.unparse(expression) or bool(names(expression) & narrow)

    statements = [n for n in ast.walk(function) if isinstance(n, ast.Assign | ast.AugAssign)]
    for statement in sorted(statements, key=lambda s: s.lineno):
        for part in ast.walk(statement.value):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult) and not is_wide(part):
                sides = (part.left, part.right), (part.right, part.left)
                if any(is_index(a) and names(b) & (sizes - COUNTED) for a, b in sides):
                    yield ast.unparse(part)
        if isinstance(statement, ast.Assign):
            made = names(statement.targets[0])
            if is_wide(statement.value):
                wide |= made
                narrow = narrow - made
            elif is_index(statement.value) or "tile_of_program" in ast.unparse(statement.value):
                narrow = narrow | made


FOUND = dict(functions())


@pytest.mark.parametrize("name", FOUND)
def test_products_when_they_make_addresses_then_have_64_bits(name):
    # Values, not addresses, are loaded and multiplied.
    found = {p for p in narrow_products(FOUND[name]) if "tl.load" not in p}
    assert found <= BOUNDED


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("rows = tl.program_id(0) * 16 + tl.arange(0, 16)\n at = rows[:, None] * K", 1),
        ("rows = tl.program_id(0) * 16 + tl.arange(0, 16)\n at = rows.to(tl.int64) * K", 0),
        ("rows = tl.program_id(0).to(tl.int64) * 16\n at = rows * K", 0),
        ("a, b = tile_of_program(K)\n rows = a * 16\n at = x + rows * K", 1),
        ("at = tl.program_id(0) * K", 1),
    ],
)
def test_narrow_products_when_a_product_is_narrow_then_sees_it(line, found):
    (function,) = ast.parse(f"def f(x, K, BLOCK: tl.constexpr):\n {line}").body
    assert len(list(narrow_products(function))) == found
