"""The sums behind the three ways to weigh groups."""

import pytest
import torch

from pt2e_quant.analysis.float_twin import FloatTwin
from pt2e_quant.analysis.graph_side import GraphSide
from pt2e_quant.analysis.group_costs import (
    Call,
    ExactCosts,
    GradientCosts,
    OutputNoise,
    weight_costs,
)
from pt2e_quant.analysis.open_side import open_graph
from pt2e_quant.analysis.sensitivity import _float_weights
from pt2e_quant.core.errors import ConfigError


@pytest.fixture
def twin(made):
    side = GraphSide(made[3], "")
    return FloatTwin(side, _float_weights(open_graph(made[1], None), side))


def test_output_noise_when_batches_are_added_then_noise_over_signal_of_all():
    noise = OutputNoise()
    noise.add([torch.full((2,), 1.1), 3], [torch.ones(2), 3])
    noise.add([torch.ones(2)], [torch.ones(2)])
    assert noise.value() == pytest.approx(0.02 / 4, rel=1e-4)


def test_exact_costs_when_restored_then_they_go_on_as_if_never_stopped(made, twin):
    calls = [Call(leaves=[batch], targets=None) for batch in made[4]]
    with torch.no_grad():
        whole, first = (ExactCosts(twin, lambda leaves: leaves[0], None) for _ in range(2))
        for call in calls:
            whole.add(call, progress="")
        first.add(calls[0], progress="")
        second = ExactCosts(twin, lambda leaves: leaves[0], None)
        second.restore(first.state())
        second.add(calls[1], progress="")
    assert second.state() == whole.state()


def test_gradient_costs_when_the_loss_has_no_gradient_then_the_error_names_another_way(made, twin):
    costs = GradientCosts(twin, lambda leaves: leaves[0], lambda outputs, targets: torch.ones(()))
    with pytest.raises(ConfigError, match='method="exact"'):
        costs.add(Call(leaves=[made[4][0]], targets=None))


def test_weight_costs_when_a_group_has_no_weight_then_zero(twin):
    found = weight_costs(twin)
    assert found["add_"] == 0.0
    assert 0 < found["linear"] < 1e-3
