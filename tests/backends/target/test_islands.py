"""What is faster in float as a whole: the cut is the cheapest, and the graph without roundings."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pt2e_quant as pq
from benchmarks.measure import sqnr_db
from benchmarks.operator_cases import CASES
from pt2e_quant.backends.target import islands
from pt2e_quant.backends.target.in_float import in_float
from pt2e_quant.backends.target.islands import _cut, _total, slower_islands
from pt2e_quant.backends.target.speed_classes import Work, work_of
from pt2e_quant.backends.target.times import Timed, predict, times_here
from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import is_quantize

pytest.importorskip("onnxruntime")

ONNX = pq.backends.get("onnx")
NAMES = "abcdef"
LAYOUTS = ("rows", "blocks")


class Gated(nn.Module):
    """Convolutions with a function between them that has no integer form."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.second(nn.functional.silu(self.first(x)))


class TwoPaths(nn.Module):
    """A result that an operator without an integer form and a convolution read."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x):
        x = self.first(x).relu()
        return self.second(nn.functional.silu(x)) + self.third(x)


def convert(module, x, *allowed):
    program = torch.export.export(module.eval(), (x,))
    quantizer = ONNX.quantizer("int8").allowing(*allowed)
    prepared = pq.prepare(program, quantizer, effort="fast")
    return pq.convert(pq.calibrate(prepared, [(x,)], progress=False), progress=False)


@pytest.fixture(scope="module")
def gated():
    torch.manual_seed(0)
    model = Gated()
    x = torch.randn(1, 4, 24, 24)
    return convert(model, x, "slower"), x


def plant(monkeypatch, integer, floating):
    """Times of convolutions, in ns a multiplication, and of conversions, in ns an element."""
    conv = Work("conv", (4, 8, 9, 400), 1000)
    convert = Work("convert", (2000,), 1000)
    table = {
        "conv": [Timed(conv, {"integer": integer, "float": floating})],
        "convert": [Timed(convert, {"quantize": 1.0, "dequantize": 1.0})],
    }
    monkeypatch.setattr(islands, "times_here", lambda _: table)


def test_slower_islands_when_integers_win_by_more_than_conversions_cost_then_none(
    monkeypatch, gated
):
    plant(monkeypatch, integer=0.1, floating=1.0)
    assert slower_islands(gated[0], "onnx") == {}


def test_slower_islands_when_conversions_cost_more_than_integers_win_then_all_of_it(
    monkeypatch, gated
):
    plant(monkeypatch, integer=0.1, floating=0.1)
    found = slower_islands(gated[0], "onnx")
    assert {name for name, reason in found.items() if reason} == {"conv2d", "conv2d_1"}
    assert found["silu"] == ""
    assert "2 operators and the conversions around them take about" in found["conv2d"]


def test_slower_islands_when_no_cpu_like_this_was_timed_then_none(monkeypatch, gated):
    monkeypatch.setattr(islands, "times_here", lambda _: {})
    assert slower_islands(gated[0], "onnx") == {}


def test_in_float_when_an_island_is_left_then_no_rounding_is_inside_and_the_graph_is_canonical(
    gated,
):
    gm, x = gated
    made = in_float(gm, {"conv2d": "slower", "silu": "", "conv2d_1": "slower"})
    verify_canonical(made)
    (before, after) = (sum(is_quantize(n) for n in g.graph.nodes) for g in (gm, made))
    assert (before, after) == (4, 1), "all but the result's are inside"
    names = {record.name for record in provenance_of(made).tensors}
    assert not names & {"x", "conv2d", "silu"}
    assert names >= {"conv2d_1", "first.weight", "second.weight"}
    torch.manual_seed(0)
    with torch.no_grad():
        expected = Gated().eval()(x)
    assert sqnr_db([expected], [made(x)]) > sqnr_db([expected], [gm(x)])


def test_in_float_when_another_operator_reads_a_value_then_it_stays_rounded():
    torch.manual_seed(0)
    gm = convert(TwoPaths(), torch.randn(1, 4, 12, 12), "slower")
    made = in_float(gm, {"conv2d": "slower", "silu": "", "conv2d_1": "slower"})
    verify_canonical(made)
    read = next(n for n in made.graph.nodes if n.name == "conv2d_2").args[0]
    assert "dequantize" in read.name


def test_convert_when_an_island_is_slower_then_the_report_says_so_and_allowing_overrules(
    monkeypatch,
):
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(1, 4, 24, 24)
    plant(monkeypatch, integer=1.0, floating=0.1)
    gm = convert(model, x)
    assert sum(is_quantize(n) for n in gm.graph.nodes) == 1
    artifact = ONNX.lower(gm)
    regions = {region.node: region for region in artifact.report.float_regions}
    assert "in float" in regions["conv2d"].reason
    assert "allow_slower" in regions["conv2d"].reason
    assert "QLinearConv" not in artifact.report.integer_ops
    torch.testing.assert_close(artifact.run(x), gm(x), rtol=0, atol=1e-5)
    allowed = convert(model, x, "slower")
    assert sum(is_quantize(n) for n in allowed.graph.nodes) == 4
    assert ONNX.lower(allowed).report.integer_ops["QLinearConv"] == 2


def test_convert_when_prepared_for_integers_alone_then_nothing_is_left(monkeypatch):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        torch.randn(1, 4, 24, 24),
    )
    plant(monkeypatch, integer=1.0, floating=0.1)
    program = torch.export.export(model.eval(), (x,))
    prepared = pq.prepare(program, ONNX.quantizer("int8"), effort="fast", int_only=True)
    gm = pq.convert(pq.calibrate(prepared, [(x,)], progress=False), progress=False)
    assert sum(is_quantize(n) for n in gm.graph.nodes) == 3


def test_convert_when_weights_are_quantized_at_run_time_then_they_are_no_computed_values(
    monkeypatch,
):
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(1, 4, 24, 24)
    plant(monkeypatch, integer=1.0, floating=0.1)
    program = torch.export.export(model.eval(), (x,))
    prepared = pq.prepare(program, ONNX.quantizer("int8"), effort="fast")
    pq.calibrate(prepared, [(x,)], progress=False)
    gm = pq.convert_pt2e(prepared, fold_quantize=False)
    real = next(n for n in gm.graph.nodes if n.name == "conv2d_1").args[0]
    assert real.name == "silu"


COSTS = st.sampled_from([0.0, 1.0, 2.0, 5.0, 9.0, 30.0])


@st.composite
def graphs(draw):
    """Costs of a random graph of up to six operators; some are in one form in any case."""
    count = draw(st.integers(1, 6))
    costs = islands._Costs({}, {}, {}, {}, {}, {})
    for at, name in enumerate(NAMES[:count]):
        kind = draw(st.sampled_from(["either", "either", "either", "float", "integer"]))
        costs.integer[name] = math.inf if kind == "float" else draw(COSTS)
        costs.floating[name] = math.inf if kind == "integer" else draw(COSTS)
        for source in ("input", *NAMES[:at]):
            if draw(st.booleans()):
                costs.quantize[source] = costs.quantize.get(source, draw(COSTS))
                costs.dequantize[source, name] = draw(COSTS)
                costs.enter[source, name] = draw(COSTS)
    for layout in LAYOUTS[: draw(st.integers(0, 2))]:
        costs.integer[layout] = costs.floating[layout] = 0.0
        for name in ("input", *NAMES[:count]):
            if draw(st.booleans()):
                costs.layout[name, layout] = draw(COSTS)
    return costs


def total(costs, floats):
    """All costs with these operators in float, written from the definition."""
    kept = set(costs.integer) - floats
    found = sum(costs.integer[n] for n in kept) + sum(costs.floating[n] for n in floats)
    for source, cost in costs.quantize.items():
        readers = {reader for one, reader in costs.dequantize if one == source}
        found += cost if source not in kept and readers & kept else 0
    found += sum(cost for (s, r), cost in costs.enter.items() if s not in kept and r in kept)
    found += sum(cost for (a, b), cost in costs.layout.items() if (a in kept) != (b in kept))
    return found + sum(
        cost for (s, r), cost in costs.dequantize.items() if s in kept and r not in kept
    )


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_cut_when_costs_are_drawn_then_no_other_choice_is_cheaper(costs):
    found = total(costs, _cut(costs))
    names = list(costs.integer)
    choices = (
        set(itertools.compress(names, bits))
        for bits in itertools.product((0, 1), repeat=len(names))
    )
    assert math.isclose(found, min(total(costs, one) for one in choices))


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_total_when_an_island_is_all_operators_then_it_counts_what_the_definition_does(costs):
    everything = set(costs.integer)
    either = {n for n in everything if math.inf not in (costs.integer[n], costs.floating[n])}
    only_float = {n for n in everything if math.isinf(costs.integer[n])}
    for floats in (only_float, only_float | either):
        if math.isfinite(total(costs, floats)):
            assert math.isclose(_total(costs, everything, floats), total(costs, floats))


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_times_here_when_read_then_every_kind_has_positive_times_of_its_sizes(backend):
    found = times_here(backend)
    for kind, rows in found.items():
        assert len({len(one.work.sizes) for one in rows}) == 1, kind
        assert all(us > 0 for one in rows for us in one.us.values())
        forms = {"integer", "float"} if kind != "convert" else {"quantize", "dequantize"}
        assert all(forms & set(one.us) for one in rows)
    assert bool(found) <= (backend == "onnx")


def test_predict_when_sizes_lie_between_rows_then_the_nearest_is_scaled():
    small, large = Work("linear", (1, 64, 64), 4096), Work("linear", (1, 512, 512), 2**18)
    rows = {"linear": [Timed(small, {"integer": 1.0}), Timed(large, {"integer": 32.0})]}
    assert predict(rows, Work("linear", (1, 128, 64), 8192)) == {"integer": 2000.0}
    assert predict(rows, Work("linear", (2, 512, 512), 2**19)) == {"integer": 64000.0}
    assert predict(rows, Work("conv", (1, 1, 1, 1), 1)) == {}


def test_work_of_when_an_operator_is_timed_then_its_case_has_the_same_kind_and_sizes():
    module = nn.Conv2d(24, 144, 3, padding=1)
    program = torch.export.export(module.eval(), (torch.randn(1, 24, 14, 14),))
    node = next(n for n in program.graph.nodes if n.op == "call_function")
    found = work_of(node)
    case = next(c for c in CASES if c.kind == "conv" and c.sizes == found.sizes)
    assert (case.kind, case.amount) == (found.kind, found.amount)


def test_work_when_the_number_of_elements_is_not_known_then_it_takes_no_time():
    rows = {"max_pool2d": [Timed(Work("max_pool2d", (64,), 64), {"integer": 1.0})]}
    assert predict(rows, islands._of_elements("max_pool2d", 0)) == {"integer": 0.0}
