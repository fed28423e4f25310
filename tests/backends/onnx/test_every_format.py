"""Weights in any codes on ONNX Runtime: every scheme by name is exact, and small."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import onnx

import pt2e_quant as pq
from pt2e_quant.backends.onnx.artifact import OnnxArtifact
from pt2e_quant.backends.onnx.code_rows import WEIGHT_FORMATS
from pt2e_quant.backends.onnx.recipes import RECIPES
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Scheme
from pt2e_quant.flow.calibrate.sample import sqnr_db
from tests.parameters import named_subset

BACKEND = pq.backends.get("onnx")
EXACT_DB = 120.0
"""Sums of float32 in another order."""


class Model(nn.Module):
    """A linear with an odd number of rows, one without bias, a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 256)
        self.odd, self.even = nn.Linear(256, 77), nn.Linear(256, 128, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids)
        return self.odd(torch.relu(x)), self.even(x)


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 30, shape, generator=torch.Generator().manual_seed(3))


def lowered(scheme: Scheme, model: nn.Module | None = None) -> tuple[Any, OnnxArtifact]:
    """Everything in the scheme, tables too."""
    torch.manual_seed(0)
    quantizer = BACKEND.quantizer("w8")
    quantizer.rules = quantizer.rules[:1]
    quantizer.set_global(scheme)
    model = (model or Model()).eval()
    shapes = ({0: torch.export.Dim("n", max=8)},)
    ep = torch.export.export(model, (ids(2, 5),), dynamic_shapes=shapes)
    gm = pq.convert_pt2e(pq.prepare_pt2e(ep, quantizer))
    artifact = BACKEND.lower(gm, (ids(2, 5),), strict=False)
    assert isinstance(artifact, OnnxArtifact)
    return gm, artifact


FEW = ["w3_g32", "fp8_weight_only", "mxfp4_weight_only", "nvfp4_weight_only", "nf4_double", "lut3"]
FEW += ["w1"]
WIDTHS = [3, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (2, 5, 6, 7))]
GROWS = ("lut7", "lut8")
"""A table of 128 values a channel takes more than the channel: convert refuses it."""
SLOW = [name for name in WEIGHT_FORMATS if name not in (*FEW, *GROWS)]
SLOW += ["w2", "w5", "w6_g64", "w7_g16", "lut4_g64"]


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_weights_when_of_any_codes_then_exact_and_decoded_at_load(name: str) -> None:
    gm, artifact = lowered(scheme_named(name))
    # What is left in a call: two products, a lookup, and what the float model has besides.
    assert artifact.report.integer_ops == {}
    assert set(artifact.report.float_ops) <= {"MatMul", "Gemm", "Add", "Relu", "Gather"}
    assert artifact.report.float_regions == []
    other = ids(7, 5)
    for found, expected in zip(artifact.run(other), gm(other), strict=True):
        assert sqnr_db(expected, found) > EXACT_DB
    records = [r for r in artifact.report.provenance.sizes if r.readers]
    assert {r.name for r in records} >= {f"{n}.weight" for n in ("table", "odd", "even")}


@pytest.mark.parametrize("symmetric", named_subset([True, False], False))
@pytest.mark.parametrize("bits", WIDTHS)
def test_integers_when_zero_points_are_theirs_then_exact(bits: int, symmetric: bool) -> None:
    for name in (f"w{bits}", f"w{bits}_g128"):
        gm, artifact = lowered(scheme_named(name, symmetric=symmetric))
        for found, expected in zip(artifact.run(ids(3, 5)), gm(ids(3, 5)), strict=True):
            assert sqnr_db(expected, found) > EXACT_DB


@pytest.mark.parametrize(
    ("name", "most"),
    [("w3_g128", 3.3), ("nf4", 4.6), ("w1", 1.1)],
)
def test_file_when_codes_are_few_bits_then_so_is_the_file(name: str, most: float) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = nn.Embedding(30, 1024), nn.Linear(1024, 1024, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.fc(self.table(ids))

    _, artifact = lowered(scheme_named(name), Wide())
    # All constants of the file: codes, scales, tables, and what decodes them.
    model = onnx.load_from_string(artifact.model)
    stored = sum(len(i.raw_data) for i in model.graph.initializer)
    assert 8 * stored / (1024 * 1024 + 30 * 1024) < most
    assert math.isclose(artifact.size_bytes, stored, abs_tol=40_000)


@pytest.mark.parametrize(
    ("rank", "name"),
    [(1, "w3"), (2, "fp4_weight_only"), (3, "lut2"), (1, "w4"), (2, "w4")],
    ids=lambda v: str(v),
)
def test_convolution_when_in_codes_then_exact(rank: int, name: str) -> None:
    torch.manual_seed(0)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    model = nn.Sequential(kind(3, 8, 3), nn.ReLU(), kind(8, 9, 3)).eval()
    x = torch.randn(2, 3, *[6] * rank)
    quantizer = BACKEND.quantizer("w8").set_global(scheme_named(name))
    gm = pq.convert_pt2e(pq.prepare_pt2e(torch.export.export(model, (x,)), quantizer))
    artifact = BACKEND.lower(gm, (x,))
    assert sqnr_db(gm(x), artifact.run(x)) > EXACT_DB
    rules = [record.rule for record in artifact.report.provenance.tensors]
    assert [f"(row conv{rank}d_codes)" in rule for rule in rules] == [True, True]


@pytest.mark.parametrize("name", ["w3_g32", "mxfp6_weight_only"])
def test_recipe_when_lowered_and_saved_then_the_standard_alone_and_equal(name, tmp_path) -> None:
    torch.manual_seed(0)
    x = ids(2, 5)
    ep = torch.export.export(Model().eval(), (x,))
    gm = pq.convert_pt2e(pq.prepare_pt2e(ep, BACKEND.quantizer(name)))
    artifact = BACKEND.lower(gm, (x,), portable=True)  # type: ignore[call-arg]  # ours
    assert isinstance(artifact, OnnxArtifact)
    model = onnx.load_from_string(artifact.model)
    assert {node.domain for node in model.graph.node} == {""}
    onnx.checker.check_model(model, full_check=True)
    artifact.save(tmp_path / "x.onnx")
    for a, b in zip(BACKEND.load(tmp_path / "x.onnx").run(x), artifact.run(x), strict=True):
        assert torch.equal(a, b)
    assert name in RECIPES
