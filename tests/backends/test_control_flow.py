"""Bodies of control flow are lowered and reported as the graph around them, on every runtime."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import pt2e_quant as pq
from pt2e_quant.backends.cpu.backend import BACKEND as CPU
from pt2e_quant.backends.cpu.table import table_of
from pt2e_quant.backends.cuda.backend import BACKEND as CUDA
from pt2e_quant.backends.registry import get
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.graph.subgraphs import named_graphs
from pt2e_quant.kernels.kernel import Device
from pt2e_quant.kernels.registry import Registry
from tests.needs_vnni import NEEDS_VNNI

pytestmark = pytest.mark.usefixtures("unmeasured")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, 32))


class Cond(Layers):
    """Both branches share a weight, and one reads a buffer."""

    def forward(self, x):
        def yes(h):
            return torch.relu(self.b(h) + self.shift)

        return self.head(torch.cond(x.sum() > 0, yes, lambda h: self.b(h) * 2, (self.a(x),)))


class Nested(Layers):
    def forward(self, x):
        def inner(h):
            yes = lambda h: torch.relu(self.b(h))  # noqa: E731
            return torch.cond(h[0, 0] > 0, yes, lambda h: self.a(h), (h,))

        return self.head(torch.cond(x.sum() > 0, inner, lambda h: self.b(h) * 2, (x,)))


class While(Layers):
    def forward(self, x):
        def body(i, h):
            return i + 1, torch.tanh(self.b(h))

        start = torch.zeros((), dtype=torch.int64)
        return self.head(while_loop(lambda i, h: i < 3, body, (start, self.a(x)))[1])


class Scan(Layers):
    def forward(self, x):
        def step(carry, row):
            new = torch.tanh(self.a(row) + self.b(carry))
            return new, new.clone()

        return self.head(scan(step, x[0] * 0, x)[1])


class Map(Layers):
    def forward(self, x):
        return self.head(map_rows(lambda row: torch.relu(self.a(row)), x))


MODELS = (Cond, Nested, While, Scan, Map)
FLAT = (Cond, Nested, While)


def batches(kind):
    torch.manual_seed(0)
    x = torch.randn(6, 32) if kind in (*FLAT, Alternating) else torch.randn(4, 6, 32)
    x[0, 0] = abs(x[0, 0])
    y = x.clone()
    y[0, 0] = -x[0, 0]
    return [abs(x), abs(x) * y.sign(), -x - 1, y]


def make(kind):
    torch.manual_seed(0)
    # torch warns of operands that have gradients while it captures a body.
    return kind().eval().requires_grad_(False)


def quantized(kind, backend, recipe, **options):
    model, data = make(kind), batches(kind)
    shapes = ({0: torch.export.Dim("b", min=1, max=16)},) if kind in (Cond, While) else None
    artifact = pq.quantize(
        model,
        (data[0],),
        dynamic_shapes=shapes,
        calibration_data=data if recipe == "int8" else None,
        backend=backend,
        recipe=recipe,
        progress=False,
        **options,
    )
    return artifact, model, data


def check(artifact, model, data, bound_db):
    for x in data:
        assert sqnr_db([model(x)], [artifact.run(x)]) > bound_db


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        *((kind, "int8") for kind in MODELS),
        *((Cond, recipe) for recipe in ("int8_dynamic", "w8", "w4_g32")),
        (Nested, "w4_g32"),
    ],
)
@NEEDS_VNNI
def test_body_on_the_cpu_when_lowered_then_no_weight_is_dequantized_in_a_call(kind, recipe):
    artifact, model, data = quantized(kind, CPU.allowing_slower(), recipe)
    check(artifact, model, data, 15 if recipe == "w4_g32" else 25)
    for graph in named_graphs(artifact.program):
        left = [n for n in graph.gm.graph.nodes if is_dequantize(n)]
        assert not [n for n in left if n.args[0] in graph.constants], graph.prefix
    fused = sum(c for n, c in artifact.report.integer_ops.items() if "linear" in n)
    # Each linear that the bodies hold, in every branch that calls it.
    assert fused == {Cond: 4, Nested: 4, While: 3, Scan: 3, Map: 2}[kind]
    assert any("one round of each loop counted" in note for note in artifact.report.notes)


@pytest.mark.parametrize("kind", [Cond, Scan])
def test_body_on_the_cpu_when_saved_or_exported_then_it_runs_alike(kind, tmp_path):
    artifact, _, data = quantized(kind, CPU.allowing_slower(), "int8")
    artifact.save(tmp_path / "model.qpt2")
    loaded = CPU.load(tmp_path / "model.qpt2")
    exported = artifact.exported_program().module()
    with torch.no_grad():
        for x in data:
            assert torch.equal(loaded.run(x), artifact.run(x))
            assert sqnr_db([artifact.run(x)], [exported(x)]) > 60


def test_weight_of_a_body_when_no_kernel_takes_it_then_refused_by_name_and_counted():
    """Before, it was dequantized in every call, under strict, and the report said 0."""
    empty = Registry(Device.CPU, ())
    none = replace(CPU, table=table_of(empty), options={**CPU.options, "registry": empty})
    data = batches(Cond)
    program = torch.export.export(make(Cond), (data[0],))
    prepared = pq.calibrate(pq.prepare_pt2e(program, CPU.quantizer()), data, progress=False)
    gm = pq.convert_pt2e(prepared)
    with pytest.raises(UnsupportedError, match=r"quantized weight of .* and 3 more"):
        none.lower(gm)
    report = none.lower(gm, strict=False).report
    in_bodies = [i.node for i in report.float_regions if "/" in i.node]
    assert [name.partition("/")[0] for name in in_bodies] == ["true_graph_0", "false_graph_0"]
    assert any(" 8 dequantize passes left" in note for note in report.notes)


@pytest.mark.parametrize("kind", MODELS)
def test_body_on_a_gpu_when_lowered_then_no_weight_is_dequantized_in_a_call(kind):
    artifact, model, data = quantized(kind, CUDA.allowing_unmeasured(), "int8")
    check(artifact, model, data, 25)
    assert not [i for i in artifact.report.float_regions if i.what == "weight dequantize"]
    assert (
        artifact.report.integer_ops["int8_linear"]
        == {
            Cond: 4,
            Nested: 4,
            While: 3,
            Scan: 3,
            Map: 2,
        }[kind]
    )


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [*((kind, "int8") for kind in MODELS), (Cond, "int8_dynamic"), (Map, "w8")],
)
def test_body_in_onnx_when_lowered_then_it_computes_in_integers(kind, recipe, tmp_path):
    pytest.importorskip("onnxruntime")
    artifact, model, data = quantized(kind, "onnx", recipe)
    artifact.save(tmp_path / "model.onnx")
    check(get("onnx").load(tmp_path / "model.onnx"), model, data, 25)
    if recipe == "int8":
        names = ("QGemm", "MatMulIntegerToFloat", "QLinearMatMul")
        products = sum(artifact.report.integer_ops.get(name, 0) for name in names)
        assert products == {Cond: 4, Nested: 4, While: 3, Scan: 3, Map: 2}[kind]


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [*((kind, "int8") for kind in (Cond, Nested, Scan, Map)), (Cond, "w8")],
)
def test_body_in_a_pte_when_lowered_then_it_is_float_with_the_reason(kind, recipe, tmp_path):
    pytest.importorskip("executorch")
    artifact, model, data = quantized(kind, "xnnpack", recipe)
    artifact.save(tmp_path / "model.pte")
    check(get("xnnpack").load(tmp_path / "model.pte"), model, data, 25)
    reasons = {r.reason for r in artifact.report.provenance.floats if "/" in r.node}
    assert any("no weights inside control flow" in reason for reason in reasons)
    assert not [name for name in artifact.report.float_ops if "dequantize_per_channel" in name]


def test_while_loop_in_a_pte_when_its_rounds_are_fixed_then_integers_like_the_rest(tmp_path):
    pytest.importorskip("executorch")
    artifact, model, data = quantized(While, "xnnpack", "int8")
    artifact.save(tmp_path / "model.pte")
    check(get("xnnpack").load(tmp_path / "model.pte"), model, data, 20)
    assert artifact.report.integer_ops["FullyConnected"] == 5  # a, three times b, head


class Alternating(Layers):
    """A condition in a loop: its bodies are copied with each round that is written out."""

    def forward(self, x):
        def body(i, h):
            def yes(h):
                return torch.relu(self.b(h))

            return i + 1, torch.cond(h[0, 0] > 0, yes, lambda h: self.a(h), (h,)) * 0.5

        start = torch.zeros((), dtype=torch.int64)
        return self.head(while_loop(lambda i, h: i < 2, body, (start, self.a(x)))[1])


@pytest.mark.parametrize("backend", ["xnnpack", "onnx", "cpu"])
def test_condition_in_a_loop_when_lowered_then_it_runs(backend, tmp_path):
    target = get(backend)
    target = target.allowing_slower() if backend == "cpu" else target
    artifact, model, data = quantized(Alternating, target, "int8")
    path = tmp_path / f"model{target.suffix}"
    artifact.save(path)
    check(get(backend).load(path), model, [data[0], data[2]], 15)


class Until(Layers):
    """How often it runs depends on the input."""

    def forward(self, x):
        def body(h):
            return (torch.tanh(self.b(h)),)

        return self.head(while_loop(lambda h: h.abs().max() > 0.5, body, (self.a(x),))[0])


def test_while_loop_in_a_pte_when_its_rounds_depend_on_data_then_refused_by_name():
    pytest.importorskip("executorch")
    with pytest.raises(UnsupportedError, match="ExecuTorch's programs have no while_loop") as found:
        quantized(Until, "xnnpack", "int8")
    assert found.value.node_name == "while_loop"
    assert "eval_with_key" not in str(found.value)
    assert "scan or map" in str(found.value.fix)
