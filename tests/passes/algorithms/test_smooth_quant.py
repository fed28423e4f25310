from textwrap import dedent

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.graph.show import show
from pt2e_quant.observers.static.histogram import HistogramObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.static.mse import MSEObserver
from pt2e_quant.observers.static.rounded_scale import RoundedScaleObserver
from pt2e_quant.passes.algorithms import smooth_quant
from pt2e_quant.passes.algorithms.channel_scales import choose_channel_scale
from pt2e_quant.passes.algorithms.smooth_quant import SmoothQuant

SMOOTH = SmoothQuant()

OUTLIERS = torch.ones(16).index_fill_(0, torch.tensor([3, 11]), 40.0)


def samples(count: int = 8, seed: int = 0) -> list[torch.Tensor]:
    """Sequences whose channels 3 and 11 are 40 times as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 6, 16, generator=generator) * OUTLIERS for _ in range(count)]


class Scaled(nn.Module):
    """A linear behind a multiplication by itself, so that its input is computed."""

    def __init__(self, readers: int = 1, also: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(16, 8) for _ in range(readers))
        self.also = also
        with torch.no_grad():
            for linear in self.linears:
                linear.weight.div_(OUTLIERS)

    def forward(self, x):
        y = torch.tanh(x / 100) * 100
        outputs = [linear(y) for linear in self.linears]
        return (*outputs, y) if self.also else outputs[0] if len(outputs) == 1 else outputs


class Normed(nn.Module):
    """A linear right behind a norm with outlier weights: nothing else reads the norm."""

    def __init__(self, also: bool = False, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = norm(16)
        self.linear = nn.Linear(16, 8)
        self.also = also
        with torch.no_grad():
            self.norm.weight.mul_(OUTLIERS)
            if norm is nn.LayerNorm:
                self.norm.bias.normal_()
            self.linear.weight.div_(OUTLIERS)

    def forward(self, x):
        y = self.norm(x)
        return (self.linear(y), y) if self.also else self.linear(y)


def quality(model, gm, data) -> float:
    with torch.no_grad():
        return sqnr_db([model(x) for x in data], [gm(x) for x in data])


def plain_samples(count: int = 8, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 6, 16, generator=generator) for _ in range(count)]


def test_scale_when_the_input_has_other_readers_then_a_multiplication(calibrated, applied):
    model = Scaled(also=True)
    gm = calibrated(model, samples(), algorithms=[SMOOTH])
    before = [t.clone() for t in model.state_dict().values()]
    result = applied(gm, SMOOTH)
    assert result.changed
    assert show(gm) == dedent(
        """\
        activation_post_process_1: f32[8, 16] = call_module activation_post_process_1(linears.0.weight)
        x: f32[1, 6, 16] = input
        div: f32[1, 6, 16] = div(x, 100)
        tanh: f32[1, 6, 16] = tanh(div)
        mul: f32[1, 6, 16] = mul(tanh, 100)
        mul_1: f32[1, 6, 16] = mul(mul, linears.0.input_scale)
        activation_post_process_0: f32[1, 6, 16] = call_module activation_post_process_0(mul_1)
        linear: f32[1, 6, 8] = linear(activation_post_process_0, activation_post_process_1, bias=linears.0.bias)
        return (linear, mul)
        """  # noqa: E501
    )
    # the float value is the same
    for x in samples(seed=1):
        torch.testing.assert_close(gm(x), model(x), rtol=1e-5, atol=1e-5)
    after = list(model.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_scale_when_the_norm_has_one_reader_then_folded_into_it(calibrated, applied, norm):
    model = Normed(norm=norm)
    text = show(calibrated(model, plain_samples()))
    gm = calibrated(model, plain_samples(), algorithms=[SMOOTH])
    assert applied(gm, SMOOTH).changed
    assert show(gm) == text
    assert gm.norm.weight.max() < 20 < model.norm.weight.max()
    for x in plain_samples(seed=1):
        torch.testing.assert_close(gm(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", [Scaled(), Scaled(readers=3), Normed(), Normed(also=True)])
def test_smoothing_when_channels_are_outliers_then_10_db_on_unseen_data(model, calibrated):
    make = plain_samples if isinstance(model, Normed) else samples
    held = make(16, seed=1)
    gm = calibrated(model, make())
    plain = quality(model, convert_pt2e(gm), held)
    gm = calibrated(model, make(), algorithms=[SMOOTH])
    smooth = quality(model, convert_pt2e(gm), held)
    assert smooth > plain + 10
    record = next(r for r in provenance_of(gm).tensors if r.steps)
    assert "dB less error expected" in record.steps[0]
    assert "smooth_quant" in provenance_of(gm).passes


def test_smooth_quant_when_run_twice_then_the_second_changes_nothing(calibrated, applied):
    gm = calibrated(Scaled(readers=2), samples(), algorithms=[SMOOTH])
    assert applied(gm, SMOOTH).changed
    text = show(gm)
    result = applied(gm, SMOOTH)
    assert not result.changed
    assert [n.text for n in result.notes] == ["smooth_quant was applied before"]
    assert show(gm) == text


class Other(nn.Module):
    """Shapes of graphs in which nothing can be scaled."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.kind = kind

    def forward(self, x):
        if self.kind == "tied":
            return self.linear(x) + x @ self.linear.weight
        if self.kind == "chain":
            return self.linear(self.linear(x))
        return self.linear(x)


