"""An integer product that is wrong on this machine stays float, with that reason in the report."""

import io

import pytest
import torch
from torch import nn

from pt2e_quant.backends import get
from pt2e_quant.backends.cpu import failed_products, lower
from pt2e_quant.backends.cpu.failed_products import FAILED_PRODUCT
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.graph.meta import constant_nodes
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact
from pt2e_quant.kernels.product_trial.product import Operator

pytestmark = pytest.mark.usefixtures("unmeasured")

CPU = get("cpu")
WRONG = "oneDNN gives wrong results here (50 % of them)"


class Trials:
    """Every product that was asked for; those that `fail` holds for are wrong."""

    def __init__(self) -> None:
        self.asked = []
        self.fail = lambda product: False

    def verdicts_of(self, products):
        self.asked += products
        return {p: WRONG if self.fail(p) else "" for p in products}, ""


@pytest.fixture
def tried(monkeypatch):
    trials = Trials()
    monkeypatch.setattr(failed_products, "verdicts_of", trials.verdicts_of)
    return trials


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = torch.relu(self.first(x))
        return torch.relu(self.second(y) + y)


def mlp(width=24):
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


MODELS = {
    "conv1d": ("int8", lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU()), (2, 4, 9)),
    "conv2d": ("int8", lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.SiLU()), (2, 4, 9, 9)),
    "linear": ("int8", mlp, (5, 24)),
    "reduced": ("int8_reduced", mlp, (5, 24)),
    "dynamic": ("int8_dynamic", mlp, (5, 24)),
}
if onednn_is_exact():  # without VNNI these weights stay float
    MODELS |= {
        "weight_only": ("w8", mlp, (5, 24)),
        "int4": ("w4", mlp, (5, 24)),
        "int4_groups": ("w4_g32", lambda: mlp(64), (17, 64)),
    }


def weights_left(program):
    constants = constant_nodes(program.graph)
    return [n for n in program.graph.nodes if is_dequantize(n) and n.args[0] in constants]


@pytest.mark.parametrize("name", MODELS)
def test_product_when_it_fails_then_float_with_the_reason(quantize_with, make_noise, tried, name):
    recipe, make, shape = MODELS[name]
    torch.manual_seed(0)
    inputs = (make_noise(*shape),)
    gm = quantize_with(make(), inputs, CPU.quantizer(recipe))
    whole = CPU.lower(gm)
    assert not whole.report.float_regions
    tried.fail = lambda product: True
    artifact = CPU.lower(gm)
    assert {i.what for i in artifact.report.float_regions} == {FAILED_PRODUCT}
    assert all(WRONG in i.reason for i in artifact.report.float_regions)
    assert not weights_left(artifact.program)
    names = {str(n.target) for n in artifact.module.graph.nodes}
    assert not any("onednn" in n or "int8_linear" in n or "_of_" in n for n in names)
    with torch.no_grad():
        torch.testing.assert_close(artifact.run(*inputs), gm(*inputs), rtol=1e-4, atol=1e-4)
    assert "oneDNN gives wrong" in str(artifact.report)


def test_one_product_when_it_fails_then_the_others_stay_integers(quantize_with, make_noise, tried):
    torch.manual_seed(0)
    inputs = (make_noise(5, 24),)
    gm = quantize_with(nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 8)), inputs)
    tried.fail = lambda product: product.weight == (8, 16)
    artifact = CPU.lower(gm)
    assert artifact.report.integer_ops["onednn.qlinear_pointwise"] == 1
    assert artifact.report.float_ops["aten.linear"] == 1
    with torch.no_grad():
        torch.testing.assert_close(artifact.run(*inputs), gm(*inputs), rtol=1e-4, atol=1e-4)


def test_sum_when_it_fails_then_the_product_alone_is_tried_and_used(
    quantize_with, make_noise, tried
):
    torch.manual_seed(0)
    inputs = (make_noise(2, 4, 8, 8),)
    gm = quantize_with(Residual(), inputs)
    tried.fail = lambda product: bool(product.summand)
    artifact = CPU.lower(gm)
    assert artifact.report.integer_ops["onednn.qconv_pointwise"] == 2
    assert "conv2d_add" in artifact.report.float_regions[0].reason
    with torch.no_grad():
        torch.testing.assert_close(artifact.run(*inputs), gm(*inputs), rtol=1e-4, atol=1e-4)


def test_file_when_loaded_then_its_products_are_tried(quantize_with, make_noise, tried, tmp_path):
    inputs = (make_noise(5, 24),)
    gm = quantize_with(mlp(), inputs)
    CPU.lower(gm).save(tmp_path / "m.qpt2")
    tried.fail = lambda product: True
    loaded = CPU.load(tmp_path / "m.qpt2")
    assert {i.what for i in loaded.report.float_regions} == {FAILED_PRODUCT}


def test_program_when_a_product_failed_then_it_exports(quantize_with, make_noise, tried):
    inputs = (make_noise(5, 24),)
    tried.fail = lambda product: True
    artifact = CPU.lower(quantize_with(mlp(), inputs))
    stream = io.BytesIO()
    torch.export.save(artifact.exported_program(), stream)
    stream.seek(0)
    with torch.no_grad():
        found = torch.export.load(stream).module()(*inputs)
    torch.testing.assert_close(found, artifact.run(*inputs), rtol=1e-4, atol=1e-4)


def test_products_when_a_size_is_dynamic_then_tried_at_the_ends_of_its_range(
    quantize_with, make_noise, tried
):
    shapes = ({0: torch.export.Dim("batch", min=1, max=9)},)
    inputs = (make_noise(4, 3, 8, 8),)
    CPU.lower(quantize_with(nn.Conv2d(3, 4, 3), inputs, dynamic_shapes=shapes))
    assert {p.x for p in tried.asked} == {(n, 3, 8, 8) for n in (1, 4, 9)}
    assert {p.operator for p in tried.asked} == {Operator.CONV}


def test_products_when_a_size_has_no_bound_then_tried_beyond_the_example(
    quantize_with, make_noise, tried
):
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    inputs = (make_noise(4, 24),)
    CPU.lower(quantize_with(nn.Linear(24, 8), inputs, dynamic_shapes=shapes))
    assert {p.x[0] for p in tried.asked} == {1, 4, 16}


def test_products_when_equal_then_asked_for_once(quantize_with, make_noise, tried):
    inputs = (make_noise(5, 24),)
    layers = [nn.Linear(24, 24) for _ in range(6)]
    CPU.lower(quantize_with(nn.Sequential(*layers), inputs))
    assert len(tried.asked) == len(set(tried.asked)) < 6


def test_trials_when_off_then_the_report_says_so(quantize_with, make_noise, tried, monkeypatch):
    inputs = (make_noise(5, 24),)
    gm = quantize_with(mlp(), inputs)
    tried.fail = lambda product: True
    without = CPU.without_trials().lower(gm)
    assert not without.report.float_regions
    assert any("not tried" in note for note in without.report.notes)
    monkeypatch.setattr(lower, "are_tried", lambda: False)
    assert any("not tried" in note for note in CPU.lower(gm).report.notes)
    assert not tried.asked
