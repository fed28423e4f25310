"""Helper functions against torchao's own."""

import operator

import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.pt2e import graph_utils, quantizer, utils
from pt2e_quant.pt2e.observer import MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver

theirs = pytest.importorskip("torchao.quantization.pt2e.utils")
their_graph = pytest.importorskip("torchao.quantization.pt2e.graph_utils")
their_quantizer = pytest.importorskip("torchao.quantization.pt2e.quantizer")

QSCHEMES = [
    torch.per_tensor_affine,
    torch.per_tensor_symmetric,
    torch.per_channel_affine,
    torch.per_channel_symmetric,
    torch.per_channel_affine_float_qparams,
]
DTYPES = [torch.int8, torch.uint8, torch.quint8, torch.qint8, torch.int16, torch.int32]


@pytest.mark.parametrize("qscheme", QSCHEMES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("own", [False, True])
def test_determine_qparams_when_called_then_as_there(qscheme, dtype, own):
    low, high = torch.tensor([-1.0, 0.5, 0.0]), torch.tensor([2.0, 0.75, 0.0])
    if "tensor" in str(qscheme):
        low, high = low[0], high[0]
    limits = (-128, 127) if dtype == torch.int8 else (0, 255)
    arguments = (low, high, *limits, dtype, torch.tensor([2**-12]), own, qscheme)
    for a, b in zip(
        utils.determine_qparams(*arguments), theirs.determine_qparams(*arguments), strict=True
    ):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce_range", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_integer_range_when_calculated_then_as_there(dtype, reduce_range, own):
    arguments = (-8 if own else None, 7 if own else None, own, dtype, reduce_range)
    assert utils.calculate_qmin_qmax(*arguments) == theirs.calculate_qmin_qmax(*arguments)
    assert utils.to_underlying_dtype(dtype) == theirs.to_underlying_dtype(dtype)


def test_ranges_when_wrong_then_refused():
    with pytest.raises(ConfigError, match="holds 0"):
        utils.validate_qmin_qmax(1, 5)
    with pytest.raises(ConfigError, match="does not fit"):
        utils.calculate_qmin_qmax(-200, 200, True, torch.int8, False)
    with pytest.raises(ConfigError, match="not below"):
        utils.check_min_max_valid(torch.tensor([2.0]), torch.tensor([1.0]))
    with pytest.warns(UserWarning, match="no data"):
        assert not utils.check_min_max_valid(torch.tensor([]), torch.tensor([]))
    with pytest.warns(UserWarning, match="no data"):
        scale, _ = utils.determine_qparams(
            torch.tensor(torch.inf), torch.tensor(-torch.inf), 0, 1, torch.int8, None, True
        )
    assert scale.item() == 1.0


def test_qparam_dict_when_per_channel_then_affine_with_its_axis():
    observer = PerChannelMinMaxObserver(dtype=torch.int8, qscheme=torch.per_channel_symmetric)
    observer(torch.ones(2, 3))
    found = utils.get_qparam_dict(observer)
    assert (found["qscheme"], found["axis"]) == (torch.per_channel_affine, 0)
    assert found["scale"].shape == (2,)
    assert (found["quant_min"], found["quant_max"]) == (-128, 127)
    assert utils.get_qparam_dict(PlaceholderObserver(torch.float16)) == {
        "qscheme": None,
        "dtype": torch.float16,
    }
    observer = MinMaxObserver(qscheme=torch.per_tensor_symmetric)
    observer(torch.ones(1))
    assert utils.get_qparam_dict(observer)["qscheme"] == torch.per_tensor_affine
    observer.qscheme = "none"
    with pytest.raises(UnsupportedError, match="neither"):
        utils.get_qparam_dict(observer)


class Inner(nn.Module):
    def forward(self, x, scale=2, *, shift=3):
        return x * scale + shift


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(self.inner(x, shift=5))


def test_example_inputs_when_modules_are_called_then_by_name():
    x = torch.ones(1, 2)
    found = utils.get_fqn_to_example_inputs(Outer(), (x,))
    assert list(found) == ["", "inner", "linear"]
    assert found["inner"] == (x, 2, 5)
    assert torch.equal(found["linear"][0], x * 2 + 5)


def test_attributes_when_names_are_taken_then_the_next():
    module = nn.Module()
    graph = torch.fx.Graph()
    made = [utils.create_getattr_from_value(module, graph, "a.b", v) for v in (1.5, torch.ones(2))]
    assert [n.target for n in made] == ["a_b0", "a_b1"]
    assert utils.getattr_from_fqn(module, "a_b1").tolist() == [1, 1]
    assert utils.get_new_attr_name_with_prefix("a_b")(module) == "a_b2"
    assert utils.has_no_children_ignoring_parametrizations(nn.Linear(1, 1))
    assert utils.has_no_children_ignoring_parametrizations(
        nn.utils.parametrizations.weight_norm(nn.Linear(1, 1))
    )
    assert not utils.has_no_children_ignoring_parametrizations(nn.Sequential(nn.ReLU()))


@pytest.fixture(scope="module")
def program():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.ReLU())
    return torch.export.export(model, (torch.randn(1, 1, 2, 2),))


