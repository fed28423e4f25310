"""What units list for a GPU is sound as far as a CPU can say: shapes, costs, peers, sweeps."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from benchmarks.kernels.catalog import BENCHES
from benchmarks.kernels.device_limits import LIMITS

# A gather moves the rows that it takes, not its table.
CASES = [
    pytest.param(case, id=f"{bench.op}: {case.name}")
    for bench in BENCHES
    for case in bench.cases
    if bench.op != "embedding_gather"
]


@pytest.mark.parametrize("case", CASES)
def test_cost_when_a_case_is_called_then_moves_at_least_its_operands(case):
    """Up to a few vectors that a cost leaves out; the result comes on top."""
    with FakeTensorMode():
        operands = pytree.tree_leaves(case.make(torch.device("cpu"), 0))
        held = sum(t.numel() * t.element_size() for t in operands if isinstance(t, torch.Tensor))
    assert case.cost.bytes >= 0.95 * held
    assert case.cost.operations > 0


def test_benches_when_listed_then_every_case_has_a_limit_and_a_peer():
    for bench in BENCHES:
        for case in bench.cases:
            assert LIMITS["h200"].seconds(case.cost, case.unit), (bench.op, case.name)
            assert case.peers, (bench.op, case.name)


def test_benches_when_listed_then_have_the_targets_of_the_products():
    """Ratios over cuBLAS bf16 that kernels are made for; which are met is measured, not here."""
    aims = {(bench.op, case.name): case.targets for bench in BENCHES for case in bench.cases}
    wanted = {"int8_linear": 1.6, "int4_linear": 3.0, "a8w4_linear": 3.0}
    for op, ratio in wanted.items():
        found = [t["cuBLAS bf16"] for (unit, _), t in aims.items() if unit == op and t]
        assert ratio in found
