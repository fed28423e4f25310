"""Products that are slower in integers on this machine stay float, alone or as a region."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from pt2e_quant.backends import get
from pt2e_quant.backends.cpu import policy
from pt2e_quant.core.errors import Pt2eQuantWarning
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.kernels.product_trial.product import Operator, PostOpKind, Product
from pt2e_quant.kernels.product_trial.run_here import run_here
from pt2e_quant.kernels.product_trial.run_in_child import TIME_COMMAND
from pt2e_quant.kernels.product_trial.time_product import Times, read_times, time_product

pytestmark = pytest.mark.usefixtures("unmeasured")

CPU = get("cpu")
FAST, SLOW = (10.0, 50.0), (50.0, 10.0)
"""Microseconds in integers and in float."""


@pytest.fixture
def timed(monkeypatch):
    """Times by output features or channels; a quantize takes what `quantize_us` says."""
    times = {"quantize_us": 5.0}

    def times_of(products):
        return {
            p: Times(
                integer_us=times[p.weight[0]][0],
                float_us=times[p.weight[0]][1],
                quantize_us=times["quantize_us"],
            )
            for p in products
            if p.weight[0] in times
        }

    monkeypatch.setattr(policy, "times_of", times_of)
    monkeypatch.setattr(policy, "are_tried", lambda: True)
    return times


def chain(*widths):
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def integers(quantize_with, make_noise, model, *shape, backend=CPU):
    """How many products run in integers."""
    gm = quantize_with(model, (make_noise(*shape),), backend.quantizer())
    found = backend.lower(gm).report.integer_ops
    return sum(count for name, count in found.items() if name.startswith("onednn"))


def test_products_when_not_timed_then_all_integers(quantize_with, make_noise, timed):
    assert integers(quantize_with, make_noise, chain(8, 16, 24), 4, 8) == 2


def test_product_when_slower_then_float_with_both_times(quantize_with, make_noise, timed):
    timed |= {16: FAST, 24: SLOW}
    gm = quantize_with(chain(8, 16, 24), (make_noise(4, 8),), CPU.quantizer())
    assert CPU.lower(gm).report.integer_ops["onednn.qlinear_pointwise"] == 1
    notes = [n for n in provenance_of(gm).notes if "on this machine" in n]
    assert "1 of 2 products in integers: all take 25 us" in notes[1]
    assert "60 us in float, in eager calls" in notes[1]
    assert "50 us in integers and 5 us to quantize what it reads, 10 us in float" in notes[0]


def test_products_when_all_slower_then_float_with_a_warning(quantize_with, make_noise, timed):
    timed |= {16: SLOW, 24: SLOW}
    with pytest.warns(Pt2eQuantWarning, match="measured no slower than float"):
        assert not integers(quantize_with, make_noise, chain(8, 16, 24), 4, 8)


def test_products_when_slower_is_allowed_then_integers(quantize_with, make_noise, timed):
    timed |= {16: SLOW, 24: SLOW}
    allowing = CPU.allowing_slower()
    assert integers(quantize_with, make_noise, chain(8, 16, 24), 4, 8, backend=allowing) == 2


@pytest.mark.parametrize(("quantize_us", "count"), [(5.0, 3), (60.0, 2)])
def test_product_when_faster_but_for_the_quantize_then_the_quantize_counts(
    quantize_with, make_noise, timed, quantize_us, count
):
    """The layer behind a float function pays for its own quantize; one in a chain does not."""
    timed |= {16: (10.0, 200.0), 24: (10.0, 200.0), 32: (10.0, 50.0)}
    timed["quantize_us"] = quantize_us
    model = chain(8, 16, 24).append(nn.Sigmoid()).append(nn.Linear(24, 32))
    assert integers(quantize_with, make_noise, model, 4, 8) == count


def test_slow_product_when_between_fast_ones_then_integers_where_leaving_costs_more(
    quantize_with, make_noise, timed
):
    timed |= {16: FAST, 24: (30.0, 10.0), 32: FAST}
    timed["quantize_us"] = 30.0  # float in the middle would need one more of them
    assert integers(quantize_with, make_noise, chain(8, 16, 24, 32), 4, 8) == 3
    timed["quantize_us"] = 1.0
    assert integers(quantize_with, make_noise, chain(8, 16, 24, 32), 4, 8) == 2


def test_region_when_it_does_not_win_with_its_border_then_float_as_a_whole(
    quantize_with, make_noise, timed
):
    """Each layer alone would cost a quantize more; both together lose against float."""
    timed |= {16: (10.0, 12.0), 24: (10.0, 12.0), 32: (10.0, 500.0)}
    timed["quantize_us"] = 20.0
    model = chain(8, 16, 24).append(nn.Sigmoid()).append(nn.Linear(24, 32))
    assert integers(quantize_with, make_noise, model, 4, 8) == 1


def test_values_when_read_by_several_products_then_quantized_once(quantize_with, make_noise, timed):
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(8, 16) for _ in range(4))

        def forward(self, x):
            return [torch.sigmoid(head(x)) for head in self.heads]

    timed |= {16: (10.0, 20.0)}
    timed["quantize_us"] = 25.0  # more than one head gains, less than four
    assert integers(quantize_with, make_noise, Heads(), 4, 8) == 4


def test_times_when_measured_here_then_positive_and_read_back():
    linear = Product(operator=Operator.LINEAR, x=(4, 8), weight=(16, 8), has_bias=True)
    conv = Product(
        operator=Operator.CONV,
        x=(1, 4, 9, 9),
        weight=(6, 4, 3, 3),
        stride=(1, 1),
        padding=(1, 1),
        dilation=(1, 1),
        post_op=PostOpKind(name="relu"),
    )
    found = run_here([linear, conv], command=TIME_COMMAND)
    for text in found.values():
        times = read_times(text)
        assert times is not None
        assert min(times.integer_us, times.float_us, times.quantize_us) > 0
    assert read_times("oneDNN takes more than 20 s here") is None
    before = torch.get_num_threads()
    time_product(linear)
    assert torch.get_num_threads() == before
