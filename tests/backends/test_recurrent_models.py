"""Recurrent layers with int8 weights: every kind, direction and recipe on every runtime."""

import zipfile

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.recurrent_ops import RecurrentLayer
from pt2e_quant.graph.ops import RECURRENT, is_call
from tests.needs_vnni import NEEDS_VNNI

pytestmark = [
    pytest.mark.usefixtures("unmeasured"),
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
]

EXTRAS = {"onnx": "onnxruntime", "cpu": "torch", "xnnpack": "executorch"}
RECIPES = ("int8_dynamic", "w8", "int8")
STACKED = {"num_layers": 2, "bidirectional": True, "batch_first": True}
LAYERS = {
    "lstm": ("LSTM", {}),
    "lstm stacked": ("LSTM", STACKED),
    "lstm without bias": ("LSTM", {"bias": False, "num_layers": 2}),
    "gru": ("GRU", {"batch_first": True}),
    "gru stacked": ("GRU", STACKED),
    "gru without bias": ("GRU", {"bias": False, "bidirectional": True}),
    "rnn": ("RNN", {"num_layers": 2}),
    "rnn of relus": ("RNN", {"nonlinearity": "relu", "batch_first": True}),
    "rnn stacked": ("RNN", {**STACKED, "bias": False}),
}
FIRST = ("lstm stacked", "gru", "rnn of relus")
PTE = (("int8_dynamic", "gru"), ("int8_dynamic", "rnn of relus"))
"""Of these a .pte is written in CI: each step of a sequence is in the file, which takes long."""
INPUTS, HIDDEN, STEPS = 12, 16, 6


class Recurrent(nn.Module):
    def __init__(self, kind, hidden=HIDDEN, **options):
        super().__init__()
        self.layer = getattr(nn, kind)(INPUTS, hidden, **options)
        width = options.get("proj_size", hidden) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(width, 8)

    def forward(self, x, *state):
        given = (state if isinstance(self.layer, nn.LSTM) else state[0],) if state else ()
        y, last = self.layer(x, *given)
        return self.head(y), last


def draw(model, batch):
    shape = (batch, STEPS) if model.layer.batch_first else (STEPS, batch)
    return torch.randn(*shape, INPUTS)


def converted(model, x, recipe, backend, state=()):
    target = pq.backends.get(backend)
    axis = 0 if model.layer.batch_first else 1
    batch = torch.export.Dim("batch", max=16)
    shapes = ({axis: batch}, *([tuple({1: batch} for _ in state)] if state else []))
    program = torch.export.export(model, (x, *state), dynamic_shapes=shapes)
    prepared = pq.prepare_pt2e(program, target.quantizer(recipe))
    if recipe == "int8":
        pq.calibrate(prepared, [(draw(model, 3), *state) for _ in range(32)], progress=False)
    return target, pq.convert_pt2e(prepared)


def leaves(value):
    return torch.utils._pytree.tree_leaves(value)


def least_db(expected, found):
    pairs = zip(leaves(expected), leaves(found), strict=True)
    return min(pq.sqnr_db(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("backend", "recipe", "name"),
    [
        pytest.param(backend, recipe, name, marks=[pytest.mark.slow] * is_slow)
        for backend in EXTRAS
        for recipe in RECIPES
        for name in LAYERS
        for is_slow in [name not in FIRST or (backend == "xnnpack" and (recipe, name) not in PTE)]
    ],
)
def test_layers_when_lowered_then_weights_are_int8_at_every_batch_size(backend, recipe, name):
    pytest.importorskip(EXTRAS[backend])
    kind, options = LAYERS[name]
    torch.manual_seed(0)
    model = Recurrent(kind, **options).eval()
    target, gm = converted(model, draw(model, 3), recipe, backend)
    stored = {r.name: r for r in pq.provenance_of(gm).tensors}
    for weight in (n for n, _ in model.named_parameters() if "weight" in n):
        assert stored[weight].dtype == "int8"
    artifact = target.lower(gm, (draw(model, 3),))
    with torch.no_grad():
        for batch in (3, 7, 1):
            x = draw(model, batch)
            found = artifact.run(x)
            assert least_db(model(x), found) > 30
            assert least_db(gm(x), found) > 40
            assert least_db(found, artifact.run(x)) > 120


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *((backend, "LSTM") for backend in EXTRAS),
        *(
            pytest.param(backend, "GRU", marks=[pytest.mark.slow] * (backend == "xnnpack"))
            for backend in EXTRAS
        ),
    ],
)
def test_layers_when_given_a_state_then_it_is_used_and_the_last_one_returned(backend, kind):
    pytest.importorskip(EXTRAS[backend])
    torch.manual_seed(0)
    model = Recurrent(kind, num_layers=2).eval()
    state = tuple(torch.randn(2, 3, HIDDEN) for _ in range(2 if kind == "LSTM" else 1))
    target, gm = converted(model, draw(model, 3), "int8_dynamic", backend, state)
    artifact = target.lower(gm, (draw(model, 3), *state))
    with torch.no_grad():
        x, state = draw(model, 5), tuple(torch.randn(2, 5, HIDDEN) for _ in state)
        assert least_db(model(x, *state), artifact.run(x, *state)) > 30


