"""Activations of 16 bits on ONNX Runtime: every entry lowered and run, and the recipes."""

import sys
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import onnx

import pt2e_quant as pq
from pt2e_quant.__main__ import main
from pt2e_quant.backends.onnx.backend import BACKEND
from pt2e_quant.backends.onnx.table import TABLE
from pt2e_quant.core.granularity import PerTensor
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor, is_qdq
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Scheme, TensorScheme
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.observers.training.fake_quantize import disable_observer

sys.path.insert(0, str(Path(__file__).parent))

from op_branches import FUNCTIONS, GROUPS, Branches

BATCH = torch.export.Dim("batch", min=1, max=64)
BRANCHES = {
    group: {name: branch for name, (branch, _) in rows.items()} for group, rows in GROUPS.items()
} | {"functions": FUNCTIONS}
AS_LINEAR = ("addmm", "mm", "linear relu")
ALL = [(group, name) for group, rows in BRANCHES.items() for name in rows if name not in AS_LINEAR]
UINT16 = TensorScheme(dtype=torch.uint16, granularity=PerTensor(), symmetric=False)


def converted(
    model: nn.Module,
    batches: list[Tensor],
    recipe: str,
    scheme: Scheme | None = None,
    effort: str | None = None,
) -> torch.fx.GraphModule:
    ep = torch.export.export(model.eval(), (batches[0],), dynamic_shapes=({0: BATCH},))
    # All in integers: what is faster in float would be nearer to the model.
    quantizer = BACKEND.quantizer(recipe).allowing("slower")
    if scheme is not None:
        quantizer.set_global(scheme)
    prepared = pq.prepare_pt2e(ep, quantizer, effort=effort)
    if quantizer.scheme is not None and quantizer.scheme.input is not None:
        pq.calibrate(prepared, [(batch,) for batch in batches], progress=False)
    return pq.convert_pt2e(prepared)


@cache
def lowered(group: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    images = [torch.randn(3, 3, 8, 8) for _ in range(2)]
    gm = converted(Branches(BRANCHES[group]), images, "a16w8")
    return gm, BACKEND.lower(gm)


@pytest.mark.parametrize(("group", "name"), ALL)
def test_row_when_lowered_then_its_operator_has_16_bit_operands(group: str, name: str) -> None:
    _, artifact = lowered(group)
    rules = [record.rule for record in artifact.report.provenance.tensors]
    assert any(f"(row {name.split()[0]}_16)" in rule for rule in rules)
    assert artifact.report.provenance.floats == []


@pytest.mark.parametrize("group", BRANCHES)
def test_group_when_run_at_several_sizes_then_each_output_is_within_a_step(group: str) -> None:
    gm, artifact = lowered(group)
    error_lsb = max(r.scale[0] for r in artifact.report.provenance.tensors if r.dtype == "int16")
    for batch in (1, 3, 6):
        image = torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(batch))
        expected, found = gm(image), artifact.run(image)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1.01 * error_lsb)


def test_table_when_listed_then_every_16_bit_row_is_proven_here() -> None:
    proven = {f"{name.split()[0]}_16" for _, name in ALL} | {"tanh_unsigned_16"}
    assert {row.name for row in TABLE if row.name.endswith("_16")} == proven


