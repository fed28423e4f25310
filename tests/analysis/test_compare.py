"""Two forms of one model, node by node."""

import copy
import json

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.analysis.comparison import Part
from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.core.qdq import is_quantize
from pt2e_quant.graph.meta import origin_name


def node_named(gm, name):
    return next(node for node in gm.graph.nodes if node.name == name)


def quantize_of(gm, name):
    return next(user for user in node_named(gm, name).users if is_quantize(user))


def scaled_range(gm, name, factor):
    """A copy of a q/dq graph with the scale of one activation changed."""
    gm = copy.deepcopy(gm)
    quantize = quantize_of(gm, name)
    for node in (quantize, *quantize.users):
        node.update_arg(1, node.args[1] * factor)
    gm.recompile()
    return gm


def test_compare_when_nothing_is_wrong_then_every_node_is_named_as_in_the_float_program(made):
    _, program, _, quantized, batches = made
    found = pq.compare(program, quantized, batches, progress=False)
    names = {node.name for node in program.graph.nodes}
    assert {row.node for row in found.activations} <= names
    assert {"x", "conv2d", "silu", "add_", "relu", "mean", "linear"} <= {r.node for r in found}
    assert {row.tensor for row in found.weights} == {
        "stem.weight",
        "wide.weight",
        "deep.weight",
        "head.weight",
    }
    assert min(row.cost_db for row in found) > 25
    assert found.batches == 2
    assert found.node("silu").operator == "aten.silu"
    assert found.node("silu").module == ""
    assert found.node("conv2d_1").module == "wide"


def test_compare_when_a_graph_was_saved_and_loaded_then_named_as_before(made, tmp_path):
    _, program, _, quantized, batches = made
    pq.save(quantized, tmp_path / "model.pt2q")
    loaded = pq.load(tmp_path / "model.pt2q")
    pq.save(loaded, tmp_path / "again.pt2q")
    before, *after = (
        pq.compare(program, gm, batches[:1], progress=False)
        for gm in (quantized, loaded, pq.load(tmp_path / "again.pt2q"))
    )
    assert "add_" in {row.node for row in before}
    assert all(found.to_dicts() == before.to_dicts() for found in after)


@pytest.mark.parametrize("name", ["conv2d", "relu6_", "layer_norm", "linear"])
@pytest.mark.parametrize("factor", [1 / 8, 16])
def test_compare_when_one_range_is_wrong_then_its_node_is_the_worst(made, name, factor):
    _, program, _, quantized, batches = made
    wrong = scaled_range(quantized, name.rstrip("_"), factor)
    worst = pq.compare(program, wrong, batches, progress=False).worst(2)
    assert worst[0].node == name
    assert worst[0].part is Part.ACTIVATION
    assert worst[0].cost_db < worst[1].cost_db - 5
    if factor < 1:
        assert worst[0].share_clipped > 0.05
    else:
        assert worst[0].grid_used < 0.1


def test_compare_when_a_weight_channel_is_saturated_then_it_is_named(made):
    _, program, _, quantized, batches = made
    wrong = copy.deepcopy(quantized)
    wrong.wide.weight_scale = wrong.wide.weight_scale.clone()
    wrong.wide.weight_scale[5] /= 8
    worst = pq.compare(program, wrong, batches, progress=False).worst(1)[0]
    assert (worst.node, worst.part, worst.tensor) == ("conv2d_1", Part.WEIGHT, "wide.weight")
    assert worst.worst_channel == 5
    assert worst.module == "wide"


def test_compare_when_an_error_comes_from_before_then_the_node_itself_has_none(made):
    _, program, _, quantized, batches = made
    wrong = scaled_range(quantized, "conv2d", 16)
    found = pq.compare(program, wrong, batches, progress=False)
    right = pq.compare(program, quantized, batches, progress=False)
    assert found.node("relu").sqnr_db < right.node("relu").sqnr_db - 6
    assert found.node("layer_norm").own_sqnr_db == right.node("layer_norm").own_sqnr_db


def test_compare_when_the_reference_is_the_module_then_as_with_the_program(made):
    model, program, _, quantized, batches = made
    of_module = pq.compare(model, quantized, batches, progress=False)
    of_program = pq.compare(program, quantized, batches, progress=False)
    assert of_module.nodes[-1].sqnr_db == of_program.nodes[-1].sqnr_db
    assert model.training is False


