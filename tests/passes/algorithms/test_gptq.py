"""GPTQ: its integers, what they gain, and where it goes."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import CalibrationError, ConfigError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.passes.algorithms.gptq import Gptq
from pt2e_quant.passes.algorithms.grid import Grid

pytestmark = pytest.mark.usefixtures("unmeasured")

WIDTH = 64


def correlated(count: int = 8, seed: int = 0, shape: tuple[int, ...] = (32,)) -> list[torch.Tensor]:
    """Rows of WIDTH channels that are mixtures of eight: neighbours can make up for errors."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(99))
    return [
        torch.randn(1, *shape, 8, generator=generator) @ mixing
        + 0.05 * torch.randn(1, *shape, WIDTH, generator=generator)
        for _ in range(count)
    ]


def images(count: int = 8, seed: int = 0) -> list[torch.Tensor]:
    """The same as channels of small images."""
    return [x.permute(0, 3, 1, 2) for x in correlated(count, seed, (6, 6))]


class Net(nn.Module):
    """One linear or convolution."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def quantized(model, data, backend: str, recipe: str, *algorithms):
    program = torch.export.export(model.eval(), (data[0],))
    quantizer = pq.backends.get(backend).quantizer(recipe)
    prepared = pq.prepare_pt2e(program, quantizer, algorithms=algorithms)
    pq.calibrate(prepared, data, progress=False)
    return convert_pt2e(prepared)


def error(model, gm, data) -> float:
    """Mean square of the output's error."""
    with torch.no_grad():
        return float(torch.stack([(model(x) - gm(x)).square().mean() for x in data]).mean())


def naive(weight: torch.Tensor, grid: Grid, hessian: torch.Tensor, settings: Gptq) -> torch.Tensor:
    """Algorithm 1 of the paper column by column, with the inverse updated by elimination."""
    weight, hessian = weight.double().clone(), hessian.double()
    damped = hessian + settings.damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse = torch.linalg.inv(damped)
    order = range(len(hessian))
    if settings.act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True).tolist()
    done = torch.zeros_like(weight)
    for k in order:
        column = Grid(grid.scale[:, k], grid.zero_point[:, k], grid.quant_min, grid.quant_max)
        done[:, k] = column.nearest(weight[:, k].float()).double()
        step = (weight[:, k] - done[:, k]) / inverse[k, k]
        weight -= step[:, None] * inverse[k]
        inverse = inverse - inverse[:, k : k + 1] @ inverse[k : k + 1] / inverse[k, k]
    return done


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("block_size", [3, 128])
@pytest.mark.parametrize("groups", [False, True])
def test_integers_when_small_then_those_of_the_paper_column_by_column(
    act_order, block_size, groups
):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(12, 16, generator=generator)
    x = torch.randn(200, 16, generator=generator) @ torch.randn(16, 16, generator=generator)
    hessian = 2 * x.T @ x / len(x)
    blocks = weight.reshape(12, -1, 4 if groups else 16)
    scale = (blocks.abs().amax(2, keepdim=True) / 3).expand_as(blocks).reshape(12, 16)
    grid = Grid(scale, torch.zeros_like(scale), -3, 3)
    settings = Gptq(act_order=act_order, block_size=block_size)
    found = settings._round(weight, grid, hessian)
    expected = naive(weight, grid, hessian, settings)
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-6)
    assert not torch.equal(found, grid.nearest(weight))


