"""Written buffers in integers."""

import pickle

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.graph import ops
from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.op_table import OpRow, OpTable, Slot
from pt2e_quant.graph.pattern import Op, Var
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.caches.quantize_caches import quantize_caches
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.strip_guards import strip_guards

LENGTH = 16


class Attention(nn.Module):
    """Keys by index_copy_, values by index_put_, as transformers' and torchtune's caches do."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.register_buffer("keys", torch.zeros(1, 2, LENGTH, 16))
        self.register_buffer("values", torch.zeros(1, 2, LENGTH, 16))

    def forward(self, x, at):
        q, k, v = self.project(x).view(1, -1, 3, 2, 16).permute(2, 0, 3, 1, 4)
        self.keys.index_copy_(2, at, k)
        self.values[:, :, at] = v
        seen = torch.arange(LENGTH) <= at[:, None]
        scores = (q @ self.keys.transpose(-1, -2) / 4).masked_fill(~seen, -1e9)
        return torch.softmax(scores, -1) @ self.values


def program_of(model):
    tokens = torch.export.Dim("tokens", min=1, max=LENGTH)
    return torch.export.export(
        model,
        (torch.randn(1, 3, 32), torch.arange(3)),
        dynamic_shapes=({1: tokens}, {0: tokens}),
    )


def quantizer(scheme, bits):
    slots = (
        Slot(at="x", role=Role.INPUT, accepts=(scheme.input,) if scheme.input else ()),
        Slot(at="w", role=Role.WEIGHT, accepts=(scheme.weight,)),
    )
    row = OpRow(
        name="linear", find=(Op(ops.LINEAR, Var("x"), Var("w")),), slots=slots, lowers_to="toy"
    )
    table = OpTable(backend="Toy", rows=(row,))
    return TableQuantizer(table, scheme, finishing=(quantize_caches(bits),))


def converted(bits):
    torch.manual_seed(0)
    model = Attention().eval()
    prepared = pq.prepare_pt2e(program_of(model), quantizer(scheme_named("w8"), bits))
    return model, pq.convert_pt2e(prepared)


def token_by_token(model, tokens):
    """A prompt of 4, then one at a time."""
    with torch.no_grad():
        parts = [model(tokens[:, :4], torch.arange(4))]
        parts += [model(tokens[:, i : i + 1], torch.tensor([i])) for i in range(4, tokens.shape[1])]
    return torch.cat(parts, 2)


def sqnr(reference, value):
    return 10 * torch.log10(reference.square().sum() / (reference - value).square().sum()).item()


@pytest.mark.parametrize(("bits", "floor"), [(8, 35), (4, 14)])
def test_caches_when_converted_then_integers_that_survive_export_and_near_float(bits, floor):
    model, quantized = converted(bits)
    names = ("keys_q", "keys_scale", "values_q", "values_scale")
    assert mutated_buffers(quantized) == names
    assert capture_of(quantized).mutated_buffers == names
    buffers = dict(quantized.named_buffers())
    assert "keys" not in buffers
    assert buffers["keys_q"].dtype is (torch.int8 if bits == 8 else torch.uint8)
    assert buffers["keys_q"].shape == (1, 2, LENGTH, 2 * bits)
    program = export_again(quantized)
    assert set(program.graph_signature.buffers_to_mutate.values()) == set(names) or set(
        program.run_decompositions({}).graph_signature.buffers_to_mutate.values()
    ) == set(names)
    again = program.module(check_guards=False)
    verify_canonical(again)
    tokens = torch.randn(1, 12, 32)
    expected = token_by_token(model, tokens)
    found = token_by_token(again, tokens)
    assert sqnr(expected, found) > floor
    # Nothing is quantized twice: the whole prompt at once gives what its tokens give one by one.
    with torch.no_grad():
        whole = converted(bits)[1](tokens, torch.arange(12))
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def test_caches_when_kept_then_rows_are_those_of_eager_quantization():
    model, quantized = converted(8)
    tokens = torch.randn(1, 12, 32)
    token_by_token(model, tokens)
    token_by_token(quantized, tokens)
    buffers = dict(quantized.named_buffers())
    real = buffers["keys_q"].float() * buffers["keys_scale"]
    # half a step of the row, and the weights' own rounding
    error = (real - model.keys).abs().amax(-1, keepdim=True)
    assert bool((error <= buffers["keys_scale"] * 1.5 + 1e-6).all())
    assert buffers["keys_q"][..., 12:, :].count_nonzero() == 0


def test_records_when_caches_shrink_then_say_it():
    _, quantized = converted(4)
    record = pq.provenance_of(quantized).tensor("keys")
    assert record.size_before == 2 * LENGTH * 16 * 4
    assert record.size_after == 2 * LENGTH * (8 + 4)


def test_content_when_there_is_some_then_kept():
    model = Attention().eval()
    nn.init.normal_(model.keys)
    before = model.keys.clone()
    gm = program_of(model).module()
    run_passes(gm, (strip_guards, quantize_caches(8, names="keys"), drop_dead_constants))
    buffers = dict(gm.named_buffers())
    real = buffers["keys_q"].float() * buffers["keys_scale"]
    assert bool(((real - before).abs() <= buffers["keys_scale"] * 0.5001).all())
    assert "values" in buffers
    assert torch.equal(model.keys, before)


class Slices(nn.Module):
    """Written by slices, whole, and read before and after."""

    def __init__(self):
        super().__init__()
        self.register_buffer("past", torch.randn(4, 8))

    def forward(self, x):
        before = self.past.sum(0)
        self.past[1:3] = x
        between = self.past * 1.0
        self.past.copy_(torch.cat((self.past[1:], x[:1])))
        return before, between, self.past + 0.0


def test_slices_and_rolls_when_written_then_read_in_order():
    torch.manual_seed(3)
    model = Slices().eval()
    gm = torch.export.export(model, (torch.randn(2, 8),)).module()
    run_passes(gm, (strip_guards, quantize_caches(8), drop_dead_constants))
    for _ in range(3):
        x = torch.randn(2, 8)
        for expected, found in zip(model(x), gm(x), strict=True):
            assert sqnr(expected, found) > 34
    assert mutated_buffers(gm) == ("past_q", "past_scale")


class Columns(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("past", torch.zeros(4, 8))

    def forward(self, x, i):
        if self.how == "columns":
            self.past.index_copy_(1, i, x[:, :2])
        elif self.how == "adds":
            self.past.add_(x)
        elif self.how == "accumulates":
            self.past.index_put_((i,), x[:2], accumulate=True)
        elif self.how == "part":
            self.past[:, 2:4] = x[:, :2]
        else:
            self.past.index_copy_(0, i, x[:2])
            return self.past
        return self.past + x


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("columns", "writes no whole rows"),
        ("adds", "writes it"),
        ("accumulates", "adds to it"),
        ("part", "takes part of a row"),
        ("returned", "it is returned"),
    ],
)
def test_caches_when_not_written_by_rows_then_left_float_with_the_reason(how, reason):
    inputs = torch.randn(4, 8), torch.tensor([0, 2])
    gm = torch.export.export(Columns(how).eval(), inputs).module()
    (record,) = run_passes(gm, (quantize_caches(8),))
    assert not record.changed
    (note,) = record.notes
    assert note.skipped
    assert reason in note.text


def test_caches_when_quantized_twice_then_nothing_changes():
    _, quantized = converted(8)
    before = str(quantized.graph)
    (record,) = run_passes(quantized, (quantize_caches(8),))
    assert not record.changed
    assert str(quantized.graph) == before
    assert all(n.skipped and "holds the scales" in n.text for n in record.notes)


def test_pass_when_pickled_then_the_same():
    kept = pickle.loads(pickle.dumps(quantize_caches(4, names="keys")))
    gm = program_of(Attention().eval()).module()
    run_passes(gm, (strip_guards, kept, drop_dead_constants))
    assert mutated_buffers(gm) == ("keys_q", "keys_scale", "values")


def test_rows_when_no_whole_bytes_then_left_float():
    model = Slices()
    model.past = torch.zeros(4, 7)
    gm = torch.export.export(model.eval(), (torch.randn(2, 7),)).module()
    (record,) = run_passes(gm, (quantize_caches(4),))
    assert "no whole bytes" in record.notes[0].text


def test_bits_when_neither_8_nor_4_then_refused():
    with pytest.raises(ConfigError, match="8 or 4 bits"):
        quantize_caches(5)