def test_compare_when_a_side_is_prepared_then_its_observers_do_not_change(made):
    _, program, prepared, _, batches = made
    before = {name: value.clone() for name, value in prepared.state_dict().items()}
    found = pq.compare(program, prepared, [batches[0] * 50], progress=False)
    assert found.sqnr_db > 100
    after = prepared.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_compare_when_convert_corrects_biases_then_they_are_no_error_beside_the_prepared_graph():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    batches = [torch.randn(16, 8) for _ in range(8)]
    quantizer = pq.backends.get("onnx").quantizer("int8")
    prepared = pq.prepare(torch.export.export(model, (batches[0],)), quantizer)
    pq.calibrate(prepared, batches, progress=False)
    quantized = pq.convert(copy.deepcopy(prepared))
    found = pq.compare(prepared, quantized, batches, progress=False)
    assert {row.tensor for row in found.weights} == {"0.weight", "2.weight"}


def test_compare_when_written_as_json_then_infinity_is_null_and_every_row_is_there(made):
    _, program, _, quantized, batches = made
    found = pq.compare(program, quantized, batches, progress=False)
    data = json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert data["version"] == 1
    assert len(data["nodes"]) == len(found)
    assert next(r for r in data["nodes"] if r["node"] == "relu")["own_sqnr_db"] is None
    assert "conv2d" in str(found)


def test_compare_when_a_loader_gives_labels_then_inputs_picks_the_images(made):
    _, program, _, quantized, batches = made
    labelled = [(images, torch.zeros(4)) for images in batches]
    found = pq.compare(program, quantized, labelled, inputs=0, progress=False)
    assert found.batches == 2
    with pytest.raises(InputError, match="2 positional inputs"):
        pq.compare(program, quantized, labelled, progress=False)


def test_compare_when_there_is_no_batch_or_no_model_then_the_error_says_so(made):
    _, program, _, quantized, batches = made
    with pytest.raises(ConfigError, match="no batch"):
        pq.compare(program, quantized, [], progress=False)
    with pytest.raises(ConfigError, match="found int"):
        pq.compare(program, 3, batches, progress=False)


def test_compare_when_run_over_many_batches_then_the_sums_are_those_of_one_large_batch(made):
    _, program, _, quantized, _ = made
    torch.manual_seed(1)
    batches = [torch.randn(4, 3, 24, 24) for _ in range(3)]
    alone = [pq.compare(program, quantized, [b], progress=False).node("relu") for b in batches]
    together = pq.compare(program, quantized, batches, progress=False).node("relu")
    assert min(r.sqnr_db for r in alone) <= together.sqnr_db <= max(r.sqnr_db for r in alone)
    assert together.range_seen[1] == max(r.range_seen[1] for r in alone)
    assert together.max_error == max(r.max_error for r in alone)


def test_compare_when_outlier_channels_cost_the_others_then_their_tensor_is_the_worst():
    """The SQNR of the tensor itself is high: the outliers are its energy."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
    ).eval()
    with torch.no_grad():
        model[0].weight[:2] *= 300
        model[2].weight[:, :2] /= 300
    batches = [torch.randn(32, 32) for _ in range(2)]
    program = torch.export.export(model, (batches[0],))
    prepared = pq.prepare(program, pq.backends.get("xnnpack").quantizer("int8_minmax"))
    quantized = pq.convert(pq.calibrate(prepared, batches, progress=False))
    worst = pq.compare(program, quantized, batches, progress=False).worst(1)[0]
    assert worst.node == "relu"
    assert worst.own_sqnr_db > 30 > worst.own_channel_db
    assert worst.outlier_channels == (0, 1)


def test_compare_when_given_no_batches_or_a_bad_pick_then_the_error_names_the_argument(made):
    _, program, _, gm, batches = made
    with pytest.raises(InputError, match=r"compare\(reference, other, \[batch\]\)"):
        pq.compare(program, gm, batches[0], progress=False)
    pairs = [(batch, torch.zeros(4).long()) for batch in batches]
    with pytest.raises(InputError, match="what inputs=1 picks does not fit"):
        pq.compare(program, gm, pairs, inputs=1, progress=False)


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_compare_when_the_range_behind_a_recurrent_layer_is_wrong_then_the_layer_is_named(kind):
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = getattr(nn, kind)(8, 12, batch_first=True)
            self.head = nn.Linear(12, 5)

        def forward(self, x):
            return self.head(self.layer(x)[0])

    batches = [torch.randn(4, 6, 8) for _ in range(2)]
    program = torch.export.export(Tagger().eval(), (batches[0],))
    quantizer = pq.backends.get("onnx").quantizer("int8")
    prepared = pq.calibrate(pq.prepare(program, quantizer), batches, progress=False)
    gm = pq.convert(prepared)
    name = kind.lower()
    quantizes = [n for n in gm.graph.nodes if is_quantize(n) and origin_name(n.args[0]) == name]
    for node in (quantizes[-1], *quantizes[-1].users):
        node.update_arg(1, node.args[1] * 16)
    gm.recompile()
    found = pq.compare(program, gm, batches, progress=False)
    assert found.worst(1)[0].node == name
