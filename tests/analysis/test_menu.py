from dataclasses import replace

import onnx
import onnx.numpy_helper
import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.analysis.latency import Latency
from pt2e_quant.analysis.menu import (
    Option,
    Uniform,
    clusters_of,
    constants_size,
    share_quantized,
    stored_sizes,
)
from pt2e_quant.backends import get
from pt2e_quant.backends.target.recipe_file import NodeScheme, RecipeFile


class Shared(nn.Module):
    """Two convolutions read one value, a third comes later, and a linear."""

    def __init__(self, size=1):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, size) for _ in range(3))
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.c(self.a(x) + self.b(x)).mean((2, 3)))


def uniform(program, x, name, backend="onnx"):
    prepared = pq.prepare(program, get(backend).quantizer(name))
    gm = pq.convert(pq.calibrate(prepared, [x], progress=False))
    return Uniform(name=name, gm=gm, costs=pq.sensitivity(program, gm, [x], progress=False))


def test_clusters_of_when_two_read_one_value_then_tied_with_what_both_can_have():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6)
    program = torch.export.export(Shared().eval(), (x,))
    base, other = uniform(program, x, "int8"), uniform(program, x, "int8_dynamic")
    found = {cluster.name: cluster for cluster in clusters_of(base, [other])}
    both = found["conv2d"]
    assert [group.module for group in both.groups] == ["a", "b"]
    assert both.nodes == {"conv2d": {"int8"}, "conv2d_1": {"int8"}}
    assert [c.scheme for c in both.candidates] == ["int8", "float"]  # dynamic is for linears
    assert both.candidates[-1].size == 2 * 4 * (16 + 4)
    sizes, names = base.sizes(), ("a.weight", "a.bias", "b.weight", "b.bias")
    assert both.candidates[0].size == sum(sizes[name] for name in names)
    assert [c.precision for c in both.candidates] == [0, 16]
    assert both.candidates[0].noise > both.candidates[-1].noise == 0.0
    assert [c.scheme for c in found["linear"].candidates] == ["int8", "int8_dynamic", "float"]
    assert [rule.node for rule in both.rules("float", "")] == ["conv2d", "conv2d_1"]


