"""Packing and its inverse, on converted graphs and on every layout of scales."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import export
from torch.fx import GraphModule

import pt2e_quant as pq
from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.dtypes import DTYPES, info
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import is_dequantize, read_qparams
from pt2e_quant.core.unpack_op import is_unpack, unpacked_dtype
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.graph.show import show
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.weights.pack_weights import pack_weights
from pt2e_quant.passes.weights.unpack_weights import unpack_weights

qd = torch.ops.quantized_decomposed
SUB_BYTE = [row.dtype for row in DTYPES.values() if row.is_sub_byte]


class Grouped(nn.Module):
    """A linear whose weight has one scale per group."""

    def __init__(self, dtype, rows, groups, group_size, zero_points, seed=0):
        super().__init__()
        self.row, self.group_size = info(dtype), group_size
        g = torch.Generator().manual_seed(seed)
        limits = self.row.quant_min, self.row.quant_max + 1
        shape = (rows, groups * group_size)
        values = torch.randint(*limits, shape, generator=g).to(self.row.storage)
        self.register_buffer("weight_q", values)
        self.register_buffer("scale", torch.rand(rows, groups, generator=g) + 0.1)
        self.register_buffer("zero_point", zero_points)

    def forward(self, x):
        limits = self.row.quant_min, self.row.quant_max, self.row.storage
        weight = qd.dequantize_per_channel_group(
            self.weight_q, self.scale, self.zero_point, *limits, self.group_size, torch.float32
        )
        return torch.nn.functional.linear(x, weight)


def captured(model: nn.Module, *args: torch.Tensor) -> GraphModule:
    gm = export(model.eval(), args).module()
    strip_guards(gm)
    return gm


def stored_bytes(gm: GraphModule) -> int:
    return sum(t.numel() * t.element_size() for t in gm.state_dict().values())


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(SUB_BYTE),
    rows=st.integers(1, 5),
    groups=st.integers(1, 3),
    group_size=st.sampled_from([2, 3, 8, 32]),
    affine=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_pack_when_any_dtype_and_group_then_equal_bit_for_bit_and_undone(
    dtype, rows, groups, group_size, affine, seed
):
    row = info(dtype)
    g = torch.Generator().manual_seed(seed)
    high = row.quant_max + 1 if affine else row.quant_min + 1
    zero_points = torch.randint(row.quant_min, high, (rows, groups), generator=g)
    gm = captured(
        Grouped(dtype, rows, groups, group_size, zero_points, seed),
        torch.ones(2, groups * group_size),
    )
    x = torch.randn(2, groups * group_size, generator=g)
    before = {name: value.clone() for name, value in gm.state_dict().items()}
    expected, text = gm(x), show(gm)
    run_passes(gm, (pack_weights, drop_dead_constants), verify=True)
    assert torch.equal(gm(x), expected)
    (weight,) = [n for n in gm.graph.nodes if is_unpack(n) and "dtype" not in n.kwargs]
    assert unpacked_dtype(weight) == dtype
    assert not any(t.dtype in (torch.int8, torch.int64) for t in gm.state_dict().values())
    run_passes(gm, (unpack_weights,), verify=True)
    assert torch.equal(gm(x), expected)
    assert show(gm) == text
    assert gm.state_dict().keys() == before.keys()
    for name, value in gm.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(("affine", "limit"), [(False, 4.26), (True, 4.29)])
def test_pack_when_four_bits_in_groups_of_128_then_bits_per_weight(affine, limit):
    zero_points = torch.randint(-8 if affine else 0, 8 if affine else 1, (64, 8))
    gm = captured(Grouped(torch.int4, 64, 8, 128, zero_points), torch.ones(1, 1024))
    run_passes(gm, (pack_weights, drop_dead_constants))
    # 4 bits, a float32 scale in 128 (0.25), and 4 bits or one of zero point in 128
    assert stored_bytes(gm) * 8 / (64 * 1024) == 4 + (32 + (4 if affine else 1)) / 128 < limit


def test_pack_when_eight_bits_then_only_the_zero_points():
    gm = captured(Grouped(torch.int8, 8, 2, 32, torch.full((8, 2), -100)), torch.ones(1, 64))
    run_passes(gm, (pack_weights, drop_dead_constants))
    assert gm.weight_q.dtype is torch.int8
    assert gm.zero_point_packed.dtype is torch.int8
    assert gm(torch.ones(1, 64)).shape == (1, 8)


class PerChannel(nn.Module):
    def __init__(self, quant_min=-8, quant_max=7):
        super().__init__()
        self.limits = quant_min, quant_max, torch.int8
        self.register_buffer(
            "weight_q", torch.randint(quant_min, quant_max + 1, (4, 6)).to(torch.int8)
        )
        self.register_buffer("scale", torch.rand(4))
        self.register_buffer("zero_point", torch.zeros(4, dtype=torch.int64))

    def dequantized(self):
        return qd.dequantize_per_channel(
            self.weight_q, self.scale, self.zero_point, 0, *self.limits
        )

    def forward(self, x):
        return x @ self.dequantized().t()


def test_pack_when_per_channel_then_golden_text_and_qparams_still_read():
    gm = captured(PerChannel(), torch.ones(2, 6))
    (plain,) = [n for n in gm.graph.nodes if is_dequantize(n)]
    expected = read_qparams(gm, plain)
    run_passes(gm, (pack_weights, drop_dead_constants))
    assert show(gm).splitlines()[:4] == [
        "x: f32[2, 6] = input",
        "unpack: i8[4, 6] = pt2e_quant.unpack(weight_q_packed, 4, True, [4, 6])",
        "unpack_1: i64[4] = pt2e_quant.unpack(zero_point_packed, 1, False, [4], dtype=i64)",
        "dequantize_per_channel: f32[4, 6] = quantized_decomposed.dequantize_per_channel"
        "(unpack, scale, unpack_1, 0, -8, 7, i8)",
    ]
    (node,) = [n for n in gm.graph.nodes if is_dequantize(n)]
    found = read_qparams(gm, node)
    assert torch.equal(found.zero_point, expected.zero_point)
    assert torch.equal(found.scale, expected.scale)
    verify_canonical(gm)


def test_pack_when_run_again_then_nothing_changes():
    gm = captured(PerChannel(), torch.ones(2, 6))
    run_passes(gm, (pack_weights, drop_dead_constants))
    text = show(gm)
    assert not pack_weights(gm).changed
    assert show(gm) == text


@pytest.mark.parametrize("quant_min", [-128, -127, -65])
def test_pack_when_eight_bits_are_needed_then_left(quant_min):
    gm = captured(PerChannel(quant_min, 127), torch.ones(2, 6))
    assert not pack_weights(gm).changed


def test_pack_when_something_else_reads_the_integers_then_left():
    class Twice(PerChannel):
        def forward(self, x):
            return x @ self.dequantized().t(), self.weight_q.sum()

    gm = captured(Twice(), torch.ones(2, 6))
    run_passes(gm, (pack_weights, drop_dead_constants))
    assert gm.weight_q.dtype is torch.int8


def test_pack_when_readers_differ_in_range_then_the_wider():
    class Two(PerChannel):
        def forward(self, x):
            wide = qd.dequantize_per_channel(
                self.weight_q, self.scale, self.zero_point, 0, -20, 20, torch.int8
            )
            return x @ self.dequantized().t(), x @ wide.t()

    gm = captured(Two(), torch.ones(2, 6))
    run_passes(gm, (pack_weights, drop_dead_constants))
    weights = [n for n in gm.graph.nodes if is_unpack(n) and "dtype" not in n.kwargs]
    assert [unpacked_dtype(n) for n in weights] == [torch.int6]
    assert len(weights[0].users) == 2


def test_pack_when_read_inside_control_flow_then_packed_outside():
    class Branches(PerChannel):
        def forward(self, x):
            def multiply(x, q, scale, zero_point):
                return x @ qd.dequantize_per_channel(q, scale, zero_point, 0, *self.limits).t()

            def negate(x, q, scale, zero_point):
                return -multiply(x, q, scale, zero_point)

            operands = (x, self.weight_q, self.scale, self.zero_point)
            return torch.cond(x.sum() > 0, multiply, negate, operands)

    model = Branches()
    gm = captured(model, torch.ones(2, 6))
    expected = [gm(s * torch.ones(2, 6)) for s in (1, -1)]
    run_passes(gm, (pack_weights, drop_dead_constants))
    assert gm.weight_q_packed.shape == (4, 3)
    assert all(
        torch.equal(gm(s * torch.ones(2, 6)), y) for s, y in zip((1, -1), expected, strict=True)
    )
    verify_canonical(gm)
    run_passes(gm, (unpack_weights,))
    assert torch.equal(gm.weight_q, model.weight_q)
    assert all(
        torch.equal(gm(s * torch.ones(2, 6)), y) for s, y in zip((1, -1), expected, strict=True)
    )


def test_convert_when_tied_and_four_bits_then_one_packed_buffer(calibrated_in_four_bits):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.second = nn.Linear(8, 8, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    torch.manual_seed(0)
    model = Tied()
    kept = model.first.weight.detach().clone()
    gm = pq.convert_pt2e(calibrated_in_four_bits(model, torch.randn(4, 8)))
    packed = [n for n, t in gm.state_dict().items() if t.dtype is torch.uint8 and t.dim() == 2]
    assert packed == ["second.weight_q_packed"]
    assert gm.get_buffer(packed[0]).shape == (8, 4)
    record = provenance_of(gm).tensor("second.weight")
    # 64 weights in 32 bytes; 8 float32 scales; 8 zero points of one bit
    assert (record.size_before, record.size_after) == (256, 32 + 32 + 1)
    assert torch.equal(model.first.weight, kept)


def test_convert_when_asked_not_to_pack_then_int8_constants(calibrated_in_four_bits):
    model, x = nn.Sequential(nn.Linear(8, 4)), torch.randn(4, 8)
    prepared = calibrated_in_four_bits(model, x)
    packed = pq.convert_pt2e(copy.deepcopy(prepared))
    plain = pq.convert_pt2e(prepared, pack=False)
    assert plain.get_buffer("0.weight_q").dtype is torch.int8
    assert packed.get_buffer("0.weight_q_packed").dtype is torch.uint8
    assert torch.equal(plain(x), packed(x))
