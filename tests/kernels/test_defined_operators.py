"""Every fused operator: what a GPU call that cannot run says, what no rows give.

`test_launches` walks the timed cases; here is each operator, those among them that share a unit.
"""

import ast
import contextlib
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from benchmarks.kernels import catalog
from pt2e_quant.core.errors import MissingExtraError, UnsupportedError
from pt2e_quant.kernels import fused_op
from tests.fake_cuda import CUDA, FakeGpu, fake_cuda

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
F8, I32 = torch.float8_e4m3fn, torch.int32
assert catalog.BENCHES  # defines the operators


def ones(device, *shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=device)


def linear(device, rows, x=torch.int8, weight=torch.int8):
    """x, its scales, the weight of 3 x 64, its scales."""
    return (
        ones(device, rows, 64, dtype=x),
        ones(device, 1),
        ones(device, 3, 64, dtype=weight),
        ones(device, 3),
    )


def int8_linear(device, rows):
    x, scale, weight, weight_scale = linear(device, rows)
    zero, sums = ones(device, 1, dtype=I32), ones(device, 3, dtype=I32)
    return x, scale, zero, weight, weight_scale, sums


def int8_conv2d(device, rows):
    x = ones(device, rows, 4, 5, 5, dtype=torch.int8)
    weight = ones(device, 8, 3, 3, 4, dtype=torch.int8)
    scale, zero = ones(device, 1), ones(device, 1, dtype=I32)
    sums = ones(device, 4, 4, 8, dtype=I32)
    return x, scale, zero, weight, ones(device, 8), sums, [1, 1], [0, 0], [1, 1], 1


def images(device, rows, dtype=torch.int8):
    return ones(device, rows, 3, 4, 4, dtype=dtype)


OPERATORS = {
    "int8_linear": int8_linear,
    "int8_conv2d": int8_conv2d,
    "int8_matmul": lambda d, r: (
        ones(d, r, 4, dtype=torch.int8), ones(d, 4, 3, dtype=torch.int8), 1.0, 0, 0,
    ),
    "int4_linear": lambda d, r: (
        ones(d, r, 64, dtype=torch.bfloat16), ones(d, 1, 3, 16, dtype=I32), ones(d, 2, 3), None, 32,
    ),
    "sparse_linear": lambda d, r: (
        ones(d, r, 64), ones(d, 3, 32, dtype=torch.int8), ones(d, 3, 6, dtype=torch.uint8),
        ones(d, 3, 1),
    ),
    "fp8_linear": lambda d, r: linear(d, r, F8, F8),
    "int8_add": lambda d, r: (ones(d, r, 4, dtype=torch.int8), ones(d, r, 4)),
    "int8_cat": lambda d, r: ([ones(d, r, 4), ones(d, r, 2)], 1, [1.0, 1.0], [0, 0]),
    "int8_pool": lambda d, r: (images(d, r), "max", [2, 2], [2, 2], [0, 0], [2, 2]),
    "quantize": lambda d, r: (ones(d, r, 4),),
    "quantize_pixels": lambda d, r: (images(d, r, torch.float32),),
    "quantize_per_token": lambda d, r: (ones(d, r, 4),),
    "quantize_per_token_e4m3": lambda d, r: (ones(d, r, 4),),
    "quantize_per_tensor": lambda d, r: (ones(d, r, 4),),
    "quantize_per_tensor_e4m3": lambda d, r: (ones(d, r, 4),),
    "norm_quantize": lambda d, r: (ones(d, r, 4), "rms"),
    "norm_quantize_per_token": lambda d, r: (ones(d, r, 4), "layer"),
    "norm_quantize_per_token_e4m3": lambda d, r: (ones(d, r, 4), "layer"),
    "softmax_quantize": lambda d, r: (ones(d, r, 4),),
    "embedding_gather": lambda d, r: (
        ones(d, 5, 4, dtype=torch.int8), ones(d, 5, 1), None, ones(d, r, dtype=torch.int64), 4,
    ),
}  # fmt: skip
FLOAT8 = {
    "fp8_linear",
    "quantize_per_token_e4m3",
    "quantize_per_tensor_e4m3",
    "norm_quantize_per_token_e4m3",
}
UNITS = {
    "quantize_pixels": "quantize",
    "norm_quantize_per_token": "norm_quantize",
    "norm_quantize_per_token_e4m3": "norm_quantize",
}
"""Operators that are not named as the folder that they are in."""
by_operator = pytest.mark.parametrize("name", OPERATORS)