def test_partitions_when_found_then_as_there(program):
    gm = program.module()
    for kinds in ([nn.Conv2d, nn.ReLU], [nn.ReLU], [nn.Conv2d, nn.Hardtanh]):
        ours, other = (
            [[p.output_nodes for p in chain] for chain in m.find_sequential_partitions(gm, kinds)]
            for m in (graph_utils, their_graph)
        )
        assert ours == other
    with pytest.raises(ConfigError, match="twice"):
        graph_utils.find_sequential_partitions(gm, [nn.ReLU, nn.functional.relu])


def test_equivalent_types_when_replaced_then_in_force(program):
    before = [set(group) for group in graph_utils.get_equivalent_types()]
    assert before == their_graph.get_equivalent_types()
    try:
        graph_utils.update_equivalent_types_dict([{nn.Conv2d, nn.ReLU}])
        with pytest.raises(ConfigError, match="twice"):
            graph_utils.find_sequential_partitions(program.module(), [nn.Conv2d, nn.ReLU])
    finally:
        graph_utils.update_equivalent_types_dict(before)
    with pytest.raises(ConfigError, match="found None"):
        graph_utils.update_equivalent_types_dict()


def test_producers_when_an_input_is_among_them_then_none(program):
    gm = program.module()
    seen = []
    graph_utils.bfs_trace_with_node_process(program, lambda n: seen.append(n.name))
    assert "relu" in seen
    assert "x" not in seen
    conv = next(n for n in gm.graph.nodes if "conv2d" in str(n.target))
    assert graph_utils.collect_producer_nodes(conv) is None
    assert graph_utils.collect_producer_nodes(conv.args[1]) == [conv.args[1]]


def test_annotation_helpers_when_used_then_both_slots_are_kept(program):
    node = next(n for n in program.graph.nodes if n.op == "call_function")
    spec = quantizer.QuantizationSpec(torch.int8, MinMaxObserver, -128, 127)
    assert not quantizer.is_valid_annotation(node.meta.get("quantization_annotation"))
    quantizer.annotate_input_qspec_map(node, node.args[0], spec)
    quantizer.annotate_output_qspec(node, spec)
    found = node.meta.pop("quantization_annotation")
    assert (found.input_qspec_map, found.output_qspec) == ({node.args[0]: spec}, spec)
    assert quantizer.is_valid_annotation(found)
    assert their_quantizer.is_valid_annotation(found)
    assert quantizer.get_module_name_filter("0")(node)
    assert not quantizer.get_module_name_filter("1")(node)


def test_config_when_read_then_specs_or_refused():
    act = quantizer.QuantizationSpec(
        torch.int8, MinMaxObserver, qscheme=torch.per_tensor_affine, quant_min=0, quant_max=7
    )
    bad = quantizer.QuantizationSpec(torch.int8, MinMaxObserver, qscheme=torch.per_channel_affine)
    half = quantizer.QuantizationSpec(torch.float, MinMaxObserver)
    good = quantizer.QuantizationConfig(act, act, None, half)
    assert quantizer.get_input_act_qspec(good) is act
    assert quantizer.get_output_act_qspec(good) is act
    assert quantizer.get_bias_qspec(good) is half
    assert quantizer.get_weight_qspec(good) is None
    assert quantizer.get_weight_qspec(None) is None
    wrong = quantizer.QuantizationConfig(bad, bad, bad, act)
    for read in (
        quantizer.get_input_act_qspec,
        quantizer.get_output_act_qspec,
        quantizer.get_weight_qspec,
        quantizer.get_bias_qspec,
    ):
        with pytest.raises(ConfigError, match="found QuantizationSpec"):
            read(wrong)
    assert quantizer.OperatorConfig(good, [[operator.add]]).operators == [[operator.add]]
