"""What passes take out of integers is known before algorithms correct the errors of rounding."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.target.in_float import put_in_float
from pt2e_quant.backends.target.leave_slower import is_marked_slower
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.flow.convert.draft import draft_of, place_in_float
from pt2e_quant.flow.prepare.prepared import observers_of, prepared_state
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult

pytestmark = pytest.mark.usefixtures("unmeasured")

ISLAND = {"conv2d": "planted", "conv2d_1": "planted", "conv2d_2": ""}


def _edit(gm):
    return PassResult(put_in_float(gm, ISLAND), (Note("conv2d", "planted"),))


planted = GraphPass("planted", _edit, needs=(HAS_VALUES,), gives=())


class Clipped(nn.Module):
    """A channel of huge weights behind which everything is clipped: it is 0 or 6 nearly always."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1)])
        self.head = nn.Conv2d(8, 4, 3)
        with torch.no_grad():
            self.convs[1].weight[3] *= 300

    def forward(self, x):
        x = self.convs[0](x)
        x = nn.functional.relu6(self.convs[1](x))
        return self.head(nn.functional.relu6(self.convs[2](x)))


def draw(seed):
    return torch.randn(4, 8, 12, 12, generator=torch.Generator().manual_seed(seed))


def prepared(**how):
    quantizer = pq.backends.get("onnx").quantizer("int8")
    quantizer.placing, quantizer.finishing = how.pop("placing", ()), how.pop("finishing", ())
    program = torch.export.export(Clipped().eval(), (draw(0),))
    gm = pq.prepare(program, quantizer, **how)
    return pq.calibrate(gm, [(draw(seed),) for seed in range(8)], progress=False)


def count(gm, is_wanted):
    return sum(is_wanted(node) for node in gm.graph.nodes)


def test_draft_when_made_then_activations_are_quantized_and_the_graph_is_as_it_was():
    gm = prepared()
    before = [(node.name, node.args) for node in gm.graph.nodes]
    found = draft_of(gm)
    assert count(found, is_quantize) == 5  # the input, three results that are read, and the last
    assert count(found, is_dequantize) == 5
    assert not list(observers_of(found))
    assert [(node.name, node.args) for node in gm.graph.nodes] == before
    assert provenance_of(found) is not provenance_of(gm)
    assert found(draw(0)).shape == gm(draw(0)).shape


def test_draft_when_scales_are_of_run_time_then_there_is_none():
    quantizer = pq.backends.get("onnx").quantizer("int8_dynamic")
    quantizer.placing = (planted,)
    program = torch.export.export(nn.Linear(8, 8).eval(), (torch.randn(2, 8),))
    gm = pq.prepare(program, quantizer)
    assert list(observers_of(gm))
    assert draft_of(gm) is None
    assert place_in_float(gm) == ()


def test_graph_when_nothing_places_operators_then_it_stays():
    gm = prepared()
    observers = len(list(observers_of(gm)))
    assert place_in_float(gm) == ()
    assert len(list(observers_of(gm))) == observers


def test_graph_when_operators_are_placed_then_observers_between_them_are_gone():
    gm = prepared(placing=(planted,))
    with torch.no_grad():
        expected = gm(draw(0))
    names = {node.name for node, _ in observers_of(gm)}
    (record,) = place_in_float(gm)
    assert record.changed
    gone = names - {node.name for node, _ in observers_of(gm)}
    assert len(gone) == 3  # what is read, and two results between operators in float
    assert all(not hasattr(gm, name) for name in gone)
    marked = {node.name for node in gm.graph.nodes if is_marked_slower(node)}
    assert marked == {"conv2d", "conv2d_1"}
    gm.recompile()
    with torch.no_grad():
        torch.testing.assert_close(gm(draw(0)), expected)


def test_model_when_placed_before_algorithms_then_no_error_is_corrected_that_is_not_made():
    """A quantize in front of huge weights: its errors behind the clip are those of a few values."""

    def db(**how):
        gm = pq.convert(prepared(**how), progress=False)
        with torch.no_grad():
            return pq.sqnr_db(Clipped()(draw(99)), gm(draw(99)))

    before, after = db(placing=(planted,)), db(finishing=(planted,))
    assert before > after + 3


def test_state_when_converted_then_the_placed_are_told_once():
    gm = prepared(placing=(planted,))
    assert prepared_state(gm).placing == (planted,)
    gm = pq.convert(gm, progress=False)
    assert sum("planted" in note for note in provenance_of(gm).notes) >= 1
    names = {record.name for record in provenance_of(gm).tensors}
    assert not names & {"conv2d", "relu6"}
