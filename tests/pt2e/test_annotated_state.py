"""Annotated graphs with state, views, layouts, dynamic sizes and devices of their own."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim, export

pytest.importorskip("torchao.quantization.pt2e.quantizer")

from hand_quantizer import (
    INT8,
    SYMMETRIC,
    WEIGHT,
    Hand,
    Run,
    X,
    aten,
    equal,
    ours_only,
    shared,
    spec,
)

from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.pt2e.quantize_pt2e import prepare_pt2e

# Inputs, outputs, layouts, sizes, devices


def test_outputs_when_they_are_inputs_then_they_stay_so():
    def rule(f):
        node = f.one(aten.tanh.default)
        f.note(node, {node.args[0]: INT8}, INT8)

    gm = equal(Run(lambda m, x, y: (y, torch.tanh(x), x)), (X, X + 1), rule)
    y = torch.randn(2, 3, 4)
    found = gm(X, y)
    assert torch.equal(found[0], y)
    assert torch.equal(found[2], X)


def test_input_when_quantized_and_also_returned_then_returned_in_float():
    def rule(f):
        node = f.one(aten.tanh.default)
        f.note(node, {node.args[0]: INT8}, INT8)

    gm = ours_only(Run(lambda m, x: {"y": torch.tanh(x), "x": [x]}), (X,), rule)
    assert torch.equal(gm(X * 1.01)["x"][0], X * 1.01)


def test_memory_format_when_channels_last_then_stays_so():
    def rule(f):
        conv = f.one(aten.conv2d.default)
        x, w = conv.args[:2]
        f.note(conv, {x: INT8, w: WEIGHT}, INT8)

    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    gm = equal(model, (x,), rule)
    with torch.no_grad():
        assert gm(x).stride() == model(x).stride()
    assert gm.state_dict()["weight_q"].is_contiguous()


def test_sizes_when_dynamic_then_stay_so_in_every_dimension():
    def rule(f):
        linear, cat = f.one(aten.linear.default), f.one(aten.cat.default)
        x, w = linear.args[:2]
        f.note(linear, {x: INT8, w: WEIGHT}, INT8)
        a, b = cat.args[0]
        f.note(cat, {a: INT8, b: shared((a, cat))}, shared((a, cat)))

    torch.manual_seed(0)
    model = Run(lambda m, x: torch.cat([m.a(x), x], 1), a=nn.Linear(4, 4))
    shapes = {"args": ({0: Dim("n", max=32), 1: Dim("t", max=64)},)}
    gm = ours_only(model, (X,), rule, shapes=shapes)
    for size in ((1, 2, 4), (5, 9, 4), (32, 64, 4)):
        assert gm(torch.randn(size)).shape == (size[0], 2 * size[1], 4)
    again = export_again(gm)
    assert len(again.range_constraints) == 2


def test_constants_when_on_two_devices_then_each_device_keeps_its_own():
    def rule(f):
        for node in f.all(aten.linear.default):
            x, w = node.args[:2]
            f.note(node, {x: INT8, w: spec(low=-127, scheme=SYMMETRIC)})

    here, there = nn.Linear(4, 4), nn.Linear(4, 4).to("meta")
    model = Run(lambda m, x, y: (m.here(x), m.there(y)), here=here, there=there)
    program = export(model.eval(), (X, X.to("meta")), strict=False)
    prepared = prepare_pt2e(program, Hand(rule))
    for node in prepared.graph.nodes:
        if node.op == "call_module" and "val" in node.meta:
            assert node.meta["val"].device == node.args[0].meta["val"].device
    devices = {n: t.device.type for n, t in prepared.state_dict().items() if "weight" in n}
    assert devices["there.weight"] == "meta"
    assert devices["here.weight"] == "cpu"


# State


class Cache(nn.Module):
    """A KV cache: rows are written at a position, all of them are read."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(4, 4)
        self.register_buffer("rows", torch.zeros(8, 4))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        key = self.key(x)
        self.rows.index_copy_(0, self.position, key)
        self.position.add_(1)
        return x @ self.rows.t()


def cache_rule(f):
    linear, matmul = f.one(aten.linear.default), f.one(aten.matmul.default)
    x, w = linear.args[:2]
    f.note(linear, {x: INT8, w: WEIGHT}, INT8)
    f.note(matmul, dict.fromkeys(matmul.args, INT8), INT8)


def test_cache_when_converted_and_exported_then_still_written():
    torch.manual_seed(0)
    model = Cache().eval()
    inputs = [(torch.randn(1, 4),) for _ in range(4)]
    gm = ours_only(copy.deepcopy(model), inputs[0], cache_rule, batches=inputs[1:])
    assert set(capture_of(gm).mutated_buffers) == {"rows", "position"}
    again = export_again(copy.deepcopy(gm))  # a program shares its buffers with the module
    mutated = again.run_decompositions({}).graph_signature.buffers_to_mutate.values()
    assert set(mutated) == {"rows", "position"}
    runs = [copy.deepcopy(model), gm, again.module()]
    for run in runs:
        for name, buffer in run.named_buffers():
            if name in ("rows", "position"):
                buffer.zero_()
    for x in inputs:
        with torch.no_grad():
            expected, found, exported = (run(*x) for run in runs)
        torch.testing.assert_close(found, expected, rtol=0, atol=0.15)
        assert torch.equal(found, exported)
    assert int(gm.position) == 4
    assert int((gm.rows.abs().sum(1) > 0).sum()) == 4


def test_cache_when_the_model_keeps_it_in_integers_then_left_alone():
    """The model writes and reads int8 by itself: the quantizer leaves the buffer alone."""
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    arguments = (0.05, 0, -128, 127, torch.int8)

    class Int8Cache(Cache):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(8, 4, dtype=torch.int8))

        def forward(self, x):
            self.rows.index_copy_(0, self.position, quantize(self.key(x), *arguments))
            self.position.add_(1)
            return x @ dequantize(self.rows, *arguments).t()

    torch.manual_seed(0)
    model = Int8Cache().eval()
    inputs = [(torch.randn(1, 4),) for _ in range(4)]
    gm = ours_only(copy.deepcopy(model), inputs[0], cache_rule, batches=inputs[1:])
    assert gm.rows.dtype is torch.int8
    gm.rows.zero_(), gm.position.zero_()
    with torch.no_grad():
        for x in inputs:
            torch.testing.assert_close(gm(*x), model(*x), rtol=0, atol=0.3)
    assert torch.equal(gm.rows.float().ne(0).any(1), model.rows.float().ne(0).any(1))
