import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.operators import DECOMPOSITIONS
from pt2e_quant.core.qparams import choose_qparams

ops = torch.ops.pt2e_quant
BLOCKS = ((-1, -1), (1, -1), (-1, 1), (1, 8), (2, 4))


@settings(max_examples=40, deadline=None)
@given(
    block=st.sampled_from(BLOCKS),
    mapping=st.sampled_from(["SYMMETRIC", "ASYMMETRIC"]),
    bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 2**31),
)
def test_primitives_when_values_go_there_and_back_then_are_within_half_a_step(
    block, mapping, bits, seed
):
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(seed))
    dtype = getattr(torch, f"int{bits}")
    scale, zero = ops.choose_qparams_affine(x, mapping, block, dtype)
    codes = ops.quantize_affine(x, block, scale, zero, dtype)
    real = ops.dequantize_affine(codes, block, scale, zero, dtype)
    assert codes.dtype is torch.int8
    grown = scale
    for axis in (0, 1):
        grown = grown.repeat_interleave(x.shape[axis] // scale.shape[axis], axis)
    # A symmetric range of 2 ** b - 1 steps has half a step less on one side.
    bound = 0.5 if mapping == "ASYMMETRIC" else 0.75
    assert bool(((real - x).abs() <= (bound + 0.26) * grown).all())


@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
def test_qparams_when_of_rows_then_are_those_of_the_graph_flow(mapping):
    x = torch.randn(6, 16)
    scale, zero = ops.choose_qparams_affine(x, mapping, (1, -1), torch.int8, keepdim=False)
    expected = choose_qparams(
        x.amin(1), x.amax(1), quant_min=-128, quant_max=127, symmetric=mapping == "SYMMETRIC"
    )
    assert torch.equal(scale, expected[0])
    assert torch.equal(zero, expected[1])


@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
@pytest.mark.parametrize("block", BLOCKS)
def test_primitives_when_torchaos_run_beside_them_then_agree(mapping, block):
    torchao = pytest.importorskip("torchao.quantization.quant_primitives")
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    size = tuple(n if length == -1 else length for n, length in zip(x.shape, block, strict=True))
    theirs = torchao.choose_qparams_affine(
        x, torchao.MappingType[mapping], size, torch.int8, -127, 127
    )
    ours = ops.choose_qparams_affine(x, mapping, block, torch.int8, -127, 127)
    torch.testing.assert_close(ours[0], theirs[0].reshape(ours[0].shape))
    codes = torchao.quantize_affine(x, size, *theirs, torch.int8, -127, 127)
    assert torch.equal(ops.quantize_affine(x, block, *theirs, torch.int8, -127, 127), codes)


def test_primitives_when_checked_by_torch_then_schemas_and_fakes_hold():
    x = torch.randn(4, 8)
    scale, zero = ops.choose_qparams_affine(x, "ASYMMETRIC", (1, 4), torch.int8)
    codes = ops.quantize_affine(x, (1, 4), scale, zero, torch.int8)
    tests = ("test_schema", "test_faketensor")
    for op, args in (
        (ops.choose_qparams_affine, (x, "SYMMETRIC", (1, 4), torch.int8)),
        (ops.quantize_affine, (x, (1, 4), scale, zero, torch.int8)),
        (ops.dequantize_affine, (codes, (1, 4), scale, zero, torch.int8)),
    ):
        torch.library.opcheck(op.default, args, test_utils=tests)
        made, written = op(*args), DECOMPOSITIONS[op.default](*args)
        for a, b in zip(
            *(m if isinstance(m, tuple) else (m,) for m in (made, written)), strict=True
        ):
            assert torch.equal(a, b)


def test_qparams_when_the_mapping_is_unknown_then_near_ones_are_offered():
    with pytest.raises(ConfigError, match="SYMMETRIC"):
        ops.choose_qparams_affine(torch.ones(2, 2), "SYMETRIC", (1, -1), torch.int8)


def test_primitives_when_the_package_alone_is_imported_then_are_there():
    code = (
        "import torch, pt2e_quant; "
        "s, z = torch.ops.pt2e_quant.choose_qparams_affine("
        "torch.ones(2, 4), 'SYMMETRIC', [1, 4], torch.int8); print(tuple(s.shape))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "(2, 1)", ran.stderr
