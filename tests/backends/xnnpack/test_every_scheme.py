"""Dynamic, weight-only and sub-byte schemes: lowered without data, run, read back from the file."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.__main__ import main
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.contents import ProgramContents
from pt2e_quant.backends.xnnpack.recipes import RECIPES
from pt2e_quant.backends.xnnpack.table import STATIC_ROWS, TABLE
from pt2e_quant.core.errors import CalibrationError, ConfigError
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer

LENGTH = torch.export.Dim("length", min=1, max=32)
BATCH = torch.export.Dim("batch", min=1, max=8)
BYTE_LOOKUP = "quantized_decomposed.embedding_byte"
NIBBLE_LOOKUP = "quantized_decomposed.embedding_4bit"


class Block(nn.Module):
    """A table, a gate of two products that share their input, and an MLP."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        y = self.q(x) * torch.sigmoid(self.k(x))
        return self.down(F.gelu(self.up(y)))


def exported(model: nn.Module, ids: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model.eval(), (ids,), dynamic_shapes=({0: BATCH, 1: LENGTH},))


def products(contents: ProgramContents) -> Counter[tuple[str, ...]]:
    return Counter(op.inputs[:2] for op in contents.ops() if op.name == "FullyConnected")


# Rows with a float result, and what here runs each.
PROVEN = {
    "linear_dynamic": "int8_dynamic",
    "linear_dynamic_int4": "a8w4, a8w4_g32",
    "linear_weight_only": "w8",
    "linear_weight_only_int4": "w4",
    "conv2d_dynamic": "test_convolution_when_dynamic_then_delegate_runs_it",
    "embedding": "each recipe",
    "embedding_int4": "test_embedding_when_int4_asked_for, and test_int4_tables.py",
}
WEIGHT = {"int8_dynamic": "qcint8", "w8": "qcint8", "w4": "qcint4", "a8w4": "qcint4"}
RECIPES_WITHOUT_DATA = sorted(set(RECIPES.names) - {"int8", "int8_minmax"})


@pytest.mark.parametrize("recipe", RECIPES_WITHOUT_DATA)
def test_recipe_when_lowered_without_data_then_one_partition_of_its_kernels(recipe):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = Block()
    ids = torch.randint(0, 50, (2, 5))
    prepared = prepare_pt2e(exported(model, ids), BACKEND.quantizer(recipe))
    canonical = convert_pt2e(prepared)
    artifact = BACKEND.lower(canonical, (ids,))

    other = torch.randint(0, 50, (3, 17))
    with torch.no_grad():
        assert sqnr_db(canonical(other), artifact.run(other)) > 38
        # Two or three products behind each other; int4 noise of -20 dB at each.
        assert sqnr_db(model(other), artifact.run(other)) > (
            32 if "8" in WEIGHT.get(recipe, "") else 13
        )
    contents = artifact.contents()
    is_dynamic = recipe not in ("w8", "w4")
    activation = "qdint8" if is_dynamic else "fp32"
    assert products(contents) == {(activation, WEIGHT.get(recipe, "qbint4")): 4}
    # q and k read one quantized tensor.
    converts = [op for op in contents.ops() if op.name == "Convert"]
    assert len(converts) == (3 if is_dynamic else 0)
    in_integers = {"FullyConnected": 4} if is_dynamic else {}
    assert artifact.report.integer_ops == in_integers
    assert len(contents.delegates) == 1
    assert contents.kernels == {BYTE_LOOKUP: 1}


def test_table_when_listed_then_every_row_with_a_float_result_is_run_here():  # type: ignore[no-untyped-def]
    rows = {row.name for row in TABLE} - {row.name for row in STATIC_ROWS}
    # recurrent_layer: tests/backends/test_recurrent_models.py
    assert rows == PROVEN.keys() | {"recurrent_layer"}