def called(name, device, rows=2):
    """An operator's result; of "cuda", what its launcher does there."""
    operands = OPERATORS[name](device, rows)
    if device.type == "cpu":
        return getattr(torch.ops.pt2e_quant, name)(*operands)
    unit = UNITS.get(name, name.removesuffix("_e4m3"))
    return fused_op.triton_kernel(f"pt2e_quant.kernels.{unit}.gpu", name)(*operands)


def defined():
    """The operators that have a Triton kernel, by the calls of `define`."""
    for path in KERNELS.glob("*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "define":
                yield re.search(r"\w+(?=\()", ast.unparse(node.args[0])).group()


def test_operators_when_listed_then_every_defined_one_is_here():
    # Owned by units whose operands come packed: their benches' cases are called instead.
    assert set(defined()) - set(OPERATORS) == {"a8w4_linear"}


@by_operator
def test_operator_when_triton_is_missing_then_names_the_extra(name, monkeypatch):
    monkeypatch.setattr(fused_op, "find_spec", lambda name: None)
    with fake_cuda(), pytest.raises(MissingExtraError, match=r"pip install 'pt2e-quant\[cuda\]'"):
        called(name, CUDA)


@by_operator
def test_operator_when_the_gpu_is_too_old_then_refuses(name):
    pytest.importorskip("triton")
    older = FakeGpu("A100", 8, 0) if name in FLOAT8 else FakeGpu("NVIDIA T4", 7, 5)
    with fake_cuda(older), pytest.raises(UnsupportedError, match=f"found {older.name}") as caught:
        called(name, CUDA)
    assert caught.value.fix


@by_operator
def test_operator_when_there_are_no_rows_then_gives_what_the_fake_says(name):
    made = pytree.tree_leaves(called(name, torch.device("cpu"), rows=0))
    with FakeTensorMode():
        said = pytree.tree_leaves(called(name, torch.device("cpu"), rows=0))
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in said]
    assert made[0].numel() == 0


@by_operator
def test_operator_when_there_are_no_rows_then_launches_no_empty_grid(name, monkeypatch):
    """A GPU refuses a grid of nothing. Only a scale of a whole tensor is written all the same."""
    jit = pytest.importorskip("triton.runtime.jit")
    grids = []
    monkeypatch.setattr(
        jit.JITFunction, "run", lambda self, *, grid, warmup, **given: grids.append(grid)
    )
    with fake_cuda():
        made = pytree.tree_leaves(called(name, CUDA, rows=0))
    assert {t.device for t in made} == {CUDA}
    assert all(size > 0 for grid in grids for size in grid)
    assert not grids or name.startswith("quantize_per_tensor")


@by_operator
def test_operator_when_tensors_are_on_another_gpu_then_launches_on_it(name, monkeypatch):
    """Triton launches on the current device, whatever device the tensors lie on."""
    jit = pytest.importorskip("triton.runtime.jit")
    second, current = torch.device("cuda", 1), []
    launches = []
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, **given: launches.append(current[-1:]))

    @contextlib.contextmanager
    def device(wanted):
        current.append(wanted)
        yield
        current.pop()

    with fake_cuda():
        monkeypatch.setattr(torch.cuda, "device", device)
        made = pytree.tree_leaves(called(name, second))
        monkeypatch.undo()
    assert all(found == [second] for found in launches)
    # Products in 8-bit floats that cuBLAS has are torch._scaled_mm.
    assert launches or name == "fp8_linear"
    assert {t.device for t in made} == {second}
