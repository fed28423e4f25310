"""What annotations mean, case by case; held against torchao where torchao runs the case."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.nn import functional

theirs_quantizer = pytest.importorskip("torchao.quantization.pt2e.quantizer")
theirs_observer = pytest.importorskip("torchao.quantization.pt2e.observer")

from pt2e_flows import both  # noqa: E402

from pt2e_quant.core.provenance import provenance_of  # noqa: E402
from pt2e_quant.core.qdq import is_dequantize, is_qdq, is_quantize  # noqa: E402
from pt2e_quant.core.read_capture import capture_of  # noqa: E402
from pt2e_quant.flow.reexport import export_again  # noqa: E402
from pt2e_quant.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # noqa: E402
from pt2e_quant.pt2e.quantizer import (  # noqa: E402
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

aten = torch.ops.aten
AFFINE, SYMMETRIC = torch.per_tensor_affine, torch.per_tensor_symmetric


class Hand(theirs_quantizer.Quantizer, Quantizer):
    """Annotates with a function of (a node finder, the two libraries' specs)."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def annotate(self, model):
        self.rule(Finder(model))
        return model

    def validate(self, model):
        pass


class Finder:
    """Nodes of a graph by operator, and annotations in torchao's own classes."""

    def __init__(self, gm):
        self.nodes = list(gm.graph.nodes)

    def all(self, target):
        return [n for n in self.nodes if n.target == target]

    def one(self, target):
        (found,) = self.all(target)
        return found

    def note(self, node, inputs=(), output=None, *, sharing=True):
        node.meta["quantization_annotation"] = theirs_quantizer.QuantizationAnnotation(
            input_qspec_map=dict(inputs), output_qspec=output, allow_implicit_sharing=sharing,
            _annotated=True,
        )  # fmt: skip


def spec(dtype=torch.int8, low=-128, high=127, scheme=AFFINE):
    observer = theirs_observer.MinMaxObserver.with_args(eps=2**-12)
    return theirs_quantizer.QuantizationSpec(dtype, observer, low, high, scheme)


def shared(place):
    return theirs_quantizer.SharedQuantizationSpec(place)


INT8, UINT8 = spec(), spec(torch.uint8, 0, 255)
WEIGHT = spec(low=-127, scheme=SYMMETRIC)
X = torch.linspace(-1, 2, 24).reshape(2, 3, 4)


class Run(nn.Module):
    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args):
        return self.function(self, *args)


def equal(model, inputs, rule, **options):
    """Both flows give the same q/dq with the same qparams, and the same outputs."""
    theirs, ours = both(model, inputs, lambda: Hand(rule), **options)
    assert _qdq(ours.counts) == _qdq(theirs.counts)
    assert [q[0] for q in ours.qparams] == [q[0] for q in theirs.qparams]
    assert _numbers(ours) == _numbers(theirs)
    for a, b in zip(theirs.outputs, ours.outputs, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)
    return ours.gm


def _qdq(counts):
    return Counter({k: v for k, v in counts.items() if "quantize" in k})


def _numbers(outcome):
    return sorted(repr(arguments) for _, _, arguments in outcome.qparams)


def ours_only(model, inputs, rule, *, shapes=None, batches=()):
    """A converted graph of this package."""
    program = export(model.eval(), inputs, dynamic_shapes=shapes, strict=False)
    prepared = prepare_pt2e(program, Hand(rule), strict=True)
    with torch.no_grad():
        for batch in (inputs, *batches):
            prepared(*batch)
    return convert_pt2e(prepared, strict=True)


def scales(gm):
    """The scale of each static q/dq in graph order."""
    return [n.args[1] for n in gm.graph.nodes if is_qdq(n)]


# Sharing


def test_cat_of_a_tensor_with_itself_shares_one_scale():
    def rule(f):
        cat = f.one(aten.cat.default)
        x = cat.args[0][0]
        f.note(cat, {x: INT8}, shared((x, cat)))

    gm = equal(Run(lambda m, x: torch.cat([x + 1, m.a(x) * 0][:1] * 2), a=nn.ReLU()), (X,), rule)
    assert len(set(scales(gm))) == 1


def test_cat_inputs_of_two_producers_share_forward():
    def rule(f):
        cat = f.one(aten.cat.default)
        a, b = cat.args[0]
        f.note(cat, {a: INT8, b: shared((a, cat))}, shared((a, cat)))

    gm = equal(Run(lambda m, x: torch.cat([x * 3, x - 1])), (X,), rule)
    assert len(set(scales(gm))) == 1


