"""Graphs that broke other flows: recurrent layers, a tensor beside itself, a lone batch norm.

What a backend has no integers for stays float with a reason; nothing crashes and nothing is wrong.
"""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("unmeasured")

EXTRAS = {"xnnpack": "executorch", "onnx": "onnxruntime", "cpu": "torch", "cuda": "torch"}


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = getattr(nn, kind)(12, 16, batch_first=True, **options)
        self.head = nn.Linear(32 if options.get("bidirectional") else 16, 24)

    def forward(self, x):
        return self.head(self.layer(x)[0])


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(12, 16), nn.Linear(16, 24)

    def forward(self, x):
        state = torch.zeros(x.shape[0], 16)
        for step in range(3):
            state = self.cell(x[:, step], state)
        return self.head(state)


class Doubled(nn.Module):
    def __init__(self, combine, channels):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(channels, 8, 3)
        self.combine = combine

    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.last(self.combine(y))


class Shifted(nn.Module):
    """A number where fused kernels take a tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.last(torch.relu(self.first(x) + 0.5))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(12), nn.Linear(12, 24)

    def forward(self, x):
        return self.head(torch.relu(self.norm(x)))


RECURRENT = ("onnx", "cpu", "xnnpack")
"""Backends that have recurrent layers with int8 weights."""

SEQUENCE, IMAGE, ROWS = (2, 5, 12), (2, 3, 8, 8), (4, 12)
GRAPHS = {
    "gru": (lambda: Recurrent("GRU"), SEQUENCE, "aten.gru"),
    "lstm both ways": (lambda: Recurrent("LSTM", bidirectional=True), SEQUENCE, "aten.lstm"),
    "rnn": (lambda: Recurrent("RNN", num_layers=2), SEQUENCE, "aten.rnn_tanh"),
    "gru cells": (Cells, SEQUENCE, "aten.gru_cell"),
    "cat with itself": (lambda: Doubled(lambda y: torch.cat([y, y], 1), 16), IMAGE, None),
    "sum with itself": (lambda: Doubled(lambda y: y + y, 8), IMAGE, None),
    "sum with a number": (Shifted, IMAGE, None),
    "lone batch norm": (Normed, ROWS, None),
}


# torch.export says so of every recurrent layer.
@pytest.mark.filterwarnings("ignore:The tensor attributes self.layer:UserWarning")
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        # These two runtimes' exporters take recurrent layers apart, which takes them seconds.
        pytest.param(backend, name, marks=[pytest.mark.slow] * is_slow)
        for backend in EXTRAS
        for name in GRAPHS
        for is_slow in [backend in ("xnnpack", "onnx") and name in ("gru", "lstm both ways", "rnn")]
    ],
)
def test_graph_when_lowered_then_its_products_are_integers_and_the_rest_has_a_reason(backend, name):
    pytest.importorskip(EXTRAS[backend])
    make, shape, floating = GRAPHS[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    target = pq.backends.get(backend)
    artifact = pq.quantize(
        model,
        (x,),
        calibration_data=[(x,), *((torch.randn(shape),) for _ in range(4))],
        backend=target.allowing_unmeasured() if backend == "cuda" else target,
    )
    with torch.no_grad():
        assert pq.sqnr_db(model(x), artifact.run(x)) > 25
    provenance = artifact.report.provenance
    heavy = [n for n, _ in model.named_modules() if n in ("head", "first", "last")]
    quantized = {record.name for record in provenance.tensors}
    assert {f"{n}.weight" for n in heavy} <= quantized
    reasons = {record.op: record.reason for record in provenance.floats}
    if floating is None or backend in RECURRENT:
        return
    assert f"has no int8 {floating.removeprefix('aten.')}" in reasons[floating]


def test_lower_when_the_graph_is_an_integer_reference_then_the_graph_it_was_made_of_is_asked_for():
    x = torch.randn(4, 8)
    program = torch.export.export(nn.Linear(8, 8).eval(), (x,))
    backend = pq.backends.get("cpu").allowing_slower()
    prepared = pq.calibrate(pq.prepare(program, backend.quantizer()), [x], progress=False)
    reference = pq.integer_reference(pq.convert(prepared))
    with pytest.raises(ConfigError, match="lower the graph that integer_reference was given"):
        backend.lower(reference)
