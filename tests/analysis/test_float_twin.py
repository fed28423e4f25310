"""A q/dq graph whose quantized tensors are switched on one group at a time."""

import pytest
import torch

from pt2e_quant.analysis.float_twin import FloatTwin, quantized_source
from pt2e_quant.analysis.graph_side import GraphSide
from pt2e_quant.analysis.open_side import open_graph
from pt2e_quant.analysis.sensitivity import _float_weights


@pytest.fixture
def twin(made):
    side = GraphSide(made[3], "")
    return FloatTwin(side, _float_weights(open_graph(made[1], None), side))


def test_float_values_when_nothing_is_on_then_the_result_is_the_float_models(made, twin):
    with torch.no_grad():
        values = twin.float_values([made[4][0]])
        (result,) = values[twin.gm.graph.output_node()]
        torch.testing.assert_close(result, made[0](made[4][0]), rtol=1e-4, atol=1e-5)


def test_run_when_all_is_on_then_the_result_is_the_quantized_graphs(made, twin):
    every = {node for group in twin.groups for node in group.dequantizes}
    with torch.no_grad():
        values = twin.float_values([made[4][0]])
        (found,) = twin.run(values, every)
        expected = made[3](made[4][0])
    # Convolutions of another layout round otherwise: an integer may be off by one.
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    assert found.is_contiguous()


def test_groups_when_an_operator_is_quantized_then_with_its_inputs_weights_and_result(twin):
    group = next(g for g in twin.groups if g.name == "linear")
    assert group.weights == ("head.weight",)
    sources = {quantized_source(node) for node in group.dequantizes} - {None}
    assert group.anchor in sources
    assert len(sources) == 2