@pytest.mark.parametrize(
    ("backend", "recipe", "least_gain"),
    [
        ("onnx", "w3", 4.0),
        ("onnx", "w4_g32", 4.0),
        ("onnx", "w4", 4.0),
        ("onnx", "w8", 4.0),
        ("xnnpack", "w4", 4.0),
        ("xnnpack", "a8w4_g32", 1.5),
        ("cpu", "w4_g32", 4.0),
    ],
)
def test_error_when_inputs_are_correlated_then_a_fraction_of_plain_rounding(
    backend, recipe, least_gain
):
    torch.manual_seed(0)
    model, held = Net(nn.Linear(WIDTH, 48)), correlated(16, seed=1)
    plain = error(model, quantized(model, correlated(), backend, recipe), held)
    gm = quantized(model, correlated(), backend, recipe, "gptq")
    assert error(model, gm, held) < plain / least_gain
    record = next(r for r in provenance_of(gm).tensors if r.steps)
    assert "gptq" in record.steps[0]
    assert "gptq" in provenance_of(gm).passes


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(WIDTH, 16, 3, padding=1, groups=2),
        nn.Conv2d(WIDTH, 16, 3, padding="same", dilation=2),
        nn.Conv2d(WIDTH, 16, 1, stride=2),
    ],
    ids=["groups", "same", "pointwise"],
)
def test_error_when_a_convolution_has_correlated_windows_then_halved(layer):
    model, held = Net(layer), images(16, seed=1)
    plain = error(model, quantized(model, images(), "onnx", "w3"), held)
    assert error(model, quantized(model, images(), "onnx", "w3", Gptq()), held) < plain / 2


def test_static_int8_when_smoothed_first_then_the_hessian_follows():
    """smooth_quant divides the input and multiplies the weight: GPTQ sees both scaled."""
    outliers = torch.ones(WIDTH).index_fill_(0, torch.tensor([3, 11]), 40.0)
    torch.manual_seed(0)
    model = Net(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48)))
    with torch.no_grad():
        model.layer[0].weight.mul_(outliers)
        model.layer[1].weight.div_(outliers)
    held = correlated(16, seed=1)
    plain = error(model, quantized(model, correlated(), "onnx", "int8"), held)
    gm = quantized(model, correlated(), "onnx", "int8", "gptq")
    assert error(model, gm, held) < plain
    assert {"smooth_quant", "gptq"} <= set(provenance_of(gm).passes)


def test_users_weights_when_quantized_then_as_they_were():
    model = Net(nn.Linear(WIDTH, 8))
    before = model.layer.weight.clone()
    quantized(model, correlated(), "onnx", "w4", "gptq")
    assert torch.equal(model.layer.weight, before)


def test_uncorrelated_inputs_when_rounded_then_never_worse_on_the_calibration_data():
    torch.manual_seed(0)
    model = Net(nn.Linear(WIDTH, 48, bias=False))
    data = [torch.randn(1, 16, WIDTH)]
    plain = error(model, quantized(model, data, "onnx", "w3"), data)
    assert error(model, quantized(model, data, "onnx", "w3", "gptq"), data) <= plain


def test_a_graph_without_integer_weights_when_asked_for_then_refused():
    with pytest.raises(ConfigError, match="gptq applies to nothing that is quantized here"):
        quantized(Net(nn.Linear(WIDTH, 8)), correlated(), "onnx", "fp8_weight_only", "gptq")


def test_convert_when_no_data_came_then_refused():
    model, x = Net(nn.Linear(WIDTH, 8)), correlated()[0]
    quantizer = pq.backends.get("onnx").quantizer("w4").add_algorithm("gptq")
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), quantizer)
    with pytest.raises(CalibrationError, match="gptq needs calibration data"):
        convert_pt2e(prepared)


def test_groups_when_not_static_then_scales_of_the_columns_as_they_are_when_reached():
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    layer = nn.Linear(128, 24)
    mixing = torch.randn(12, 128, generator=generator)
    data = [
        torch.randn(1, 64, 12, generator=generator) @ mixing
        + 0.05 * torch.randn(1, 64, 128, generator=generator)
        for _ in range(8)
    ]
    model = Net(layer)
    static = quantized(model, data, "onnx", "w3_g32", Gptq(act_order=False))
    found = {}
    for block_size in (128, 48):  # groups end inside a block and beyond it
        settings = Gptq(act_order=False, static_groups=False, block_size=block_size)
        found[block_size] = quantized(model, data, "onnx", "w3_g32", settings)
    assert not torch.equal(found[128](data[0]), static(data[0]))
    torch.testing.assert_close(found[128](data[0]), found[48](data[0]), rtol=1e-3, atol=1e-3)
    assert error(model, found[128], data) < 1.5 * error(model, static, data)


def test_groups_when_not_static_and_reordered_then_refused():
    with pytest.raises(ConfigError, match="reaches the columns of a group at different times"):
        Gptq(static_groups=False)
