"""What records and comparisons call for."""

import copy

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError
from tests.analysis.test_compare import node_named, quantize_of

pytestmark = pytest.mark.usefixtures("integers_everywhere")


def quantized(model, batches, recipe="int8_minmax"):
    program = torch.export.export(model.eval(), (batches[0],))
    prepared = pq.prepare(program, pq.backends.get("xnnpack").quantizer(recipe))
    return program, pq.convert(pq.calibrate(prepared, batches, progress=False))


def advice_on(program, gm, batches):
    return {a.rule: a for a in pq.advise(gm, pq.compare(program, gm, batches, progress=False))}


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))
    return model, [torch.randn(32, 32) for _ in range(2)]


def test_advise_when_nothing_is_wrong_then_there_is_no_advice(made):
    _, program, _, gm, batches = made
    assert pq.advise(gm, pq.compare(program, gm, batches, progress=False)) == ()


def test_advise_when_given_an_artifact_then_its_graph_is_read(made):
    *_, gm, batches = made
    artifact = pq.backends.get("cpu").lower(copy.deepcopy(gm), (batches[0],), verify=False)
    assert pq.advise(artifact) == pq.advise(gm)
    artifact.quantized = None
    with pytest.raises(ConfigError, match="which files of artifacts do not hold"):
        pq.advise(artifact)


def test_advise_when_channels_stand_out_then_smooth_quant_mends_it():
    model, batches = small()
    with torch.no_grad():
        model[0].weight[:2] *= 300
        model[2].weight[:, :2] /= 300
    program, gm = quantized(model, batches)
    advice = advice_on(program, gm, batches)["outlier channels"]
    assert advice.node == "relu"
    assert "channels 0, 1" in advice.evidence
    assert 'algorithms=["smooth_quant"]' in advice.line
    every = pq.advise(gm, pq.compare(program, gm, batches, progress=False))
    assert "line to add" in every._repr_html_()
    assert str(advice) in str(every)
    quantizer = pq.backends.get("xnnpack").quantizer("int8_minmax")
    prepared = pq.prepare(program, quantizer, algorithms=["smooth_quant"])
    mended = pq.convert(pq.calibrate(prepared, batches, progress=False))
    assert "outlier channels" not in advice_on(program, mended, batches)


class Wide(nn.Module):
    """A channel that is wide between an activation that is not linear, a view and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.wide = nn.Conv2d(8, 8, 3)
        self.narrow = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8 * 16, 4)
        with torch.no_grad():
            self.wide.weight[2] *= 300
            self.narrow.weight[:, 2] /= 300

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(nn.functional.hardswish(self.wide(torch.relu(self.stem(x)))))
        return self.head(torch.relu(y).flatten(1))


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_advise_when_its_lines_are_added_then_the_values_are_float(backend):
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    program = torch.export.export(Wide().eval(), (batches[0],))

    def compared(lines):
        quantizer = pq.backends.get(backend).quantizer("int8")
        for line in lines:
            exec(line, {"quantizer": quantizer})
        prepared = pq.prepare(program, quantizer, effort="fast")
        gm = pq.convert(pq.calibrate(prepared, batches, progress=False))
        return gm, pq.compare(program, gm, batches, progress=False)

    gm, before = compared([])
    advice = pq.advise(gm, before)
    assert {a.node for a in advice} == {"conv2d_1", "hardswish"}
    gm, after = compared([a.line for a in advice])
    assert pq.advise(gm, after) == ()
    assert after.sqnr_db > before.sqnr_db + 10
    assert after.node("relu").dtype != ""
    assert len([row for row in after.activations if row.dtype]) >= 3


def test_advise_when_evaluation_has_larger_values_then_calibration_is_named():
    model, batches = small()
    program, gm = quantized(model, batches)
    found = advice_on(program, gm, [3 * batch for batch in batches])
    assert "clipped" in found["range exceeded"].evidence
    assert found["range exceeded"].line.startswith("pq.calibrate(prepared")


def test_advise_when_evaluation_is_hardly_larger_then_calibration_is_not_named():
    model, batches = small()
    program, gm = quantized(model, batches)
    larger = batches[0].clone()
    larger[0, 0] = 1.1 * larger.max()
    row = pq.compare(program, gm, [larger], progress=False).node("input")
    assert 0 < row.share_clipped < 1e-3
    assert "range exceeded" not in advice_on(program, gm, [larger])


def test_advise_when_several_nodes_lose_then_the_worst_comes_first():
    model, batches = small()
    with torch.no_grad():
        model[0].weight[:2] *= 300
        model[2].weight[:, :2] /= 300
    program, gm = quantized(model, batches)
    table = pq.compare(program, gm, [3 * batch for batch in batches], progress=False)
    advice = pq.advise(gm, table)
    assert {a.rule for a in advice} == {"outlier channels", "range exceeded"}
    costs = [table.node(a.node).cost_db for a in advice]
    assert costs == sorted(costs)
    places = [[row.node for row in table.activations].index(a.node) for a in advice]
    assert places != sorted(places)


def test_advise_when_a_mask_is_in_the_range_then_its_node_is_named():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.second(torch.where(x > 2, -1e6, self.first(x)))

    torch.manual_seed(0)
    batches = [torch.randn(16, 8) for _ in range(2)]
    program, gm = quantized(Scores(), batches)
    advice = advice_on(program, gm, batches)["mask in the range"]
    assert advice.node == "where"
    assert "-1e+06" in advice.evidence


def test_advise_when_relu6_is_half_empty_then_relu_is_named(made):
    _, program, _, gm, batches = made
    gm = copy.deepcopy(gm)
    quantize = quantize_of(gm, "relu6")
    for node in (quantize, *quantize.users):
        node.update_arg(1, 6 / 255)
    gm.recompile()
    advice = advice_on(program, gm, [batch / 2 for batch in batches])["relu6 half empty"]
    assert advice.node == "relu6_"
    assert "the range at 6" in advice.evidence
    assert "relu(" in advice.line


@pytest.mark.parametrize(("scale", "rule"), [(1e-15, "bias overflow"), (1e-38, "denormal scale")])
def test_advise_when_a_scale_is_far_too_small_then_its_operator_is_named(made, scale, rule):
    gm = copy.deepcopy(made[3])
    gm.head.weight_scale = torch.full_like(gm.head.weight_scale, scale)
    found = {a.rule: a for a in pq.advise(gm)}
    assert found[rule].node == "linear"
    assert found[rule].line == 'quantizer.set_node("linear", None)'
    assert "linear (head)" in str(found[rule])


def test_advise_when_the_graph_is_float_then_the_error_says_so(made):
    with pytest.raises(ConfigError, match="quantized graph"):
        pq.advise(made[1].module())
    assert node_named(made[3], "linear")


class Relu6s(nn.Module):
    """A relu6 of a module in a container, and one of a function within a block."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)

        def forward(self, x):
            return nn.functional.relu6(self.conv(x))

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6())
        self.block = self.Block()
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.head(self.block(self.stem(x)))


