"""Average pools run inside of the delegate, in floats and in integers, whatever they count."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.passes.pools_in_delegate import average_in_delegate
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.pool_windows import fixed_windows
from tests.backends.call_saved import call_pte, pte_of_batches
from tests.call_function import Call

POOLS = {
    "counts_padding": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "leaves_padding_out": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "rounds_up": lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
    "rounds_up_and_leaves_out": lambda x: F.avg_pool2d(
        x, (3, 2), 2, (1, 0), ceil_mode=True, count_include_pad=False
    ),
    "divides_by_a_number": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    "adapts": lambda x: F.adaptive_avg_pool2d(x, 3),
    "adapts_to_a_divisor": lambda x: F.adaptive_avg_pool2d(x[..., :8, :10], (4, 5)),
}


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Pools(nn.Module):
    """Every pool between two convolutions, or of what a sine leaves in float."""

    def __init__(self, *, in_float):
        super().__init__()
        self.before = nn.Conv2d(3, 8, 1)
        self.after = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in POOLS)
        self.in_float = in_float

    def forward(self, x):
        y = self.before(x)
        if self.in_float:
            return [pool(y.sin()).sin() for pool in POOLS.values()]
        return [conv(pool(y)) for conv, pool in zip(self.after, POOLS.values(), strict=True)]


@pytest.mark.parametrize("in_float", [True, False], ids=["float", "integers"])
def test_pools_when_lowered_then_in_the_delegate_at_each_batch(tmp_path, in_float):
    torch.manual_seed(0)
    model = Pools(in_float=in_float).eval()
    data = [(noise(2, 3, 9, 11, seed=seed),) for seed in range(2)]
    artifact = pte_of_batches(model, data)
    assert not [name for name in artifact.contents().overloads if "pool" in name]
    calls = [(noise(n, 3, 9, 11, seed=n),) for n in (1, 5, 2)]
    again = call_pte(artifact, calls, tmp_path)
    for x, elsewhere in zip(calls, again, strict=True):
        found = artifact.run(*x)
        torch.testing.assert_close(elsewhere, found, rtol=0, atol=0)
        for name, expected, made in zip(POOLS, model(*x), found, strict=True):
            assert pq.sqnr_db([expected], [made]) > 30, name


@settings(max_examples=80, deadline=None)
@given(
    size=st.lists(st.integers(3, 9), min_size=2, max_size=2),
    kernel=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    stride=st.integers(1, 3),
    padding=st.lists(st.integers(0, 2), min_size=2, max_size=2),
    ceil=st.booleans(),
    counts=st.booleans(),
    divisor=st.none() | st.integers(1, 7),
)
def test_pools_when_written_for_the_delegate_then_equal_to_rounding(
    size, kernel, stride, padding, ceil, counts, divisor
):
    assume(all(p <= k // 2 for p, k in zip(padding, kernel, strict=True)))
    assume(all(k <= s + 2 * p for s, p, k in zip(size, padding, kernel, strict=True)))
    x = noise(2, 3, *size)
    pool = Call(lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, counts, divisor))
    gm = torch.export.export(pool, (x,)).module()
    run_passes(gm, (fixed_windows, average_in_delegate))
    torch.testing.assert_close(gm(x), pool(x), rtol=1e-5, atol=1e-6)
    made = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.avg_pool2d.default)
    assert [n.args[4:] for n in made] == [(False, False)] or kernel == [1, 1]
