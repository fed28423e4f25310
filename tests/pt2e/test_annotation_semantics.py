"""What annotations mean, case by case; held against torchao where torchao runs the case."""

import pytest
import torch
from torch import nn
from torch.nn import functional

theirs_quantizer = pytest.importorskip("torchao.quantization.pt2e.quantizer")
theirs_observer = pytest.importorskip("torchao.quantization.pt2e.observer")

from hand_quantizer import (  # noqa: E402
    AFFINE,
    INT8,
    SYMMETRIC,
    UINT8,
    WEIGHT,
    Run,
    X,
    aten,
    equal,
    ours_only,
    scales,
    shared,
)

from pt2e_quant.core.provenance import provenance_of  # noqa: E402
from pt2e_quant.core.qdq import is_dequantize, is_qdq, is_quantize  # noqa: E402
from pt2e_quant.pt2e.quantizer import (  # noqa: E402
    QuantizationAnnotation,
    QuantizationSpec,
    SharedQuantizationSpec,
)

# Sharing


def test_cat_when_of_a_tensor_with_itself_then_one_scale():
    def rule(f):
        cat = f.one(aten.cat.default)
        x = cat.args[0][0]
        f.note(cat, {x: INT8}, shared((x, cat)))

    gm = equal(Run(lambda m, x: torch.cat([x + 1, m.a(x) * 0][:1] * 2), a=nn.ReLU()), (X,), rule)
    assert len(set(scales(gm))) == 1


def test_cat_when_inputs_have_two_producers_then_one_scale():
    def rule(f):
        cat = f.one(aten.cat.default)
        a, b = cat.args[0]
        f.note(cat, {a: INT8, b: shared((a, cat))}, shared((a, cat)))

    gm = equal(Run(lambda m, x: torch.cat([x * 3, x - 1])), (X,), rule)
    assert len(set(scales(gm))) == 1


def test_sharing_when_with_later_outputs_in_a_chain_then_one_scale():
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


def test_sharing_when_in_a_circle_then_its_one_spec_is_taken():
    def rule(f):
        first, second = f.one(aten.sin.default), f.one(aten.cos.default)
        f.note(first, output=shared((first, second)))
        f.note(second, {first: shared(second)}, shared(first))
        f.note(f.one(aten.tanh.default), {second: INT8}, shared(second))

    gm = ours_only(Run(lambda m, x: torch.tanh(torch.cos(torch.sin(x)))), (X,), rule)
    assert len(set(scales(gm))) == 1


def test_specs_when_equal_on_one_tensor_then_share_unless_forbidden():
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


def test_bias_when_derived_then_its_scale_is_of_input_and_weight():
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


def test_qparams_when_fixed_then_taken_as_they_are():
    def rule(f):
        node = f.one(aten.sigmoid.default)
        fixed = theirs_quantizer.FixedQParamsQuantizationSpec(
            torch.uint8, 1 / 256, 0, 0, 255, AFFINE
        )
        f.note(node, {node.args[0]: INT8}, fixed)

    gm = equal(nn.Sigmoid(), (X,), rule)
    assert scales(gm)[-1] == 1 / 256


# Several readers, and requantize


def test_readers_when_their_specs_differ_then_each_gets_its_own():
    def rule(f):
        first, tanh, cos = (f.one(t.default) for t in (aten.sin, aten.tanh, aten.cos))
        f.note(tanh, {first: INT8})
        f.note(cos, {first: UINT8})

    gm = equal(Run(lambda m, x: (torch.tanh(y := torch.sin(x)), torch.cos(y))), (X,), rule)
    kinds = {n.args[-1] for n in gm.graph.nodes if is_quantize(n)}
    assert kinds == {torch.int8, torch.uint8}


def test_tensor_when_output_and_input_types_differ_then_requantized():
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


def test_tensors_when_integer_or_boolean_then_left_alone():
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


def test_constant_when_annotated_then_stored_once_as_integers():
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


def test_parameter_when_two_operators_read_it_then_stored_once():
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
def test_parameter_when_read_through_a_view_then_becomes_integers(view):
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
    # torchao's integers may lie transposed: some CPUs add the four products in another order then.
    gm = equal(Viewed(), (X,), rule, atol=1e-6)
    state = gm.state_dict()
    (name,) = [n for n, v in state.items() if v.dtype is torch.int8]
    assert name.endswith("weight_q")  # a slice is folded first: only its part is stored
    assert "weight" not in state


# The specs of this package are those of torchao, and may be mixed with them


def test_specs_when_of_both_libraries_in_one_graph_then_they_share():
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