@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=NEEDS_VNNI if b == "cpu" else ()) for b in EXTRAS]
)
def test_layers_when_large_then_products_are_of_integers(backend, tmp_path):
    pytest.importorskip(EXTRAS[backend])
    torch.manual_seed(0)
    model = Recurrent("LSTM", hidden=256).eval()
    target, gm = converted(model, draw(model, 3), "int8_dynamic", backend)
    artifact = target.lower(gm, (draw(model, 3),))
    named = {"onnx": "DynamicQuantizeLSTM", "cpu": "aten.quantized_lstm"}.get(backend)
    # The delegate has products of the input and of the hidden state for each gate, and the head's.
    assert artifact.report.integer_ops[named or "FullyConnected"] == (1 if named else 9)
    path = tmp_path / f"model{target.suffix}"
    artifact.save(path)
    x = draw(model, 2)
    with torch.no_grad():
        assert least_db(model(x), artifact.run(x)) > 30
        assert least_db(artifact.run(x), target.load(path).run(x)) > 120


@pytest.mark.parametrize("backend", EXTRAS)
def test_layers_when_a_rule_leaves_them_float_then_they_run_with_that_reason(backend):
    pytest.importorskip(EXTRAS[backend])
    torch.manual_seed(0)
    model = Recurrent("GRU").eval()
    target = pq.backends.get(backend)
    quantizer = target.quantizer("int8_dynamic").set_operator("gru", None)
    x = draw(model, 3)
    gm = pq.convert_pt2e(pq.prepare_pt2e(torch.export.export(model, (x,)), quantizer))
    assert any(is_call(n, RECURRENT) for n in gm.graph.nodes)
    reasons = {r.op: r.reason for r in pq.provenance_of(gm).floats}
    assert reasons["aten.gru"].startswith('rule: operator "gru"')
    with torch.no_grad():
        assert least_db(model(x), target.lower(gm, (x,)).run(x)) > 30


@pytest.mark.parametrize("backend", EXTRAS)
def test_layers_when_a_rule_names_their_operator_then_it_selects_them(backend):
    pytest.importorskip(EXTRAS[backend])
    model = Recurrent("GRU").eval()
    target = pq.backends.get(backend)
    quantizer = target.quantizer("int8_dynamic")
    scheme = quantizer.scheme
    quantizer.set_global(None).set_operator("aten.gru", scheme)
    program = torch.export.export(model, (draw(model, 3),))
    gm = pq.convert_pt2e(pq.prepare_pt2e(program, quantizer))
    assert {r.name for r in pq.provenance_of(gm).tensors} == {
        "layer.weight_ih_l0",
        "layer.weight_hh_l0",
    }


def test_projection_when_lowered_then_a_pte_has_int8_weights_and_others_say_why_not():
    pytest.importorskip("executorch")
    torch.manual_seed(0)
    model = Recurrent("LSTM", proj_size=8).eval()
    target, gm = converted(model, draw(model, 3), "int8_dynamic", "xnnpack")
    x = draw(model, 5)
    with torch.no_grad():
        assert least_db(model(x), target.lower(gm, (draw(model, 3),)).run(x)) > 30
    gm = converted(model, draw(model, 3), "int8_dynamic", "onnx")[1]
    reasons = {r.op: r.reason for r in pq.provenance_of(gm).floats}
    assert "projection" in reasons["aten.lstm"]


def test_file_when_its_text_and_zero_points_are_compressed_then_torch_reads_it_and_it_is_small(
    tmp_path,
):
    """0.29 of the float weights without: zero points are int64, the call and the graph are text."""
    torch.manual_seed(0)
    model = Recurrent("LSTM", hidden=256, num_layers=3, batch_first=True).eval()
    x = draw(model, 3)
    target, gm = converted(model, x, "int8_dynamic", "cpu")
    artifact = target.lower(gm, (x,))
    artifact.save(tmp_path / "lstm.qpt2")
    float_bytes = sum(4 * p.numel() for p in model.parameters())
    assert artifact.report.size_bytes <= 0.27 * float_bytes
    with zipfile.ZipFile(tmp_path / "lstm.qpt2") as archive:
        methods = {entry.filename: entry.compress_type for entry in archive.infolist()}
    assert methods["archive/models/model.json"] == zipfile.ZIP_DEFLATED
    assert zipfile.ZIP_STORED in methods.values()
    program = torch.export.load(tmp_path / "lstm.qpt2")
    with torch.no_grad():
        assert torch.equal(program.module()(x)[0], gm(x)[0])
    assert torch.equal(target.load(tmp_path / "lstm.qpt2").run(x)[0], artifact.run(x)[0])


def test_layers_when_trained_with_quantization_then_they_stay_float():
    model = Recurrent("LSTM")
    quantizer = pq.backends.get("cpu").quantizer("int8")
    program = torch.export.export(model.eval(), (draw(model, 3),))
    prepared = pq.prepare_qat_pt2e(program, quantizer)
    assert not any(n.target is RecurrentLayer for n in prepared.graph.nodes)