class Stream(nn.Module):
    """Two residual adds of one stream, and a pooling of what a convolution makes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.a(x)), 2)
        x = torch.relu(self.b(x) + x)
        return (self.c(x) + x).mean((2, 3))


def test_clusters_of_when_adds_are_of_one_stream_and_data_is_moved_then_tied():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    program = torch.export.export(Stream().eval(), (x,))
    found = [[g.group for g in c.groups] for c in clusters_of(uniform(program, x, "int8"), [])]
    assert ["add", "add_1"] in found
    assert ["conv2d", "max_pool2d"] in found
    assert ["conv2d_1"] in found
    assert ["conv2d_2"] in found


def test_clusters_of_when_a_scheme_takes_only_some_of_what_is_tied_then_the_rest_is_float():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    program = torch.export.export(Stream().eval(), (x,))
    base, other = uniform(program, x, "int8"), uniform(program, x, "w8")
    found = {cluster.name: cluster for cluster in clusters_of(base, [other])}
    moved = found["conv2d"]  # with the pooling of what it makes
    assert [candidate.scheme for candidate in moved.candidates] == ["int8", "w8", "float"]
    rules = {rule.node: rule.scheme for rule in moved.rules("w8", "")}
    assert rules == {"conv2d": "w8", "max_pool2d": "float"}
    assert [candidate.scheme for candidate in found["add"].candidates] == ["int8", "float"]
    tuned = pq.tune(
        program,
        calibration_data=[x],
        backend="onnx",
        menu=["w8"],
        budget={"bytes": other.size},
        points=0,
        verify=False,
        progress=False,
    )
    got = {choice.group: choice.scheme for choice in tuned.choices}
    assert (got["conv2d"], got["max_pool2d"]) == ("w8", "float")


def test_clusters_of_when_only_the_menu_quantizes_a_group_then_it_is_there_float_first():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6)
    program = torch.export.export(Shared(3).eval(), (x,))
    base, other = uniform(program, x, "int8_dynamic"), uniform(program, x, "w8")
    found = {cluster.name: cluster for cluster in clusters_of(base, [other])}
    both = found["conv2d"]
    assert [group.module for group in both.groups] == ["a", "b"]  # tied in a graph without both
    assert [candidate.scheme for candidate in both.candidates] == ["float", "w8"]
    assert [candidate.precision for candidate in both.candidates] == [0, 2]
    assert both.candidates[0].size == 2 * 4 * 16 * 9 > both.candidates[1].size
    schemes = [candidate.scheme for candidate in found["linear"].candidates]
    assert schemes == ["int8_dynamic", "w8", "float"]
    tuned = pq.tune(
        program,
        calibration_data=[x],
        backend="onnx",
        recipe="int8_dynamic",
        menu=["w8"],
        budget={"bytes": other.size},
        points=0,
        verify=False,
        progress=False,
    )
    assert [choice.scheme for choice in tuned.choices if choice.module in "abc"] == ["w8"] * 3
    assert constants_size(tuned.artifact.quantized) <= other.size < base.size
    assert tuned.measured[0].label == "int8_dynamic throughout"


def test_clusters_of_when_times_are_known_then_candidates_have_them():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6)
    program = torch.export.export(Shared().eval(), (x,))
    base = uniform(program, x, "int8")
    names = [group.group for group in base.costs.groups]
    base = replace(base, latency=Latency(call_us=9.0, groups=dict.fromkeys(names, 2.0)))
    found = clusters_of(base, [], Latency(call_us=20.0, groups=dict.fromkeys(names, 5.0)))
    both = next(cluster for cluster in found if cluster.name == "conv2d")
    assert [candidate.time_us for candidate in both.candidates] == [4.0, 10.0]


def test_option_when_it_names_ranges_and_algorithms_then_rules_and_recipes_have_them():
    option = Option.of("int8@mse+gptq")
    base = RecipeFile(backend="onnx", ranges="min_max", without=("smooth_quant",))
    whole = option.throughout(base)
    assert (whole.ranges, whole.algorithms, whole.without) == ("mse", ("gptq",), ("smooth_quant",))
    assert Option.of("w4_g32").throughout(base) == RecipeFile(backend="onnx", recipe="w4_g32")
    assert option.rule("linear", "why") == NodeScheme(
        node="linear", scheme="int8", ranges="mse", algorithms=("gptq",), why="why"
    )


def test_share_quantized_when_one_of_four_is_float_then_three_quarters():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6)
    program = torch.export.export(Shared().eval(), (x,))
    quantizer = get("onnx").quantizer("int8").set_module_name("c", None)
    gm = pq.convert(pq.calibrate(pq.prepare(program, quantizer), [x], progress=False))
    assert share_quantized(gm) == 0.75
    assert constants_size(gm) == sum(stored_sizes(gm).values())


def test_clusters_of_when_an_algorithm_put_an_operator_there_then_no_rule_names_it():
    torch.manual_seed(0)
    model, x = nn.Linear(16, 8).eval(), torch.randn(64, 16)
    with torch.no_grad():
        model.weight[1:] *= 0.02
        model.bias[1:] *= 0.02
    program = torch.export.export(model, (x,))
    quantizer = get("xnnpack").quantizer("int8").remove_algorithm("run_time_scales")
    gm = pq.convert(pq.calibrate(pq.prepare(program, quantizer), [x], progress=False))
    costs = pq.sensitivity(program, gm, [x], progress=False)
    base = Uniform(name="int8", gm=gm, costs=costs)
    assert "mul" in {node.name for node in base.gm.graph.nodes}
    (cluster,) = clusters_of(base, [])
    assert [rule.node for rule in cluster.rules("float", "")] == ["linear"]


@pytest.mark.usefixtures("integers_everywhere")
@pytest.mark.parametrize("recipe", ["int8", "w8", "w4_g32"])
def test_constants_size_when_zero_points_are_zero_then_bytes_of_the_file(recipe, tmp_path):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(4, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64))
    x = torch.randn(2, 4, 6, 6)
    made = uniform(torch.export.export(layers.eval(), (x,)), x, recipe)
    get("onnx").lower(made.gm).save(tmp_path / "model.onnx")
    held = onnx.load(tmp_path / "model.onnx").graph.initializer
    stored = sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in held)
    # The file has scales and zero points of activations besides.
    assert 0 <= stored - made.size < 0.02 * stored
    assert sum(made.sizes().values()) == made.size
