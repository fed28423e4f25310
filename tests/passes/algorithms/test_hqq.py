"""HQQ as an algorithm: the same scales as the search of its name, on anybody's annotations."""

import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.specs import QuantizationAnnotation, QuantizationSpec
from pt2e_quant.graph.ops import LINEAR, argument, is_call
from pt2e_quant.observers.static.minmax import PerChannelMinMaxObserver

X = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


class Foreign:
    """A quantizer that asks for four bits by minimum and maximum."""

    def transform_for_annotation(self, gm):
        return gm

    def annotate(self, gm):
        spec = QuantizationSpec(
            dtype=torch.int8,
            observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
            quant_min=-8,
            quant_max=7,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
        )
        for node in gm.graph.nodes:
            if is_call(node, LINEAR):
                specs = {argument(node, "weight"): spec}
                node.meta["quantization_annotation"] = QuantizationAnnotation(input_qspec_map=specs)
        return gm

    def validate(self, gm):
        pass


def planted() -> nn.Module:
    """Rows with one weight far from all others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16))
    with torch.no_grad():
        model[0].weight[:, 3] = 2.0
    return model.eval()


def test_hqq_when_a_recipe_has_a_search_too_then_the_same_graph(quantized):
    named = quantized(planted(), [X], "w4_g32", "hqq")
    searched = quantized(planted(), [X], "w4_g32", search="hqq")
    assert torch.equal(named(X), searched(X))
    assert not torch.equal(named(X), quantized(planted(), [X], "w4_g32")(X))


def test_hqq_when_the_annotation_is_foreign_then_most_weights_come_nearer():
    model = planted()
    wrong = []
    for algorithms in ((), ("hqq",)):
        prepared = pq.prepare_pt2e(
            torch.export.export(model, (X,)), Foreign(), algorithms=algorithms
        )
        gm = pq.convert_pt2e(prepared)
        with torch.no_grad():
            rounded = gm(torch.eye(32)) - model[0].bias
        wrong.append((rounded.T - model[0].weight).abs().median())
    assert wrong[1] < 0.9 * wrong[0]