@pytest.mark.parametrize(
    ("kind", "make", "options", "reason"),
    [
        ("tied", samples, {}, "the weight of linear has other readers"),
        ("even", plain_samples, {}, "no channel scale lowers the expected error enough"),
        ("chain", samples, {"outputs": True}, "linear is computed in integers"),
    ],
)
def test_pass_when_it_cannot_or_need_not_then_declines(
    calibrated, kind, make, options, reason, applied
):
    gm = calibrated(Other(kind), make(), **options, algorithms=[SMOOTH])
    result = applied(gm, SMOOTH)
    assert reason in {n.text for n in result.notes if n.skipped}
    assert all(n.skipped for n in result.notes)
    assert not result.changed


@pytest.mark.parametrize("observer", [MinMaxObserver, HistogramObserver, MSEObserver])
def test_smoothing_when_ranges_are_found_otherwise_then_10_db_too(calibrated, observer):
    model, held = Scaled(), samples(16, seed=1)
    plain = quality(model, convert_pt2e(calibrated(model, samples(), observer=observer)), held)
    gm = calibrated(model, samples(), observer=observer, biases=True, algorithms=[SMOOTH])
    assert quality(model, convert_pt2e(gm), held) > plain + 10


def test_pass_when_rounded_scales_are_asked_for_then_finds_nothing(calibrated, applied):
    observer = RoundedScaleObserver.with_args(observer=MinMaxObserver)
    gm = calibrated(Scaled(), samples(), observer=observer, algorithms=[SMOOTH])
    assert applied(gm, SMOOTH).notes == ()


def test_scale_when_in_half_precision_then_the_float_value_stays_bit_equal(calibrated, applied):
    model = Scaled(also=True).to(torch.bfloat16)
    data = [x.to(torch.bfloat16) for x in samples()]
    gm = calibrated(model, data, algorithms=[SMOOTH])
    assert applied(gm, SMOOTH).changed
    factor = getattr(gm.linears, "0").input_scale
    assert factor.dtype == torch.bfloat16
    assert factor.min() < 0.2
    for x in data:
        assert torch.equal(gm(x)[0], model(x)[0])


class Perceptron(nn.Module):
    """Two linears; a few hidden channels are 40 times as large as the others."""

    def __init__(self, relu: bool) -> None:
        super().__init__()
        self.between = nn.ReLU() if relu else nn.Identity()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 8)
        with torch.no_grad():
            self.up.weight.mul_(OUTLIERS[:, None])
            self.up.bias.mul_(OUTLIERS)
            self.down.weight.div_(OUTLIERS)

    def forward(self, x):
        return self.down(self.between(self.up(x)))


@pytest.mark.parametrize("outputs", [False, True], ids=["float between", "integers between"])
def test_scale_when_a_linear_makes_the_input_then_folded_into_its_rows(
    calibrated, outputs, applied
):
    model, held = Perceptron(relu=not outputs), plain_samples(16, seed=1)

    def prepared():
        text = show(calibrated(model, plain_samples(), outputs=outputs, biases=True))
        gm = calibrated(model, plain_samples(), outputs=outputs, biases=True, algorithms=[SMOOTH])
        result = applied(gm, SMOOTH)
        assert result.changed
        assert show(gm) == text
        return gm

    gm = prepared()
    assert gm.up.weight.abs().max() < 2 < model.up.weight.abs().max()
    for x in held:
        torch.testing.assert_close(gm(x), model(x), rtol=1e-5, atol=1e-5)
    plain = calibrated(model, plain_samples(), outputs=outputs, biases=True)
    gain = quality(model, convert_pt2e(gm), held) - quality(model, convert_pt2e(plain), held)
    assert gain > 6


def test_alphas_when_one_is_given_then_it_alone_is_tried(calibrated):
    settings = SmoothQuant(alphas=(0.5,), quantiles=(0.0,))
    gm = convert_pt2e(calibrated(Normed(), plain_samples(), algorithms=[settings]))
    steps = [step for record in provenance_of(gm).tensors for step in record.steps]
    assert steps
    assert all("quantile 0) ** 0.5" in step for step in steps)


