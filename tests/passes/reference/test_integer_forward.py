"""The nodes of training that compute in integers: where they go, what they give, how they leave."""

import copy

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.passes.reference.forms.registry import FORMS
from pt2e_quant.passes.reference.integer_forward import (
    IntegerForward,
    drop_integer_forwards,
    insert_integer_forwards,
    integer_forward,
)
from pt2e_quant.passes.reference.integer_regions import find_regions, region_of
from pt2e_quant.passes.reference.reference_template import reference_template

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def prepared_of(model, *inputs):
    ep = torch.export.export(model.eval(), inputs)
    return pq.prepare_qat_pt2e(ep, pq.backends.get("xnnpack").quantizer("int8"))


@pytest.fixture
def prepared():
    torch.manual_seed(0)
    gm = prepared_of(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), X)
    gm(X)
    return gm


def lines(gm):
    shown = [n for n in gm.graph.nodes if n.op in ("call_module", "call_function", "output")]
    return [f"{n.name}({', '.join(a.name for a in n.all_input_nodes)})" for n in shown]


def test_insert_when_operators_have_a_form_then_a_node_behind_each(prepared):
    before = lines(prepared)
    assert before == [
        "activation_post_process_1(_0_weight)",
        "activation_post_process_3(_2_weight)",
        "activation_post_process_0(input_1)",
        "linear(activation_post_process_0, activation_post_process_1, _0_bias)",
        "relu(linear)",
        "activation_post_process_2(relu)",
        "linear_1(activation_post_process_2, activation_post_process_3, _2_bias)",
        "activation_post_process_4(linear_1)",
        "output(activation_post_process_4)",
    ]
    insert_integer_forwards(prepared)
    prepared.recompile()
    prepared.graph.lint()
    assert lines(prepared)[3:] == [
        "integer_forward_0(activation_post_process_0, input_1)",
        "linear(integer_forward_0, activation_post_process_1, _0_bias)",
        "relu(linear)",
        "activation_post_process_2(relu)",
        "integer_forward_1(activation_post_process_2, relu, integer_forward_0, "
        "activation_post_process_1, _0_bias)",
        "linear_1(integer_forward_1, activation_post_process_3, _2_bias)",
        "activation_post_process_4(linear_1)",
        "integer_forward_2(activation_post_process_4, linear_1, integer_forward_1, "
        "activation_post_process_3, _2_bias)",
        "output(integer_forward_2)",
    ]
    assert drop_integer_forwards(prepared).changed
    assert lines(prepared) == before
    assert not drop_integer_forwards(prepared).changed


def test_forward_when_on_then_the_integers_and_when_off_the_estimate(prepared):
    made = insert_integer_forwards(prepared)
    prepared.recompile()
    estimate = prepared(X).detach()
    for module in made:
        module.is_on = True
    exact = prepared(X).detach()
    reference = pq.integer_reference(pq.convert_pt2e(copy.deepcopy(prepared)))
    assert torch.equal(reference(X), exact)
    step = float(prepared.activation_post_process_4.scale)
    assert float((exact - estimate).abs().max()) <= 2.01 * step


def test_find_when_an_input_is_float_at_run_time_then_no_region():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 6))

        def forward(self, x, bias):
            return torch.nn.functional.linear(x, self.weight, bias)

    gm = prepared_of(Biased(), X, torch.zeros(3))
    gm(X, torch.zeros(3))
    # The reference declines it too: its bias would have to be made integers at run time.
    assert not any(region.has_form for region in find_regions(reference_template(gm)))
    assert insert_integer_forwards(gm) == []
    note = "linear: trains by fake-quantize, it has no integer form here"
    assert pq.provenance_of(gm).notes.count(note) == 1


@pytest.mark.parametrize("number", [0, 1])
def test_operator_when_checked_then_as_torch_wants_it(prepared, number):
    first = insert_integer_forwards(prepared)[number]
    prepared.recompile()
    kept = {}
    first.register_forward_hook(lambda m, args, out: kept.update(args=args))
    prepared(X)
    estimate, real, *values = (a.detach() for a in kept["args"])
    qparams = [
        t
        for o in first.observers
        for t in (o.scale.clone(), o.zero_point.clone(), o.fake_quant_enabled.clone())
    ]
    args = estimate.requires_grad_(), real, list(values), qparams, first.region
    torch.library.opcheck(integer_forward, args)


def test_region_when_its_text_is_read_then_read_once_for_all(prepared):
    (_, first, _) = insert_integer_forwards(prepared)
    region = region_of(first.region)
    assert region is region_of(str(first.region))
    assert region.form in FORMS
    assert isinstance(copy.deepcopy(first), IntegerForward)
