import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.analysis.latency import Stopwatch, owners, shares
from pt2e_quant.backends import get
from pt2e_quant.backends.profile import NodeTime, Profile, WorkKind
from pt2e_quant.backends.target.recipe_file import FLOAT, NodeScheme, RecipeFile
from pt2e_quant.backends.xnnpack.artifact import XnnpackArtifact
from pt2e_quant.core.errors import Pt2eQuantWarning
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.kernels.cost import Cost


@pytest.fixture(scope="module")
def made():
    """(converted, without a quantized tensor, input)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    x = torch.randn(4, 64)
    program = torch.export.export(model, (x,))

    def build(*rules):
        recipe = RecipeFile(backend="xnnpack", recipe="int8", rules=rules)
        prepared = prepare_pt2e(program, recipe.quantizer(get("xnnpack")), strict=False)
        return convert_pt2e(pq.calibrate(prepared, [x], progress=False), progress=False)

    with pytest.warns(Pt2eQuantWarning, match="no tensor"):
        float_gm = build(NodeScheme(node="*", scheme=FLOAT))
    return build(), float_gm, x


def test_owners_when_an_operator_is_in_no_group_then_the_group_before_it_has_its_time(made):
    gm, float_gm, _ = made
    for graph in (gm, float_gm):
        found = owners(graph, ["linear", "linear_1"])
        assert (found["linear"], found["gelu"], found["linear_1"]) == (
            *("linear", "linear", "linear_1"),
        )
    reads = next(n for n in gm.graph.nodes if n.name == "linear_1").args[0]
    assert owners(gm, ["linear", "linear_1"])[reads.name] == "linear_1"


def test_shares_when_the_runtime_made_an_operator_then_it_counts_for_the_next_one():
    def timed(node, time_us):
        cost = Cost(bytes=0, operations=0)
        return NodeTime(
            node=node,
            module="",
            kernel="",
            is_fused=False,
            kind=WorkKind.FLOAT,
            cost=cost,
            time_us=time_us,
        )

    profile = Profile((timed("MatMul_7", 6.0), timed("linear", 2.0), timed("head", 2.0)))
    assert shares(profile, {"linear": "a", "head": "b"}) == {"a": 0.8, "b": 0.2}


def test_stopwatch_when_the_runtime_tells_no_times_then_a_call_is_divided_as_in_torch(made):
    gm, float_gm, x = made
    found = Stopwatch(get("xnnpack"), ((x,), {}), float_gm).measure(gm, ["linear", "linear_1"])
    assert found.call_us > 0
    assert sum(found.groups.values()) == pytest.approx(found.call_us)
    assert found.groups["linear"] > found.groups["linear_1"] > 0


def test_stopwatch_when_no_buffer_is_written_then_calls_are_not_reset(made, monkeypatch):
    gm, float_gm, x = made
    resets = []
    monkeypatch.setattr(XnnpackArtifact, "reset", lambda self: resets.append(self))
    Stopwatch(get("xnnpack"), ((x,), {}), float_gm).measure(gm)
    assert not resets
