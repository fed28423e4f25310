import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends import get


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def converted():
    torch.manual_seed(0)
    x = torch.rand(16, 8)
    program = torch.export.export(Net().eval(), (x,))
    prepared = pq.prepare(program, get("onnx").quantizer("int8"))
    return pq.convert(pq.calibrate(prepared, [x], progress=False))


def test_tensor_values_when_seen_as_calibrated_then_nothing_is_clipped(converted):
    torch.manual_seed(0)
    found = {v.name: v for v in pq.tensor_values(converted, [torch.rand(16, 8)]).values}
    x = found["x"]
    assert x.total == sum(x.counts) == 128
    assert x.share_clipped == 0.0
    assert x.share_used > 0.7
    assert x.chosen[0] == 0.0
    assert x.chosen[1] == pytest.approx(1.0, abs=0.3)
    assert found["relu"].module == ""


def test_tensor_values_when_data_leaves_the_range_then_counts_what_is_clipped(converted):
    batches = [torch.rand(16, 8), 4 * torch.ones(16, 8)]
    table = pq.tensor_values(converted, batches)
    x = table.values[0]
    assert x.share_clipped == 0.5
    assert x.seen[1] == 4.0
    assert sum(x.counts) == x.total == 256
    row = next(row for row in table.table().rows if row[0] == "x")
    assert row[2] == 50.0
    assert {"x", "relu", "first.weight", "last.weight"} <= {row[0] for row in table.table().rows}


def test_sections_when_the_input_loses_least_then_the_worst_histogram_is_first(converted):
    table = pq.tensor_values(converted, [torch.rand(16, 8)])
    losses = {loss.name: loss.sqnr_db for loss in table.losses}
    (section,) = table.sections()
    assert {*section.figures} == {value.name for value in table.values}
    shown = [losses[name] for name in section.figures]
    assert shown == sorted(shown)
    assert [*section.figures] != [value.name for value in table.values]


def test_tensor_values_when_the_figure_is_drawn_then_shows_the_range(converted):
    value = pq.tensor_values(converted, [{"x": torch.rand(16, 8)}]).values[0]
    made = value.figure()
    assert len(made.data[0].x) == len(made.data[0].y) == 80
    (box, *lines) = made.layout.shapes
    assert (box.x0, box.x1) == value.chosen
    assert [line.x0 for line in lines] == list(value.chosen)


def test_tensor_values_when_scales_are_chosen_at_run_time_then_without_a_range():
    program = torch.export.export(Net().eval(), (torch.rand(4, 8),))
    prepared = pq.prepare(program, get("onnx").quantizer("int8_dynamic"))
    (first, *_) = pq.tensor_values(pq.convert(prepared), [torch.rand(4, 8)]).values
    assert first.chosen is None
    assert first.share_used is None
    assert first.total == 32
