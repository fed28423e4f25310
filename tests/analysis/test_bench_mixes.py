import math

import pytest
import torch

from pt2e_quant.analysis.bench_mixes import Goal, mean_cosine


def test_mean_cosine_when_samples_differ_then_the_mean_over_them():
    a = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    b = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    assert mean_cosine([a, torch.tensor(3)], [b, torch.tensor(4)]) == pytest.approx(0.5)
    assert math.isnan(mean_cosine([torch.tensor(3)], [torch.tensor(4)]))


def test_goal_when_low_is_better_then_a_rise_counts():
    goal = Goal.of(None, 0.1, None, higher_is_better=False)
    assert goal.is_met(1.05, 1.0)
    assert not goal.is_met(1.2, 1.0)
