import torch

from pt2e_quant.kernels.sparse_linear.op import SparseLinear, cost, takes_groups
from pt2e_quant.kernels.sparse_linear.pack import pack_sparse


def test_operator_when_checked_by_torch_then_is_whole():
    codes = torch.tensor([[1, 0, -3, 0, 0, 5, 0, 0]], dtype=torch.int8).repeat(3, 4)
    operands = (torch.randn(2, 2, 32), *pack_sparse(codes, torch.int8), torch.rand(3, 1))
    torch.library.opcheck(SparseLinear, operands, {"bias": torch.ones(3)})
    real = codes.float() * operands[3]
    assert torch.allclose(SparseLinear(*operands), operands[0] @ real.t(), atol=1e-4)


def test_cost_when_a_weight_is_large_then_is_less_than_0_6_bytes_an_element():
    N = K = 4096
    values, pairs = torch.zeros(N, K // 2), torch.zeros(N, 3 * K // 32)
    x, scale, out = torch.zeros(0, K), torch.zeros(N, 1), torch.zeros(0, N)
    parts = (values.to(torch.int8), pairs.to(torch.uint8))
    assert cost(x, *parts, scale, out).bytes < 0.6 * N * K


def test_takes_groups_when_they_are_no_multiples_of_32_then_no():
    assert takes_groups(1, 4)
    assert takes_groups(2, 64)
    assert not takes_groups(4, 64)