def test_advise_when_relu6_is_half_empty_then_its_line_changes_the_module_alone():
    torch.manual_seed(0)
    model, batches = Relu6s().eval(), [torch.randn(2, 3, 8, 8) for _ in range(2)]
    program, gm = quantized(model, batches)
    for op in ("hardtanh", "relu6"):
        quantize = next(iter(next(n for n in gm.graph.nodes if n.name == op).users))
        for node in (quantize, *quantize.users):
            node.update_arg(1, 6 / 255)
    gm.recompile()
    found = pq.advise(gm, pq.compare(program, gm, batches, progress=False))
    lines = {a.module: a.line for a in found if a.rule == "relu6 half empty"}
    exec(lines["stem.1"], {"model": model, "torch": torch})
    assert isinstance(model.stem[1], nn.ReLU)
    assert lines["block"].startswith("torch.relu(")
    assert "nn.functional.relu6(self.conv(x))" in lines["block"]


def test_advise_when_calibration_filled_relu6_then_its_line_is_other_data():
    torch.manual_seed(0)
    model, batches = Relu6s().eval(), [torch.randn(2, 3, 8, 8) for _ in range(2)]
    program, gm = quantized(model, [10 * batch for batch in batches])
    found = pq.advise(gm, pq.compare(program, gm, batches, progress=False))
    lines = {a.module: a.line for a in found if a.rule == "relu6 half empty"}
    assert lines["stem.1"].startswith("pq.calibrate(prepared, batches)")


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_advise_when_a_bias_overflows_then_its_line_leaves_the_operator_float(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[0].weight *= 1e-7
        model[0].bias.fill_(3.0)
    batches = [1e-3 * torch.randn(8, 16) for _ in range(2)]
    program = torch.export.export(model, (batches[0],))

    def advised(line):
        quantizer = pq.backends.get(backend).quantizer("int8")
        exec(line, {"quantizer": quantizer})
        prepared = pq.prepare(program, quantizer, effort="fast")
        gm = pq.convert(pq.calibrate(prepared, batches, progress=False))
        table = pq.compare(program, gm, batches, progress=False)
        return {a.rule: a for a in pq.advise(gm, table)}, table.sqnr_db

    before, _ = advised("")
    assert before["bias overflow"].node == "linear"
    after, decibels = advised(before["bias overflow"].line)
    assert "bias overflow" not in after
    assert decibels > 20
