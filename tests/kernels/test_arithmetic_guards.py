"""Arithmetic that only a GPU gets wrong, read from the kernels' sources.

The interpreter divides exactly, never fuses a multiply-add and knows no libdevice: what departs
from the definitions on a GPU alone, no test of results can see.
"""

import ast
from pathlib import Path

import pytest

from benchmarks.kernels.catalog import COMPILE_CASES

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
SOURCES = sorted(KERNELS.glob("*/gpu.py"))
FUSED = {
    ("fp8_linear", "fp8_linear_kernel"),
    ("int4_linear", "int4_linear_kernel"),
    ("sparse_linear", "sparse_linear_kernel"),
}
"""Held to a bound, not to the bit: their float sums may be rounded once less."""
DIVIDES = {
    # A division of float32 by `/` is off by up to two last bits. These have exp in them and are
    # within a step of the definition anyway.
    ("epilogue", "_tanh"): 1,
    ("epilogue", "activate"): 2,
    ("softmax_quantize", "softmax_quantize_kernel"): 1,
    # Of float64, which `/` divides exactly.
    ("quantize_per_token", "_quantize_row"): 1,
}
INEXACT = {"rsqrt", "sqrt", "fdiv", "sigmoid", "softmax", "exp2"}
UNKNOWN_TO_THE_INTERPRETER = {"libdevice", "rint", "extern_elementwise"}


def functions(path):
    """The Triton functions of a file by name."""
    for node in ast.parse(path.read_text()).body:
        is_jit = isinstance(node, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(d) for d in node.decorator_list
        )
        if is_jit:
            yield node.name, node


FOUND = [(p.parent.name, name, node) for p in SOURCES for name, node in functions(p)]
by_function = pytest.mark.parametrize(
    ("unit", "name", "node"), FOUND, ids=[f"{unit}.{name}" for unit, name, _ in FOUND]
)


def test_kernels_when_sources_are_read_then_functions_are_found():
    assert {("int8_linear", "int8_linear_kernel"), *DIVIDES} <= {found[:2] for found in FOUND}


@by_function
def test_kernels_when_they_divide_then_only_where_it_may_be_inexact(unit, name, node):
    divisions = [ast.unparse(n) for n in ast.walk(node) if is_division(n)]
    assert len(divisions) == DIVIDES.get((unit, name), 0), divisions


def is_division(node):
    return isinstance(node, ast.AugAssign | ast.BinOp) and isinstance(node.op, ast.Div)


@by_function
def test_kernels_when_they_call_functions_then_none_is_approximate_or_unknown_to_the_interpreter(
    unit, name, node
):
    assert called(node) & (INEXACT | UNKNOWN_TO_THE_INTERPRETER) == set()


def called(node):
    """The last names of what a function calls."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    return {ast.unparse(call.func).rpartition(".")[2] for call in calls}


def test_compile_cases_when_multiply_adds_are_fused_then_only_where_a_bound_allows_it():
    """`test_guards` holds each launch to its compile case; this says which may say so."""
    assert {(c.op, c.kernel) for c in COMPILE_CASES if c.fp_fusion} == FUSED


@by_function
def test_kernels_when_they_use_inline_assembly_then_have_a_twin_for_the_interpreter(
    unit, name, node
):
    # The interpreter's own fma rounds twice.
    if called(node) & {"inline_asm_elementwise", "fma"}:
        assert "EMULATE" in {argument.arg for argument in node.args.args}