@pytest.mark.parametrize("wrong", [{"alphas": ()}, {"alphas": (1.5,)}, {"quantiles": (1.0,)}])
def test_settings_when_out_of_range_then_refused(wrong):
    with pytest.raises(ConfigError, match="smooth_quant tries alphas in"):
        SmoothQuant(**wrong)


class Turned(nn.Module):
    """Linears behind a norm with outlier weights, or the same as GPT-2 writes them: addmm."""

    def __init__(self, is_addmm: bool) -> None:
        super().__init__()
        self.inner, self.is_addmm = Normed(), is_addmm
        self.rows = nn.Parameter(self.inner.linear.weight.detach().t().contiguous())

    def forward(self, x):
        y = self.inner.norm(x)
        if not self.is_addmm:
            return self.inner.linear(y)
        product = torch.addmm(self.inner.linear.bias, y.view(-1, 16), self.rows)
        return product.view(*y.shape[:-1], 8)


@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
def test_int8_when_layers_are_addmm_then_smoothed_as_linears(backend):
    data, held_out = samples(8), samples(8, seed=1)
    found = []
    for is_addmm in (False, True):
        model, target = Turned(is_addmm).eval(), pq.backends.get(backend)

        prepared = pq.prepare_pt2e(
            torch.export.export(model, (data[0],)), target.quantizer("int8"), strict=False
        )
        pq.calibrate(prepared, data, progress=False)
        found.append(quality(model, pq.convert_pt2e(prepared), held_out))
    assert found[1] == pytest.approx(found[0], abs=1.0)
    assert found[1] > 35


class Bands(nn.Module):
    """A recurrent layer on bands of which one is a hundred times another."""

    def __init__(self, bidirectional: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(8, 16, bidirectional=bidirectional)
        self.sizes = torch.logspace(0, -2, 8)
        with torch.no_grad():
            for name, weight in self.lstm.named_parameters():
                if name.startswith("weight_ih"):
                    weight.div_(self.sizes)

    def forward(self, x):
        return self.lstm(x)[0]


@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights:UserWarning")
@pytest.mark.usefixtures("integers_everywhere")
@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layer_when_its_features_are_uneven_then_its_weight_takes_their_sizes(
    backend, bidirectional
):
    model = Bands(bidirectional).eval()
    batches = [torch.randn(5, 3, 8) * model.sizes for _ in range(8)]
    program = torch.export.export(model, (batches[0],))
    found = {}
    for name in ("smooth_quant", None):
        quantizer = pq.backends.get(backend).quantizer("int8")
        quantizer.remove_algorithm("keep_float")
        if name is None:
            quantizer.remove_algorithm("smooth_quant")
        prepared = pq.prepare_pt2e(program, quantizer)
        gm = pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False))
        held_out = torch.randn(5, 3, 8) * model.sizes
        found[name] = sqnr_db(model(held_out), gm(held_out))
        muls = [n for n in gm.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
        assert len(muls) == (name is not None)  # one for both directions
    assert found["smooth_quant"] > found[None] + 5
    rows = pq.compare(program, pq.convert_pt2e(_scaled(program, batches, backend)), batches[:1])
    weights = [row for row in rows if row.part == "weight" and row.tensor.startswith("lstm.weight")]
    assert len(weights) == 2 * (1 + bidirectional)
    assert all(row.sqnr_db > 30 for row in weights)  # in the units of the program


@pytest.mark.usefixtures("integers_everywhere")
@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights:UserWarning")
@pytest.mark.parametrize(("layer", "is_rounded"), [(nn.LSTM, True), (nn.GRU, False)])
def test_recurrent_layer_when_its_inputs_are_rounded_then_their_error_counts(
    layer, is_rounded, monkeypatch
):
    """ONNX Runtime rounds what an LSTM reads, and has no GRU in integers."""
    asked = []

    def choose(*args, **kwargs):
        asked.append(kwargs["is_rounded"])
        return choose_channel_scale(*args, **kwargs)

    monkeypatch.setattr(smooth_quant, "choose_channel_scale", choose)
    model = nn.Sequential(layer(8, 16)).eval()
    batches = [torch.randn(5, 3, 8) * torch.logspace(0, 2, 8) for _ in range(8)]
    program = torch.export.export(model, (batches[0],))
    pq.convert_pt2e(_scaled(program, batches, "onnx"))
    assert asked == [is_rounded]


def _scaled(program, batches, backend):
    quantizer = pq.backends.get(backend).quantizer("int8")
    return pq.calibrate(pq.prepare_pt2e(program, quantizer), batches, progress=False)
