"""Outputs node by node, of a float graph and of one quantized from it."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.pt2e import (
    CUSTOM_KEY,
    NUMERIC_DEBUG_HANDLE_KEY,
    compare_results,
    extract_results_from_loggers,
    generate_numeric_debug_handle,
    prepare_for_propagation_comparison,
)
from pt2e_quant.pt2e.numeric_debugger import NodeSourceDebugInfo, QuantizationComparisonResult
from pt2e_quant.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from pt2e_quant.pt2e.quantizer import (
    QuantizationSpec,
    Quantizer,
    annotate_input_qspec_map,
    annotate_output_qspec,
)

SPEC = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)


class Linears(Quantizer):
    def annotate(self, model):
        for node in model.graph.nodes:
            if node.target == torch.ops.aten.linear.default:
                annotate_input_qspec_map(node, node.args[0], SPEC)
                annotate_output_qspec(node, SPEC)
        return model

    def validate(self, model):
        pass


@pytest.fixture
def program():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    return torch.export.export(model, (torch.randn(3, 4),))


def test_results_when_compared_then_each_node_once_and_its_noise(program):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    prepared = prepare_pt2e(program.module(), Linears())
    prepared(x)
    graphs = [program.module(), convert_pt2e(prepared)]
    logged = [prepare_for_propagation_comparison(gm) for gm in graphs]
    outputs = [gm(x) for gm in logged]
    assert torch.equal(outputs[0], graphs[0](x))
    found = compare_results(*map(extract_results_from_loggers, logged))
    names = {summary.ref_node_name: summary for summary in found.values()}
    assert {"linear", "relu", "linear_1"} <= set(names)
    for name in ("linear", "relu", "linear_1"):
        (result,) = names[name].results
        assert 0 < float(result.mse_loss) < 1e-2
        assert 20 < float(result.sqnr) < 100
    assert names["linear"].actual_module_stack == "0"
    assert not any("logger" in n for n, _ in graphs[1].named_modules())


def test_results_when_compared_then_values_and_names_are_those_of_compare(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).eval()
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    program, again = (torch.export.export(model, (x,)) for _ in range(2))
    prepared = prepare_pt2e(program.module(), Linears())
    prepared(x)
    quantized = convert_pt2e(prepared)
    pq.save(quantized, tmp_path / "model.pt2q")
    logged = [
        prepare_for_propagation_comparison(gm)
        for gm in (again.module(), quantized, pq.load(tmp_path / "model.pt2q"))
    ]
    for gm in logged:
        gm(x)
    reference, *others = map(extract_results_from_loggers, logged)
    rows = pq.compare(program, quantized, [x], progress=False)
    for other in others:  # the second is of no known graph
        found = {info.name: s for info, s in compare_results(reference, other).items()}
        assert {"conv2d", "flatten", "linear"} <= found.keys()
        (result,) = found["linear"].results
        error = (result.actual - result.ref).abs().max()
        assert float(error) == pytest.approx(rows.node("linear").max_error)


def test_results_when_shapes_differ_then_the_nodes_are_named():
    info = object()
    ours, theirs = ({info: (name, None, [torch.ones(n)])} for name, n in (("a", 1), ("b", 2)))
    with pytest.raises(ConfigError, match='"a" and "b": outputs differ in shape'):
        compare_results(ours, theirs)
    assert compare_results(ours, {}) == {}


def test_loss_when_outputs_are_nested_then_in_their_structure():
    result = QuantizationComparisonResult(
        actual=(torch.ones(2), {"a": [torch.zeros(1)], "b": 3}),
        ref=(torch.zeros(2), {"a": [torch.zeros(1)], "b": 3}),
    )
    assert result.mse_loss == (torch.tensor(1.0), {"a": [torch.tensor(0.0)], "b": None})


def test_handles_when_some_are_there_then_they_stay(program):
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    nodes[1].meta[CUSTOM_KEY] = {NUMERIC_DEBUG_HANDLE_KEY: 7}
    generate_numeric_debug_handle(program)
    generate_numeric_debug_handle(program)
    handles = [n.meta[CUSTOM_KEY][NUMERIC_DEBUG_HANDLE_KEY] for n in nodes]
    assert handles[1] == 7
    assert sorted(handles) == [7, 8, 9]
    with pytest.raises(ConfigError, match="ExportedProgram"):
        generate_numeric_debug_handle(nn.ReLU())


def test_node_source_when_of_two_exports_then_the_name_joins_them():
    ours, theirs = (NodeSourceDebugInfo("conv2d", graph_id) for graph_id in (1, 2))
    assert ours == theirs
    assert hash(ours) == hash(theirs)