def test_file_when_int4_then_a_seventh_of_float():  # type: ignore[no-untyped-def]
    """4 bits, a bfloat16 scale per 128: 4.125 a weight, against 32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    x = torch.randn(2, 1024)
    quantizer = BACKEND.quantizer("a8w4_g128")
    prepared = prepare_pt2e(torch.export.export(model.eval(), (x,)), quantizer)
    artifact = BACKEND.lower(convert_pt2e(prepared), (x,))
    weights = 2 * 1024 * 1024
    assert 8 * artifact.size_bytes / weights < 4.6


def test_groups_when_recipe_is_lowered_then_the_graph_has_the_scales_that_run():  # type: ignore[no-untyped-def]
    """The delegate rounds scales of groups to bfloat16: asked for in float32 they differ."""
    torch.manual_seed(0)
    model, x = nn.Linear(256, 64).eval(), torch.randn(8, 256)
    program = torch.export.export(model, (x,))
    found = {}
    kept = scheme_named("a8w4_g64", scales=ScaleFormat(dtype=torch.bfloat16))
    for name, quantizer in (
        ("recipe", BACKEND.quantizer("a8w4_g64")),
        ("bfloat16", BACKEND.quantizer("a8w4_g64").set_global(kept)),
        ("float32", BACKEND.quantizer("a8w4_g64").set_global(scheme_named("a8w4_g64"))),
    ):
        canonical = convert_pt2e(prepare_pt2e(program, quantizer))
        artifact = BACKEND.lower(canonical, (x,))
        scale = canonical.get_buffer("weight_scale")
        found[name] = (sqnr_db(canonical(x), artifact.run(x)), scale, artifact.size_bytes)
    assert found["recipe"][0] > 110  # what is left is float summation
    assert found["bfloat16"][0] > 110
    assert found["float32"][0] < 60
    scales = [scale for _, scale, _ in found.values()]
    assert [s.dtype for s in scales] == [torch.float32, torch.bfloat16, torch.float32]
    assert torch.equal(scales[0], scales[1].float())
    assert torch.equal(scales[0], scales[2].bfloat16().float())
    assert found["recipe"][2] == found["float32"][2]


@pytest.mark.parametrize(
    ("name", "reason", "nearest"),
    [
        ("w2", "takes int8.*, not int2", "w4"),
        ("w3_g32", "takes int8.*, not int3.*PerGroup", "a8w4_g32"),
        ("w4_g128", "takes int4.*, not int4.*PerGroup", "a8w4_g128"),
        ("w8_g64", "takes int8.*PerChannel.*, not int8.*PerGroup", "w8"),
        ("a8w8_g32", "takes int8.*PerChannel.*, not int8.*PerGroup", "int8_dynamic"),
        ("a8w4_g96", r"takes int4.*PerGroup.*, not int4.*group_size=96", "a8w4_g64"),
        ("a8w5", "takes int.*, not int5", "int8_dynamic"),
        ("a16w8", 'linear: its input "x" takes int8.*, not int16', "int8"),
        ("int8_dynamic_per_tensor", "PerToken.*, not int8.* dynamic PerTensor", "int8_dynamic"),
        ("fp8", 'its input "x" takes int8.*, not float8', "int8"),
        ("nf4", 'its weight "w" takes int.*, not nf4', "a8w4_g64"),
        ("nvfp4", 'its input "x" takes int8.*, not float4', "a8w4_g32"),
        ("fp6_weight_only", 'its weight "w" takes int.*, not float6', "w8"),
        ("lut4", 'its weight "w" takes int.*, not lut4', "w4"),
        ("w1.58", 'its weight "w" takes int', "w4"),
        ("mxfp4", 'its input "x" takes int8.*, not float4', "a8w4_g32"),
    ],
)
def test_scheme_when_there_is_no_kernel_then_nearest_is_named(name, reason, nearest):  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=reason) as error:
        BACKEND.quantizer(name)
    assert f'"{nearest}"' in str(error.value.fix)
    assert BACKEND.quantizer(nearest).scheme is not None


def test_recipe_when_misspelled_then_near_names():  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match='did you mean "int8_dynamic"'):
        BACKEND.quantizer("int8_dynamc")


def test_rule_when_scheme_has_no_kernel_then_float_with_the_reason():  # type: ignore[no-untyped-def]
    model = Block(64)
    ids = torch.randint(0, 50, (2, 5))
    quantizer = BACKEND.quantizer("int8_dynamic").set_module_name("down", scheme_named("w3_g32"))
    prepared = prepare_pt2e(exported(model, ids), quantizer)
    floats = {r.module: r.reason for r in provenance_of(prepared).floats}
    assert "takes int8[-128, 127]" in floats["down"]
    assert "not int3[-4, 3]" in floats["down"]
    contents = BACKEND.lower(convert_pt2e(prepared), (ids,)).contents()
    assert products(contents) == {("qdint8", "qcint8"): 3, ("fp32", "fp32"): 1}


@pytest.mark.parametrize("scheme", ["w4", "w4_g32", "w4_g64"])
def test_embedding_when_int4_asked_for_then_4bit_kernel_and_equal(scheme):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = nn.Embedding(30, 64)
    ids = torch.randint(0, 30, (2, 5))
    quantizer = BACKEND.quantizer("a8w4_g32").set_operator("embedding", scheme_named(scheme))
    canonical = convert_pt2e(prepare_pt2e(exported(model, ids), quantizer))
    artifact = BACKEND.lower(canonical, (ids,))
    assert artifact.contents().kernels == {NIBBLE_LOOKUP: 1}
    other = torch.randint(0, 30, (4, 3))
    torch.testing.assert_close(artifact.run(other), canonical(other), rtol=0, atol=0)
    assert any("embedding_4bit" in note for note in artifact.report.notes)
    portable = BACKEND.lower(canonical, (ids,), portable_only=True)
    assert portable.contents().kernels["aten.embedding"] == 3
    assert not portable.contents().kernels[NIBBLE_LOOKUP]
    torch.testing.assert_close(portable.run(other), canonical(other), rtol=0, atol=0)


@pytest.mark.parametrize("portable_only", [False, True])
def test_embedding_when_its_rows_are_uint8_then_looked_up_and_near(portable_only):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model, ids = nn.Embedding(30, 64), torch.randint(0, 30, (2, 5))
    model.weight.data += torch.arange(30)[:, None] / 10  # zero points of each row's own
    canonical = convert_pt2e(prepare_pt2e(exported(model, ids), EmbeddingQuantizer()))
    artifact = BACKEND.lower(canonical, (ids,), portable_only=portable_only)
    kernels = {"aten.embedding": 3} if portable_only else {BYTE_LOOKUP: 1}
    assert {name: artifact.contents().kernels[name] for name in kernels} == kernels
    other = torch.randint(0, 30, (4, 3))
    torch.testing.assert_close(artifact.run(other), canonical(other), rtol=0, atol=1e-5)
    assert sqnr_db(model(other), artifact.run(other)) > 40


def test_convolution_when_dynamic_then_delegate_runs_it():  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=2),
        nn.Conv2d(16, 16, 3, groups=16),
    ).eval()  # fmt: skip
    x = torch.randn(1, 8, 12, 12)
    quantizer = BACKEND.quantizer("int8_dynamic").set_operator(
        "conv2d", scheme_named("int8_dynamic_per_tensor")
    )
    prepared = prepare_pt2e(torch.export.export(model, (x,)), quantizer)
    reasons = [r.reason for r in provenance_of(prepared).floats if r.op == "aten.conv2d"]
    assert len(reasons) == 1
    assert "no depthwise convolution" in reasons[0]
    canonical = convert_pt2e(prepared)
    artifact = BACKEND.lower(canonical, (x,))
    other = torch.randn(1, 8, 12, 12)
    assert sqnr_db(canonical(other), artifact.run(other)) > 100
    convs = [op for op in artifact.contents().ops() if "Conv2d" in op.name]
    assert [op.inputs[:2] for op in convs] == [("qdint8", "qcint8")] * 2 + [("fp32", "fp32")]


def test_convolution_when_dynamic_and_batched_then_float_with_the_reason():  # type: ignore[no-untyped-def]
    quantizer = BACKEND.quantizer("int8_dynamic").set_operator(
        "conv2d", scheme_named("int8_dynamic_per_tensor")
    )
    inputs = (torch.randn(2, 4, 8, 8),)
    program = torch.export.export(
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, 8)), inputs
    )
    prepared = prepare_pt2e(program, quantizer)
    assert any("a batch of 1" in r.reason for r in provenance_of(prepared).floats)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_executorch_quantizer_when_dynamic_then_per_row_and_passes_the_gate():  # type: ignore[no-untyped-def]
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    quantizer = XNNPACKQuantizer().set_global(
        get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    )
    torch.manual_seed(0)
    model = Block(64)
    # Rows of very different size: one scale for all of them is far from a scale each.
    model.table.weight.data.mul_(torch.logspace(-2, 1, 50)[:, None])
    ids = torch.randint(0, 50, (2, 9))
    prepared = prepare_pt2e(exported(model, ids), quantizer)
    artifact = BACKEND.lower(convert_pt2e(prepared), (ids,))
    assert products(artifact.contents()) == {("qdint8", "qcint8"): 4}
    assert sqnr_db(model(ids), artifact.run(ids)) > 30
    assert any("qparams of each row" in note for note in artifact.report.notes)


@pytest.mark.slow  # long: others of its file run in CI
def test_call_and_command_when_recipe_needs_no_data_then_the_model_is_not_run(tmp_path, capsys):  # type: ignore[no-untyped-def]
    calls = []
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    model.register_forward_hook(lambda *_: calls.append(torch.compiler.is_exporting()))
    x = torch.randn(2, 64)
    artifact = pq.quantize(model, (x,), backend="xnnpack", recipe="int8_dynamic")
    assert all(calls)
    assert sqnr_db(model(x), artifact.run(x)) > 30
    assert artifact.report.sqnr_canonical_db is not None

    source, target = tmp_path / "model.pt2", tmp_path / "model.pte"
    torch.export.save(torch.export.export(model, (x,)), source)
    command = ("quantize", str(source), "--backend", "xnnpack", "--recipe", "a8w4_g32", "-q")
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert not ended.value.code
    assert products(BACKEND.load(target).contents()) == {("qdint8", "qbint4"): 2}  # type: ignore[attr-defined]


def test_call_when_static_and_without_data_then_refused():  # type: ignore[no-untyped-def]
    with pytest.raises(CalibrationError, match=r"needs calibration data.*saw no data"):
        pq.quantize(nn.Conv2d(2, 4, 1), (torch.randn(1, 2, 4, 4),), backend="xnnpack")
