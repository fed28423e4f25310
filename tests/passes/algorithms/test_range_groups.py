"""Which activations have an open range, and what is said of the one that was taken."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.passes.algorithms.range_groups import (
    AS_OBSERVED,
    RangeGroup,
    open_observers,
    qparams_over,
    range_groups,
)


class Net(nn.Module):
    """A convolution whose result is shared with a pool, and pooled features behind it."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        y = torch.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.head(nn.functional.adaptive_avg_pool2d(y, 1).flatten(1))


@pytest.fixture
def prepared():
    data = [torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    program = torch.export.export(Net().eval(), (data[0],))
    quantizer = pq.backends.get("xnnpack").quantizer("int8").remove_algorithm("run_time_scales")
    made = pq.prepare_pt2e(program, quantizer)
    return pq.calibrate(made, data, progress=False)


def test_range_groups_when_pooled_features_or_logits_then_their_ranges_are_closed(prepared):
    found = range_groups(prepared)
    tensors = {n.all_input_nodes[0].name for group in found.values() for n in group.nodes}
    assert tensors == {"x", "relu", "max_pool2d"}
    observed = {node.all_input_nodes[0].name for node, _ in open_observers(prepared)}
    assert {"linear", "adaptive_avg_pool2d"} <= observed


def test_range_groups_when_an_observer_is_shared_then_one_group_with_its_nodes(prepared):
    names = [[n.all_input_nodes[0].name for n in g.nodes] for g in range_groups(prepared).values()]
    assert ["relu", "max_pool2d"] in names


def test_qparams_over_when_the_ends_are_those_seen_then_the_observers_own(prepared):
    observer = next(iter(range_groups(prepared).values())).observer
    ends = observer.min_val.item(), observer.max_val.item()
    scale, zero_point = observer.calculate_qparams()
    found = qparams_over(observer, ends)
    assert torch.equal(found.scale, scale)
    assert torch.equal(found.zero_point, zero_point)


@pytest.mark.parametrize(
    ("errors", "taken", "said"),
    [
        ({AS_OBSERVED: 4.0, "99.9 %": 1.0, "99.99 %": 2.0}, "99.9 %",
         "99.9 %; runner-up 99.99 %: 2.00x the error, as observed: 4.00x"),
        ({AS_OBSERVED: 4.0, "99.9 %": 1.0}, "99.9 %",
         "99.9 %; runner-up as observed: 4.00x the error"),
        ({AS_OBSERVED: 1.0, "99.9 %": 3.0}, AS_OBSERVED,
         "as observed; runner-up 99.9 %: 3.00x the error"),
        ({AS_OBSERVED: 1.0}, AS_OBSERVED, "as observed: no other range differs"),
    ],
)  # fmt: skip
def test_evidence_when_a_range_is_taken_then_it_and_the_runner_up_are_named(errors, taken, said):
    group = RangeGroup(None, [], None, errors=errors)
    assert group.winner() == taken
    assert group.evidence(taken) == said


def test_winner_when_the_gain_is_too_small_then_as_observed():
    group = RangeGroup(None, [], None, errors={AS_OBSERVED: 1.2, "99.9 %": 1.0})
    assert group.winner(1.1) == "99.9 %"
    assert group.winner(1.25) == AS_OBSERVED


def test_stretch_when_the_maxima_differ_then_by_their_deviation():
    group = RangeGroup(None, [], None, maxima={"a": [1.0, 1.0, 1.0], "b": [1.0, 4.0]})
    assert group.stretch("a") == 1.0
    assert group.stretch("b") == pytest.approx(4.0 ** (1.5 / 2**0.5))
