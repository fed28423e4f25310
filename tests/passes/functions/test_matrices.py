"""Decompositions of matrices, written out: as LAPACK's, or by what they multiply to."""

import pytest
import torch
from torch import Tensor, nn

from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.functions.table import FUNCTIONS
from pt2e_quant.passes.functions.write_functions import write_functions

A = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
B = A[..., :2].roll(1, 0)
POSITIVE = A @ A.mT + torch.eye(5)
FACTORS = torch.linalg.lu_factor(A)
TRIANGLE = torch.linalg.cholesky(POSITIVE)
CALLS = {
    "determinant": ("_linalg_det.default", (A,), {}),
    "determinant's logarithm": ("_linalg_slogdet.default", (A,), {}),
    "solution": ("_linalg_solve_ex.default", (A, B), {}),
    "solution of vectors": ("_linalg_solve_ex.default", (A, B[..., 0]), {}),
    "solution from the right": ("_linalg_solve_ex.default", (A, B.mT), {"left": False}),
    "triangle": ("cholesky.default", (POSITIVE,), {}),
    "upper triangle": ("linalg_cholesky_ex.default", (POSITIVE,), {"upper": True}),
    "inverse of a triangle": ("cholesky_inverse.default", (TRIANGLE,), {}),
    "solution of a triangle": ("cholesky_solve.default", (B, TRIANGLE.mT, True), {}),
    "inverse": ("linalg_inv_ex.default", (A,), {}),
    "factors": ("linalg_lu.default", (A,), {}),
    "factors of high ones": ("linalg_lu.default", (A[..., :3],), {}),
    "factors of wide ones": ("linalg_lu_factor_ex.default", (A[..., :3, :],), {}),
    "solution of factors": ("linalg_lu_solve.default", (*FACTORS, B), {}),
    "solution of turned factors": ("linalg_lu_solve.default", (*FACTORS, B), {"adjoint": True}),
    "unpacked factors": ("lu_unpack.default", FACTORS, {}),
    "exponential": ("linalg_matrix_exp.default", (A,), {}),
    "exponential of little": ("linalg_matrix_exp.default", (1e-3 * A,), {}),
    "orthogonal": ("linalg_qr.default", (A,), {}),
    "orthogonal of high ones": ("linalg_qr.default", (A[..., :3],), {}),
    "complete orthogonal": ("linalg_qr.default", (A[..., :3], "complete"), {}),
    "upper system": ("linalg_solve_triangular.default", (A, B), {"upper": True}),
    "lower system of ones": (
        "linalg_solve_triangular.default",
        (A, B),
        {"upper": False, "unitriangular": True},
    ),
    "upper system from the right": (
        "linalg_solve_triangular.default",
        (A, B.mT),
        {"upper": True, "left": False},
    ),
    "older order": ("triangular_solve.default", (B, A, True, True), {}),
    "pseudo-inverse": ("linalg_pinv.atol_rtol_float", (A[..., :3],), {"rtol": 1e-5}),
    "pseudo-inverse of symmetric ones": (
        "linalg_pinv.atol_rtol_tensor",
        (POSITIVE,),
        {"hermitian": True},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_matrix_function_when_written_out_then_as_aten(name):
    operator, args, options = CALLS[name]
    wanted = eval(f"torch.ops.aten.{operator}", {"torch": torch})(*args, **options)
    found = FUNCTIONS[f"aten.{operator}"](*args, **options)
    if isinstance(found, Tensor):
        found, wanted = (found,), (wanted,)
    # torch factors the turned matrix, which no caller sees.
    seen = {"_linalg_det": 1, "_linalg_slogdet": 2, "_linalg_solve_ex": 1}
    count = seen.get(operator.split(".")[0], len(wanted))
    assert len(found) == len(wanted)
    for left, right in list(zip(found, wanted, strict=True))[:count]:
        torch.testing.assert_close(left, right, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("shape", [(5, 5), (5, 3), (3, 5), (6, 1), (2, 8)])
@pytest.mark.parametrize("size", [1e-18, 1.0, 1e18])
def test_svd_when_written_out_then_multiplies_to_its_matrix(shape, size):
    a = size * torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    left, values, right = FUNCTIONS["aten._linalg_svd.default"](a, True)
    least = min(shape)
    product = left[..., :least] * values.unsqueeze(-2) @ right[..., :least, :]
    torch.testing.assert_close(product / size, a / size, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, torch.linalg.svdvals(a), rtol=1e-5, atol=1e-5 * size)
    for basis in (left, right):
        torch.testing.assert_close(
            basis.mT @ basis, torch.eye(basis.shape[-1]).expand_as(basis), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("uplo", ["L", "U"])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_eigh_when_written_out_then_multiplies_to_its_matrix(count, uplo):
    half = torch.randn(3, count, count, generator=torch.Generator().manual_seed(2))
    a = half + half.mT
    values, vectors = FUNCTIONS["aten._linalg_eigh.default"](
        a.tril() if uplo == "L" else a.triu(), uplo
    )
    torch.testing.assert_close(values, torch.linalg.eigvalsh(a), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(vectors * values.unsqueeze(-2) @ vectors.mT, a, rtol=1e-5, atol=2e-5)


COMPOSED = {
    "inverse": torch.linalg.inv,
    "determinant": torch.linalg.det,
    "logarithm": lambda x: torch.logdet(x @ x.mT + torch.eye(3)),
    "norm": lambda x: torch.linalg.matrix_norm(x, 2),
    "power": lambda x: torch.linalg.matrix_power(x, -2),
    "pseudo-inverse": torch.linalg.pinv,
    "solution": lambda x: torch.linalg.solve(x, x[..., 0] + 1.0),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_write_functions_when_torch_makes_it_of_decompositions_then_written(name):
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return COMPOSED[name](x)

    x = A[0, :, :3, :3]
    # torch itself takes a matrix norm for one number of matrices only.
    dynamic = None if name == "norm" else ({0: torch.export.Dim("batch", min=2, max=9)},)
    program = torch.export.export(Model(), (x,), dynamic_shapes=dynamic)
    gm = program.module(check_guards=False)
    assert run_passes(gm, (write_functions(()),))[0].changed
    called = {str(node.target) for node in gm.graph.nodes if node.op == "call_function"}
    assert not any("linalg" in one or "pinv" in one or "logdet" in one for one in called)
    other = A[1, : 3 if name == "norm" else 2, :3, :3]
    torch.testing.assert_close(gm(other), Model()(other), rtol=2e-4, atol=2e-4)


def test_write_functions_when_a_matrix_is_large_then_left():
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x)

    gm = torch.export.export(Model(), (torch.eye(33),)).module(check_guards=False)
    assert not run_passes(gm, (write_functions(()),))[0].changed
