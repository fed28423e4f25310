"""The draws of every unit's bench, in the interpreter: what a GPU is checked with runs here too."""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks.gpu_check import difference
from benchmarks.kernels.catalog import BENCHES

CPU = torch.device("cpu")


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)
def test_bench_when_drawn_then_is_within_its_bound(bench):
    operands = bench.draw(CPU, 0)
    made, wanted, bound = (
        bench.call(operands, None),
        bench.reference(operands),
        bench.bound(operands),
    )
    if any(leaf.dtype is torch.bfloat16 for leaf in pytree.tree_leaves(wanted)):
        # The interpreter truncates to bfloat16.
        bound = dataclasses.replace(bound, rtol=max(bound.rtol, 2**-7), atol=max(bound.atol, 1e-6))
    assert difference(made, wanted, bound) is None
