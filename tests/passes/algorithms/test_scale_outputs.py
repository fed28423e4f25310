from textwrap import dedent

import pytest
import torch
from torch import nn

from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.graph.show import show
from pt2e_quant.passes.algorithms.scale_outputs import ScaleOutputs

SCALE = ScaleOutputs()


def samples(count: int = 8, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 200, 16, generator=generator) for _ in range(count)]


class Wide(nn.Module):
    """A linear with two output channels 60 times as large as the others; its heads even them."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 32, bias=kind != "no bias")
        self.last = nn.Linear(32, 4)
        self.register_buffer("even", torch.ones(32).index_fill_(0, torch.tensor([3, 20]), 60.0))
        self.kind = kind
        if kind != "even channels":
            with torch.no_grad():
                self.linear.weight.mul_(self.even[:, None])

    def forward(self, x):
        y = self.linear(x)
        if self.kind == "relu":
            y = torch.relu(y)
        if self.kind == "read in integers":
            return self.last(y)
        # Values per head and channel: a layer does not absorb them as it does those per channel.
        evened = y.unflatten(2, (2, 16)) / self.even.view(2, 16)
        return (evened, torch.relu(y)) if self.kind == "two readers" else evened


def test_scale_when_channels_differ_then_divided_before_and_multiplied_after(calibrated, applied):
    model = Wide()
    gm = calibrated(model, samples(), outputs=True, algorithms=[SCALE])
    assert applied(gm, SCALE).changed
    assert show(gm) == dedent(
        """\
        activation_post_process_1: f32[32, 16] = call_module activation_post_process_1(linear.weight)
        x: f32[1, 200, 16] = input
        activation_post_process_0: f32[1, 200, 16] = call_module activation_post_process_0(x)
        linear: f32[1, 200, 32] = linear(activation_post_process_0, activation_post_process_1, bias=linear.bias)
        activation_post_process_2: f32[1, 200, 32] = call_module activation_post_process_2(linear)
        mul: f32[1, 200, 32] = mul(activation_post_process_2, linear.output_scale)
        unflatten: f32[1, 200, 2, 16] = unflatten(mul, 2, [2, 16])
        div: f32[1, 200, 2, 16] = div(unflatten, even)
        return (div)
        """  # noqa: E501
    )
    for x in samples(seed=1):
        torch.testing.assert_close(gm(x), model(x), rtol=1e-5, atol=1e-5)
    assert model.linear.weight.abs().max() > 10  # the user's tensor is as it was


@pytest.mark.parametrize(("kind", "biases"), [("plain", False), ("plain", True), ("no bias", True)])
def test_scaling_when_channels_are_outliers_then_15_db_on_unseen_data(
    calibrated, kind, biases, applied
):
    model = Wide(kind)
    held = samples(16, seed=1)

    def quality(algorithms) -> float:
        gm = calibrated(model, samples(), outputs=True, biases=biases, algorithms=algorithms)
        gm = convert_pt2e(gm)
        with torch.no_grad():
            return sqnr_db([model(x) for x in held], [gm(x) for x in held])

    assert quality((SCALE,)) > quality(()) + 15


def test_scale_outputs_when_run_twice_then_the_second_changes_nothing(calibrated, applied):
    gm = calibrated(Wide(), samples(), outputs=True, algorithms=[SCALE])
    assert applied(gm, SCALE).changed
    text = show(gm)
    result = applied(gm, SCALE)
    assert not result.changed
    assert "scale_outputs was applied before" in {n.text for n in result.notes}
    assert show(gm) == text
    assert [f.op for f in provenance_of(gm).floats].count("aten.mul") == 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("read in integers", "linear_1 reads it in integers"),
        ("even channels", "no channel scale lowers the expected error enough"),
    ],
)
def test_pass_when_it_cannot_or_need_not_then_declines(calibrated, kind, reason, applied):
    gm = calibrated(Wide(kind), samples(), outputs=True, algorithms=[SCALE])
    result = applied(gm, SCALE)
    assert result.notes[0].text == reason
    assert result.notes[0].skipped


def test_pass_when_outputs_stay_float_then_finds_nothing(calibrated, applied):
    result = applied(calibrated(Wide(), samples(), algorithms=[SCALE]), SCALE)
    assert not result.changed
    assert result.notes == ()
