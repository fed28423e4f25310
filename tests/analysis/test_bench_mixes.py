import math

import pytest
import torch

import pt2e_quant as pq
from pt2e_quant.analysis.bench_mixes import Bench, Goal, mean_cosine
from pt2e_quant.analysis.metric import Picker
from pt2e_quant.backends.target.recipe_file import RecipeFile


def test_bench_when_a_loader_shuffles_then_results_are_held_against_their_own_batch():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(6, 4))
    program = torch.export.export(torch.nn.Linear(4, 3), (torch.randn(1, 4),))
    loader = torch.utils.data.DataLoader(data, batch_size=1, shuffle=True)
    onnx = pq.backends.get("onnx")
    bench = Bench(program, onnx, loader, loader, Picker(), None, False)
    assert bench.measure(bench.build(RecipeFile(backend="onnx", recipe="int8"))) > 0.99


def test_mean_cosine_when_samples_differ_then_the_mean_over_them():
    a = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    b = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    assert mean_cosine([a, torch.tensor(3)], [b, torch.tensor(4)]) == pytest.approx(0.5)
    assert math.isnan(mean_cosine([torch.tensor(3)], [torch.tensor(4)]))


def test_goal_when_low_is_better_then_a_rise_counts():
    goal = Goal.of(None, 0.1, None, higher_is_better=False)
    assert goal.is_met(1.05, 1.0)
    assert not goal.is_met(1.2, 1.0)
