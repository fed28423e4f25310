"""AWQ: weights of large inputs keep their values, and dead columns do not set ranges."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.granularity import PerToken
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.specs import Q_ANNOTATION_KEY, QuantizationAnnotation, QuantizationSpec
from pt2e_quant.graph.ops import LINEAR, argument, is_call
from pt2e_quant.observers.static.minmax import PerChannelMinMaxObserver
from pt2e_quant.passes.algorithms.awq import Awq
from pt2e_quant.pt2e.observers.affine import AffineQuantizedPlaceholderObserver, MappingType

WIDTH = 64
LARGE = torch.tensor([5, 40])


class Net(nn.Module):
    """A norm with a few large channels, and linears whose weights for them are small."""

    def __init__(self, readers: int = 2, *, also: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(WIDTH)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, 48) for _ in range(readers))
        self.also = also
        with torch.no_grad():
            self.norm.weight[LARGE] = 30.0
            for linear in self.linears:
                linear.weight[:, LARGE] /= 30.0

    def forward(self, x):
        y = self.norm(x)
        made = sum(linear(y) for linear in self.linears)
        return made + y.mean() if self.also else made


def samples(count: int = 8, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 32, WIDTH, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("recipe", ["w3", "w4", "w3_g32", "a8w4_g32"])
def test_awq_when_few_channels_are_large_then_4_db_less_error(recipe, quantized, output_error):
    model, held = Net(), samples(16, seed=1)
    plain = output_error(model, quantized(model, samples(), recipe), held)
    gm = quantized(model, samples(), recipe, Awq(clip=False))
    assert output_error(model, gm, held) < plain / 2.5
    assert "awq" in provenance_of(gm).passes
    # both linears are scaled by one factor, which the norm takes
    assert sum(str(node.target) == "aten.mul.Tensor" for node in gm.graph.nodes) == 0
    record = next(r for r in provenance_of(gm).tensors if r.steps)
    assert record.steps[0].startswith("awq: / rms **")


def test_awq_when_the_norm_has_other_readers_then_a_multiplication(quantized, output_error):
    model, held = Net(also=True), samples(16, seed=1)
    plain = output_error(model, quantized(model, samples(), "w3"), held)
    gm = quantized(model, samples(), "w3", Awq())
    assert output_error(model, gm, held) < plain / 2
    assert sum(str(node.target) == "aten.mul.Tensor" for node in gm.graph.nodes) == 1


def test_clip_when_a_weight_of_a_dead_input_is_large_then_it_does_not_set_the_range(
    quantized, output_error
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 48))
    with torch.no_grad():
        model[0].weight[:, 7] = 2.0  # the others are below 0.125
    data, held = samples(), samples(16, seed=1)
    for x in (*data, *held):
        x[..., 7] = 1e-4
    plain = output_error(model, quantized(model, data, "w4", search="min_max"), held)
    settings = Awq(grid_size=40, max_shrink=0.95, least_gain=1e9)
    gm = quantized(model, data, "w4", settings, search="min_max")
    assert output_error(model, gm, held) < plain / 30


def test_awq_when_channels_are_alike_then_declined(quantized):
    model = Net(readers=1)
    with torch.no_grad():
        model.norm.weight.fill_(1.0)
    same = [torch.eye(WIDTH)[None] for _ in range(2)]
    gm = quantized(model, same, "w4", Awq(clip=False))
    assert any("no scale of its channels" in note for note in provenance_of(gm).notes)


def test_users_weights_when_quantized_then_as_they_were(quantized):
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quantized(model, samples(), "w4", "awq")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class FourBits:
    """Asks for activations of 4 bits per token, at run time, and weights of 4 bits."""

    def transform_for_annotation(self, gm):
        return gm

    def annotate(self, gm):
        limits = {"dtype": torch.int8, "quant_min": -8, "quant_max": 7}
        weight = QuantizationSpec(
            observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
            **limits,
        )
        tokens = QuantizationSpec(
            observer_or_fake_quant_ctr=lambda **_: AffineQuantizedPlaceholderObserver(
                MappingType.SYMMETRIC, torch.int8, PerToken(), -8, 7, is_dynamic=True
            ),
            is_dynamic=True,
            **limits,
        )
        for node in gm.graph.nodes:
            if is_call(node, LINEAR):
                specs = {argument(node, "input"): tokens, argument(node, "weight"): weight}
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(input_qspec_map=specs)
        return gm

    def validate(self, gm):
        pass


def test_awq_when_inputs_have_4_bits_then_it_takes_no_part():
    program = torch.export.export(Net().eval(), (samples()[0],))
    with pytest.raises(ConfigError, match="awq applies to nothing that is quantized here"):
        pq.prepare_pt2e(program, FourBits(), algorithms=["awq"])
