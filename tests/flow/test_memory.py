"""How much memory prepare and convert take, counted at the allocator."""

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function
from torch.export import export

from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e

COUNT, WIDTH = 20, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


def convs() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(COUNT)])


def linears() -> nn.Module:
    return nn.Sequential(*[nn.Linear(4 * WIDTH, 4 * WIDTH, bias=False) for _ in range(COUNT)])


class Ledger:
    """Bytes in use over time, in one profile of the whole life of a model."""

    def __init__(self, recorded) -> None:
        events = list(recorded.kineto_results.events())
        self.steps = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        self.spans = {
            e.name(): (e.start_ns(), e.start_ns() + e.duration_ns())
            for e in events
            if e.name() in ("prepare", "convert")
        }

    def during(self, name: str) -> tuple[int, int]:
        """(peak, end) of a phase, over what was in use when it began."""
        start, end = self.spans[name]
        used = sum(change for at, change in self.steps if at < start)
        levels = [used]
        for at, change in self.steps:
            if start <= at <= end:
                levels.append(levels[-1] + change)
        return max(levels) - used, levels[-1] - used


def bytes_of(gm, *, floats: bool) -> int:
    tensors = [t for t in gm.state_dict().values() if t.is_floating_point() is floats]
    return sum(t.numel() * t.element_size() for t in tensors)


def quantized(make, x, quantizer, *, is_held: bool):
    """A model's ledger, its weights' bytes in float, and those of the integers."""
    with profile(profile_memory=True, use_cpu=True) as recorded:
        model = make().eval()
        gm = export(model, (x,)).module()
        floats = bytes_of(gm, floats=True)
        held = model if is_held else None
        del model
        gc.collect()
        gc.disable()  # what only the collector would free counts as in use
        try:
            with record_function("prepare"):
                prepare_pt2e(gm, quantizer)
            with torch.no_grad():
                gm(x)
            with record_function("convert"):
                convert_pt2e(gm)
        finally:
            gc.enable()
    assert held is None or sum(p.numel() for p in held.parameters()) * 4 >= floats // 2
    return Ledger(recorded), floats, bytes_of(gm, floats=False)


@pytest.mark.parametrize(
    ("make", "x"), [(convs, torch.ones(1, WIDTH, 4, 4)), (linears, torch.ones(2, 4 * WIDTH))]
)
def test_memory_when_the_model_is_not_held_then_float_weights_go_one_by_one(make, x, quantizer):
    ledger, floats, integers = quantized(make, x, quantizer(), is_held=False)
    weight = floats // COUNT
    # The graph module alone holds the weights: each float copy goes before the next is made.
    assert ledger.during("prepare")[0] <= 1.5 * weight
    peak, end = ledger.during("convert")
    assert peak <= 1.5 * weight
    assert end <= integers - 0.95 * floats


@pytest.mark.parametrize(
    ("make", "x"), [(convs, torch.ones(1, WIDTH, 4, 4)), (linears, torch.ones(2, 4 * WIDTH))]
)
def test_memory_when_the_model_is_held_then_at_most_integers_and_a_tenth(make, x, quantizer):
    ledger, floats, integers = quantized(make, x, quantizer(), is_held=True)
    assert ledger.during("convert")[0] <= integers + 0.1 * floats