def test_sharing_with_an_output_that_comes_later_and_on_from_there():
    def rule(f):
        first, second, third = (
            f.one(aten.sin.default),
            f.one(aten.cos.default),
            f.one(aten.tanh.default),
        )
        f.note(first, output=shared(second))
        f.note(second, output=shared(third))
        f.note(third, output=INT8)

    gm = ours_only(Run(lambda m, x: torch.tanh(torch.cos(torch.sin(x)))), (X,), rule)
    assert len(set(scales(gm))) == 1
    assert len({r.group for r in provenance_of(gm).tensors}) == 1


def test_a_circle_of_sharing_takes_the_one_spec_in_it():
    def rule(f):
        first, second = f.one(aten.sin.default), f.one(aten.cos.default)
        f.note(first, output=shared((first, second)))
        f.note(second, {first: shared(second)}, shared(first))
        f.note(f.one(aten.tanh.default), {second: INT8}, shared(second))

    gm = ours_only(Run(lambda m, x: torch.tanh(torch.cos(torch.sin(x)))), (X,), rule)
    assert len(set(scales(gm))) == 1


def test_equal_specs_of_one_tensor_share_unless_they_may_not():
    def rule(sharing):
        def annotate(f):
            first, (a, b) = f.one(aten.sin.default), f.all(aten.tanh.default)
            f.note(first, output=INT8)
            f.note(a, {first: INT8})
            f.note(b, {first: INT8}, sharing=sharing)

        return annotate

    model = Run(lambda m, x: (torch.tanh(y := torch.sin(x)), torch.tanh(y)))
    together = equal(model, (X,), rule(True))
    assert sum(map(is_quantize, together.graph.nodes)) == 1
    apart = ours_only(model, (X,), rule(False))
    assert len({r.group for r in provenance_of(apart).tensors}) == 2


# Derived and fixed


def product(observers):
    scale = observers[0].calculate_qparams()[0] * observers[1].calculate_qparams()[0]
    return scale, torch.zeros_like(scale, dtype=torch.int32)


def test_a_bias_derives_its_scale_from_input_and_weight():
    def rule(f):
        linear = f.one(aten.linear.default)
        x, w, b = linear.args
        derived = theirs_quantizer.DerivedQuantizationSpec(
            derived_from=[(x, linear), (w, linear)], derive_qparams_fn=product,
            dtype=torch.int32, quant_min=-(2**31), quant_max=2**31 - 1, qscheme=SYMMETRIC,
        )  # fmt: skip
        f.note(linear, {x: INT8, w: WEIGHT, b: derived}, UINT8)

    torch.manual_seed(0)
    gm = equal(nn.Linear(4, 5), (X,), rule)
    by_dtype = {n.args[-1]: n.args[1] for n in gm.graph.nodes if is_dequantize(n)}
    state = gm.state_dict()
    assert state["bias_q"].dtype is torch.int32
    record = {r.name: r.scale[0] for r in provenance_of(gm).tensors}
    assert record["bias"] == pytest.approx(record["input_1"] * record["weight"], rel=1e-6)
    assert torch.int32 in by_dtype


def test_fixed_qparams_are_taken_as_they_are():
    def rule(f):
        node = f.one(aten.sigmoid.default)
        fixed = theirs_quantizer.FixedQParamsQuantizationSpec(
            torch.uint8, 1 / 256, 0, 0, 255, AFFINE
        )
        f.note(node, {node.args[0]: INT8}, fixed)

    gm = equal(nn.Sigmoid(), (X,), rule)
    assert scales(gm)[-1] == 1 / 256


# Several readers, and requantize


def test_readers_of_one_tensor_with_different_specs_get_their_own():
    def rule(f):
        first, tanh, cos = (f.one(t.default) for t in (aten.sin, aten.tanh, aten.cos))
        f.note(tanh, {first: INT8})
        f.note(cos, {first: UINT8})

    gm = equal(Run(lambda m, x: (torch.tanh(y := torch.sin(x)), torch.cos(y))), (X,), rule)
    kinds = {n.args[-1] for n in gm.graph.nodes if is_quantize(n)}
    assert kinds == {torch.int8, torch.uint8}


def test_output_and_input_of_one_tensor_in_different_types_requantize():
    def rule(f):
        first, second = f.one(aten.sin.default), f.one(aten.tanh.default)
        f.note(first, output=INT8)
        f.note(second, {first: UINT8})

    gm = equal(Run(lambda m, x: torch.tanh(torch.sin(x))), (X,), rule)
    kinds = [(is_quantize(n), n.args[-1]) for n in gm.graph.nodes if is_qdq(n)]
    assert kinds == [
        (True, torch.int8), (False, torch.int8), (True, torch.uint8), (False, torch.uint8),
    ]  # fmt: skip