class Residual(nn.Module):
    """Convolutions, a gate, a sum and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, 2), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = x + F.hardswish(self.depthwise(self.deep(x)))
        x = x * torch.sigmoid(F.adaptive_avg_pool2d(x, 1))
        return self.head(torch.tanh(self.up(F.max_pool2d(x, 2))).mean((2, 3)))


class Encoder(nn.Module):
    """Two layers of a transformer on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def batch_of(kind: str, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "cnn":
        return torch.randn(count, 3, 16, 16, generator=generator)
    return torch.randint(0, 100, (count, 12), generator=generator)


@cache
def quantized(
    kind: str, recipe: str, effort: str | None = None
) -> tuple[nn.Module, torch.fx.GraphModule]:
    torch.manual_seed(0)
    model = (Residual() if kind == "cnn" else Encoder()).eval()
    batches = [batch_of(kind, 8, seed) for seed in range(4)]
    return model, converted(model, batches, recipe, effort=effort)


def without_activations(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with the q/dq of its weights alone."""
    made = deepcopy(gm)
    for node in made.graph.nodes:
        source = node.args[0] if node.target is DequantizePerTensor else None
        if isinstance(source, torch.fx.Node) and source.target is QuantizePerTensor:
            node.replace_all_uses_with(source.args[0])
    made.recompile()
    return made


@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_a16w8_when_converted_then_only_the_weights_error_is_left(kind: str) -> None:
    test = batch_of(kind, 16, 99)
    model, gm = quantized(kind, "a16w8", "fast")
    _, of_8_bits = quantized(kind, "int8", "fast")
    own, other = (sqnr_db(without_activations(g)(test), g(test)) for g in (gm, of_8_bits))
    assert own > 70
    assert own > other + 25
    weights_db = sqnr_db(model(test), without_activations(gm)(test))
    assert abs(sqnr_db(model(test), gm(test)) - weights_db) < 0.1
    assert weights_db > sqnr_db(model(test), of_8_bits(test)) + 2
    assert pq.provenance_of(gm).floats == []
    # The errors of weights that are left as means, biases take.
    assert sqnr_db(model(test), quantized(kind, "a16w8")[1](test)) > weights_db - 0.1
    integers = {n.args[5] for n in gm.graph.nodes if n.target is QuantizePerTensor}
    assert integers == {torch.int16}
    assert {n.args[2] for n in gm.graph.nodes if n.target is QuantizePerTensor} == {0}


@pytest.mark.parametrize(
    ("kind", "recipe", "portable"),
    [
        pytest.param(kind, recipe, portable, marks=[pytest.mark.slow] * is_slow)
        for kind in ("cnn", "transformer")
        for recipe in ("a16w8", "a16w4")
        for portable in (False, True)
        for is_slow in [kind == "transformer" and portable != (recipe == "a16w4")]
    ],
)
def test_file_when_run_at_several_sizes_then_near_the_graph(
    kind: str, recipe: str, portable: bool
) -> None:
    _, gm = quantized(kind, recipe)
    artifact: Any = BACKEND.lower(gm, portable=portable)  # type: ignore[call-arg]  # ours
    for count in (1, 5, 64):
        test = batch_of(kind, count, count)
        # A value on the border of two of 65536 integers may be rounded either way.
        assert sqnr_db(gm(test), artifact.run(test)) > 70
    model = onnx.load_from_string(artifact.model)
    assert [o.version for o in model.opset_import if o.domain == ""] == [21]
    zeros = {i.name: i.data_type for i in model.graph.initializer}
    quantize = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert len(quantize) > 10
    assert {zeros[n.input[2]] for n in quantize} == {onnx.TensorProto.INT16}


def test_report_when_activations_have_16_bits_then_says_what_runs_in_float() -> None:
    report = BACKEND.lower(quantized("cnn", "a16w8")[1]).report
    (note,) = [note for note in report.notes if note.startswith("16-bit activations")]
    assert "no arithmetic on them" in note
    for part in ("1 ConvTranspose", "1 Gemm", "1 Sigmoid"):
        assert part in note
    conv = [r for r in report.float_regions if "for Conv" in r.what or "FusedConv" in r.what]
    assert any("no kernel of" in r.reason and "16-bit" in r.reason for r in conv)
    assert not any(op.startswith("QLinear") for op in report.integer_ops)


@pytest.mark.parametrize("recipe", ["a16w8", pytest.param("a16w4", marks=pytest.mark.slow)])
@pytest.mark.slow  # long: others of its file run in CI
def test_file_when_checked_in_a_new_process_then_handed_out(recipe: str, tmp_path: Path) -> None:
    _, gm = quantized("cnn", recipe)
    artifact = BACKEND.lower(gm, verify="process")
    artifact.save(tmp_path / "model.onnx")
    loaded = BACKEND.load(tmp_path / "model.onnx")
    for count in (2, 7, 2):
        test = batch_of("cnn", count, count)
        assert torch.equal(artifact.run(test), loaded.run(test))


def test_uint16_when_a_scheme_asks_for_it_then_affine_and_run() -> None:
    torch.manual_seed(0)
    model = Residual()
    scheme = replace(scheme_named("a16w8"), name="u16w8", input=UINT16, output=UINT16)
    batches = [batch_of("cnn", 8, seed) for seed in range(3)]
    gm = converted(model, batches, "a16w8", scheme)
    assert pq.provenance_of(gm).floats == []
    artifact = BACKEND.lower(gm)
    rules = [record.rule for record in artifact.report.provenance.tensors]
    assert any("tanh_unsigned_16" in rule for rule in rules)
    quantizes = [n for n in gm.graph.nodes if n.target is QuantizePerTensor]
    assert {n.args[5] for n in quantizes} == {torch.uint16}
    assert len({n.args[2] for n in quantizes}) > 2
    test = batch_of("cnn", 5, 5)
    assert sqnr_db(gm(test), artifact.run(test)) > 70


@pytest.mark.parametrize("numerics", ["fake_quant", "integer"])
@pytest.mark.parametrize("recipe", ["a16w8", "a16w4"])
def test_training_when_recipe_has_16_bits_then_fake_quantizes_to_them(
    recipe: str, numerics: str
) -> None:
    torch.manual_seed(0)
    ep = torch.export.export(Residual(), (batch_of("cnn", 4, 0),), dynamic_shapes=({0: BATCH},))
    prepared = pq.prepare_qat_pt2e(ep, BACKEND.quantizer(recipe), numerics=numerics)
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-2)
    before = {name: value.clone() for name, value in prepared.named_parameters()}
    for seed in range(3):
        loss = prepared(batch_of("cnn", 8, seed)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert not any(torch.equal(before[n], value) for n, value in prepared.named_parameters())
    test = batch_of("cnn", 5, 5)
    prepared.eval().apply(disable_observer)
    trained = prepared(test)
    gm = pq.convert_pt2e(prepared)
    converted = pq.integer_reference(gm) if numerics == "integer" else gm
    assert torch.equal(trained, converted(test))
    assert sqnr_db(gm(test), BACKEND.lower(gm).run(test)) > 70


def test_archive_when_saved_and_loaded_then_the_same_integers(tmp_path: Path) -> None:
    _, gm = quantized("transformer", "a16w4")
    pq.save(gm, tmp_path / "q.pt2")
    loaded = pq.load(tmp_path / "q.pt2")
    test = batch_of("transformer", 3, 3)
    assert torch.equal(gm(test), loaded(test))
    counts = [Counter(str(n.target) for n in g.graph.nodes if is_qdq(n)) for g in (gm, loaded)]
    assert counts[0] == counts[1]


def test_observers_when_changed_then_16_bits_are_kept() -> None:
    torch.manual_seed(0)
    test = batch_of("cnn", 4, 0)
    ep = torch.export.export(Residual().eval(), (test,))
    quantizer = BACKEND.quantizer("a16w8").with_observers(activation=pq.HistogramObserver)
    prepared = pq.prepare_pt2e(ep, quantizer)
    pq.calibrate(prepared, [(test,)], progress=False)
    gm = pq.convert_pt2e(prepared)
    assert {n.args[5] for n in gm.graph.nodes if n.target is QuantizePerTensor} == {torch.int16}
    assert sqnr_db(quantized("cnn", "a16w8")[1](test), gm(test)) > 40


@pytest.mark.slow  # long: others of its file run in CI
def test_command_line_when_recipe_is_a16w8_then_writes_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ep = torch.export.export(Residual().eval(), (batch_of("cnn", 2, 0),))
    torch.export.save(ep, tmp_path / "model.pt2")
    torch.save([batch_of("cnn", 2, seed) for seed in range(2)], tmp_path / "data.pt")
    out = tmp_path / "model.onnx"
    arguments = ["quantize", str(tmp_path / "model.pt2"), "--backend", "onnx", "--recipe", "a16w8"]
    with pytest.raises(SystemExit) as done:
        main([*arguments, "--calibration-data", str(tmp_path / "data.pt"), "-o", str(out)])
    assert not done.value.code
    assert "int16" in {r.dtype for r in BACKEND.load(out).report.provenance.tensors}
