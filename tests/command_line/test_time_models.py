import torch
from torch import nn
from torch.export import export

from pt2e_quant.command_line.time_models import noise_leaves, time_in_turn
from pt2e_quant.core.read_capture import rebuild_capture


def test_time_in_turn_when_two_models_then_each_is_first_as_often(monkeypatch):
    called = []
    clock = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    runs = {name: lambda _, name=name: called.append(name) for name in "ab"}
    timings = time_in_turn(runs, [], rounds=4, sizes={"a": 1, "b": 2})
    assert "".join(called[-8:]) == "abbaabba"
    assert len(called) == 2 * (4 + 3)  # three warm up
    assert timings["a"].median_us == timings["a"].min_us == 1e6
    assert timings["b"].size_bytes == 2


def test_noise_when_drawn_twice_then_the_same_in_the_captured_types():
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 4)

        def forward(self, ids, x):
            return self.table(ids) + x

    ep = export(Embed(), (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4)))
    capture = rebuild_capture(ep.module())
    ids, x = noise_leaves(capture)
    assert ids.tolist() == [1, 1]
    assert torch.equal(x, noise_leaves(capture)[1])
    assert float(x.std()) > 0.3
