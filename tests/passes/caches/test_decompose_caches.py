"""Quantized caches in ATen operators: the same bits, and what is no such cache stays."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2e_quant.core.cache_ops import unpack_rows
from pt2e_quant.core.formats.format_ops import ChooseScales, QuantizeBlock
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of, rebuild_capture
from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.caches.decompose_caches import decompose_caches
from pt2e_quant.passes.caches.quantize_caches import quantize_caches
from pt2e_quant.passes.cleanup.strip_guards import strip_guards

ROWS, WIDTH = 6, 8


class Caches(nn.Module):
    """Written by index, by part and whole; read in front of and behind the writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(2, ROWS, WIDTH))
        self.register_buffer("inner_q", torch.zeros(ROWS, WIDTH))

    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        before = self.keys * 1.0
        self.keys.index_copy_(1, at, x)
        self.inner_q[1:3] = x[0] * 2
        between = self.inner_q + 0.0
        self.inner_q.copy_(torch.cat((self.inner_q[1:], x[0, :1])))
        return before, self.keys.transpose(1, 2) + 0.0, between, self.inner_q * 1.0


def quantized(bits: int) -> GraphModule:
    torch.manual_seed(0)
    inputs = torch.randn(2, 2, WIDTH), torch.tensor([0, 3])
    gm = torch.export.export(Caches().eval(), inputs).module()
    run_passes(gm, (strip_guards, quantize_caches(bits)))
    return gm


def decomposed(bits: int, *, has_casts: bool) -> GraphModule:
    gm = quantized(bits)
    gm.meta[CAPTURE_KEY] = rebuild_capture(gm, mutated_buffers(gm))
    (record,) = run_passes(gm, (decompose_caches(has_casts=has_casts),))
    assert record.changed
    return gm


CASES = [(bits, has_casts) for bits in (8, 4) for has_casts in (True, False)]


@pytest.fixture(scope="module")
def both() -> dict[tuple[int, bool], tuple[GraphModule, GraphModule]]:
    with torch.no_grad():
        return {c: (quantized(c[0]), decomposed(c[0], has_casts=c[1])) for c in CASES}


def state_of(gm: GraphModule) -> dict[str, Tensor]:
    return dict(gm.named_buffers())


@given(
    seed=st.integers(0, 10**6),
    exponent=st.integers(-44, 37),
    zeros=st.booleans(),
    places=st.permutations(range(ROWS)),
)
@settings(max_examples=25)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_caches_when_values_vary_then_results_and_state_are_equal_to_the_bit(
    both, case, seed, exponent, zeros, places
):
    expected, found = both[case]
    x = torch.randn(2, 2, WIDTH, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    if zeros:
        x[0, 1] = 0
    at = torch.tensor(places[:2])
    for left, right in zip(expected(x, at), found(x, at), strict=True):
        assert torch.equal(left, right)
    before, after = state_of(expected), state_of(found)
    assert torch.equal(before["keys_scale"], after["keys_scale"])
    if case[0] == 8:
        assert torch.equal(before["keys_q"], after["keys_q"])
    else:
        packed = after["keys_halves"].int()
        second = torch.floor(packed / 16 + 0.5)
        codes = torch.cat((packed - 16 * second, second), -1)
        assert torch.equal(codes, unpack_rows(before["keys_q"], 4, True).float())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operators_when_written_out_then_all_but_the_casts_are_atens(both, case):
    _, gm = both[case]
    own = {n.target for n in gm.graph.nodes if "aten" not in str(n.target) and n.op[:4] == "call"}
    assert own == ({QuantizePerTensor} if case[1] else {QuantizePerTensor, DequantizePerTensor})
    name = "q" if case[0] == 8 else "halves"
    names = ("inner_q_q", "inner_q_scale") if case[0] == 8 else ("inner_q_halves", "inner_q_scale")
    assert mutated_buffers(gm) == (*names, f"keys_{name}", "keys_scale")
    assert capture_of(gm).mutated_buffers == mutated_buffers(gm)
    held = state_of(gm)[f"keys_{name}"]
    assert (held.dtype, held.shape[-1]) == (torch.int8, WIDTH * case[0] // 8)


def test_caches_when_written_out_twice_then_nothing_changes(both):
    gm = both[4, False][1]
    before = str(gm.graph)
    (record,) = run_passes(gm, (decompose_caches(has_casts=False),))
    assert not record.changed
    assert str(gm.graph) == before


@pytest.mark.parametrize(
    ("target", "at", "value", "reason"),
    [
        (ChooseScales, 4, torch.float16, "its scales are torch.float16"),
        (QuantizeBlock, 3, [1, 1, 4], "its scales are not those of rows"),
        (QuantizeBlock, 4, -8, "its codes reach -8"),
    ],
)
def test_caches_when_of_another_form_then_all_stay_with_the_reason(target, at, value, reason):
    gm = quantized(4)
    node = next(n for n in gm.graph.nodes if n.target is target)
    node.args = (*node.args[:at], value, *node.args[at + 1 :])
    before = str(gm.graph)
    result = decompose_caches(has_casts=True)(gm)
    assert not result.changed
    assert str(gm.graph) == before
    assert [reason in note.text and note.skipped for note in result.notes] == [True]