# What holds no float data, and constants


def test_integers_and_booleans_are_left_alone():
    def rule(f):
        for node in f.nodes:
            if node.op == "call_function":
                f.note(node, dict.fromkeys(node.all_input_nodes, INT8), INT8)

    def forward(m, x, ids):
        mask = ids > 1
        return torch.where(mask, x[ids], x[ids] * 2), ids + 1, mask

    gm = ours_only(Run(forward), (torch.randn(4, 3), torch.tensor([[0], [3]])), rule)
    for node in gm.graph.nodes:
        if is_quantize(node):
            assert node.args[0].meta["val"].is_floating_point(), node
    values = gm(torch.randn(4, 3), torch.tensor([[0], [3]]))
    assert [v.dtype for v in values] == [torch.float32, torch.int64, torch.bool]


def test_a_constant_is_observed_and_stored_once():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.linspace(-3, 3, 4))

        def forward(self, x):
            return x * self.table

    def rule(f):
        node = f.one(aten.mul.Tensor)
        f.note(node, dict.fromkeys(node.args, INT8))

    gm = equal(Scaled(), (X,), rule)
    assert {n for n, v in gm.state_dict().items() if v.dtype is torch.int8} == {"table_q"}
    assert "table" not in gm.state_dict()


def test_a_parameter_that_two_operators_read_is_stored_once():
    def rule(f):
        for linear in f.all(aten.linear.default):
            x, w = linear.args[:2]
            f.note(linear, {x: INT8, w: WEIGHT})

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return functional.linear(functional.linear(x, self.weight).sin(), self.weight)

    torch.manual_seed(0)
    gm = equal(Twice(), (X,), rule)
    assert [n for n, v in gm.state_dict().items() if v.dtype is torch.int8] == ["weight_q"]


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.t(),
        lambda w: w.reshape(2, 8).reshape(4, 4),
        lambda w: w[:2],
        lambda w: w.transpose(0, 1).contiguous(),
        lambda w: w.expand(4, 4),
    ],
)
def test_views_of_a_parameter_become_integers(view):
    def rule(f):
        linear = f.one(aten.linear.default)
        f.note(linear, {linear.args[0]: INT8, linear.args[1]: WEIGHT})

    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return functional.linear(x, view(self.weight))

    torch.manual_seed(0)
    gm = equal(Viewed(), (X,), rule)
    state = gm.state_dict()
    (name,) = [n for n, v in state.items() if v.dtype is torch.int8]
    assert name.endswith("weight_q")  # a slice is folded first: only its part is stored
    assert "weight" not in state


# Inputs, outputs, layouts, sizes, devices


def test_outputs_that_are_inputs_stay_so():
    def rule(f):
        node = f.one(aten.tanh.default)
        f.note(node, {node.args[0]: INT8}, INT8)

    gm = equal(Run(lambda m, x, y: (y, torch.tanh(x), x)), (X, X + 1), rule)
    y = torch.randn(2, 3, 4)
    found = gm(X, y)
    assert torch.equal(found[0], y)
    assert torch.equal(found[2], X)


def test_an_input_that_is_read_quantized_and_returned_stays_float():
    def rule(f):
        node = f.one(aten.tanh.default)
        f.note(node, {node.args[0]: INT8}, INT8)

    gm = ours_only(Run(lambda m, x: {"y": torch.tanh(x), "x": [x]}), (X,), rule)
    assert torch.equal(gm(X * 1.01)["x"][0], X * 1.01)


def test_channels_last_stays_channels_last():
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


def test_dynamic_sizes_stay_dynamic_in_every_dimension():
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


def test_each_device_keeps_its_constants():
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


def test_a_cache_is_still_written_after_convert_and_export():
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


def test_a_cache_may_be_kept_in_integers():
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


# The specs of this package are those of torchao, and may be mixed with them


def test_specs_of_both_libraries_in_one_graph():
    def rule(f):
        first, second, third = (f.one(t.default) for t in (aten.sin, aten.tanh, aten.cos))
        own = QuantizationSpec(
            torch.int8, theirs_observer.MinMaxObserver.with_args(eps=2**-12), -128, 127, AFFINE
        )
        f.note(first, output=own)
        second.meta["quantization_annotation"] = QuantizationAnnotation(
            {first: INT8}, SharedQuantizationSpec((first, second))
        )
        f.note(third, {second: shared(second)}, None)

    gm = ours_only(Run(lambda m, x: torch.cos(torch.tanh(torch.sin(x)))), (X,), rule)
    assert len(set(scales(gm))) == 1
    assert FixedQParamsQuantizationSpec
    assert DerivedQuantizationSpec
