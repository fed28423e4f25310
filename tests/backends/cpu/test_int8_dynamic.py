"""Recipe int8_dynamic on the CPU backend: fused, exact, any batch, through torch's exporter."""

import io

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends import get
from pt2e_quant.backends.cpu import lower, policy
from pt2e_quant.backends.fuse_kernels import KERNEL_KEY
from pt2e_quant.core.errors import Pt2eQuantWarning, UnsupportedError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.graph.pattern import find_matches
from pt2e_quant.kernels.int8_linear import cpu
from pt2e_quant.kernels.onednn.speed import cpu_slug
from tests.needs_vnni import NEEDS_VNNI
from tests.small_models import MODELS

pytestmark = pytest.mark.usefixtures("unmeasured")

CPU = get("cpu")
LEAST_DB = 40.0
ROWS = "pt2e_quant.int8_linear_rows"
AS_EXPORTED = "x per token, weight < 2^18, M <= 16"
DYNAMIC = [kernel for kernel in cpu.KERNELS if kernel.row.name.startswith("linear_dynamic")]


def converted(model, inputs, shapes=None, backend=CPU):
    ep = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes)
    return convert_pt2e(prepare_pt2e(ep, backend.quantizer("int8_dynamic")))


def lowered_net(make_noise, backend=CPU):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 20))
    shapes = ({0: torch.export.Dim("n", max=64), 1: torch.export.Dim("t", max=64)},)
    gm = converted(net, (make_noise(3, 5, 32),), shapes, backend)
    return gm, backend.lower(gm)


@pytest.mark.parametrize("name", ["vit", "bert", "llama"])
def test_transformer_when_lowered_then_all_linears_fused_and_near_the_graph(name):
    make, batches = MODELS[name]
    model = make()
    report = CPU.lower(converted(model, batches()[0])).report
    assert report.integer_ops[ROWS] == sum(isinstance(m, nn.Linear) for m in model.modules())
    assert not report.float_regions
    assert report.sqnr_canonical_db >= LEAST_DB


def test_weights_of_4_bits_when_lowered_then_the_same_operator_and_near_the_graph(make_noise):
    net = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 20))
    ep = torch.export.export(net.eval(), (make_noise(3, 32),))
    gm = convert_pt2e(prepare_pt2e(ep, CPU.quantizer("a8w4")))
    assert {r.dtype for r in provenance_of(gm).tensors if "weight" in r.name} == {"int4"}
    artifact = CPU.lower(gm)
    assert artifact.report.integer_ops[ROWS] == 2
    assert not artifact.report.float_regions
    x = make_noise(3, 32, seed=1)
    with torch.no_grad():
        torch.testing.assert_close(artifact.run(x), gm(x), rtol=1e-5, atol=1e-5)


def test_any_batch_and_length_when_run_then_near_the_graph(make_noise):
    gm, artifact = lowered_net(make_noise)
    for shape in ((2, 7, 32), (1, 1, 32)):
        x = make_noise(*shape)
        with torch.no_grad():
            torch.testing.assert_close(artifact.run(x), gm(x), rtol=1e-5, atol=1e-5)


def test_program_when_exported_saved_and_loaded_then_the_same_results(make_noise, tmp_path):
    _, artifact = lowered_net(make_noise)
    stream = io.BytesIO()
    torch.export.save(artifact.exported_program(), stream)
    stream.seek(0)
    exported = torch.export.load(stream).module()
    artifact.save(tmp_path / "net.qpt2")
    again = CPU.load(tmp_path / "net.qpt2")
    x = make_noise(2, 9, 32)
    with torch.no_grad():
        expected = artifact.run(x)
        assert torch.equal(exported(x), expected)
        assert torch.equal(again.run(x), expected)


def test_program_when_traced_by_torch_compile_then_equal(make_noise):
    _, artifact = lowered_net(make_noise)
    compiled = torch.compile(artifact.program, backend="aot_eager", fullgraph=True)
    x = make_noise(2, 9, 32)
    with torch.no_grad():
        assert torch.equal(compiled(x), artifact.run(x))


@pytest.mark.slow  # compiles C++
@pytest.mark.filterwarnings("ignore")  # torch's own, at compilation
def test_program_when_compiled_ahead_then_near_for_any_batch_and_length(make_noise):
    _, artifact = lowered_net(make_noise)
    batches = [make_noise(*shape) for shape in ((1, 1, 32), (2, 9, 32), (5, 40, 32))]
    expected = [artifact.run(x) for x in batches]
    artifact.compile()
    for x, wanted in zip(batches, expected, strict=True):
        assert sqnr_db([wanted], [artifact.run(x)]) >= LEAST_DB


def test_machine_without_vnni_when_lowered_then_exact_products_instead(make_noise, monkeypatch):
    _, artifact = lowered_net(make_noise)
    monkeypatch.setattr(cpu, "multiplies_exactly", lambda weight: False)
    _, plain = lowered_net(make_noise)
    assert ROWS not in plain.report.integer_ops
    assert plain.report.integer_ops["pt2e_quant.int8_linear"] == 2
    x = make_noise(2, 9, 32)
    with torch.no_grad():
        assert torch.equal(plain.run(x), artifact.run(x))


def test_bfloat16_model_when_lowered_then_bfloat16_results(make_noise):
    net = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 20)).bfloat16()
    x = make_noise(4, 32).bfloat16()
    artifact = CPU.lower(converted(net, (x,)))
    assert artifact.report.integer_ops[ROWS] == 2
    assert artifact.run(x).dtype is torch.bfloat16


def test_activations_of_another_dtype_when_called_then_named():
    with pytest.raises(UnsupportedError, match=r"takes int8 activations, found torch\.uint8"):
        torch.ops.pt2e_quant.int8_linear_rows(
            torch.zeros(2, 8, dtype=torch.uint8),
            torch.ones(2, 1),
            torch.zeros(2, 1, dtype=torch.int32),
            torch.ops.pt2e_quant.pack_onednn_linear(torch.ones(4, 8, dtype=torch.int8), None),
            torch.ones(4),
            torch.full((4,), 8.0),
        )


@pytest.mark.parametrize(
    ("rows", "width", "named"),
    [
        (1, 64, "weight < 2^18, M <= 1"),
        (64, 64, "weight < 2^18, M <= 128"),
        (2, 1100, "weight < 2^22, M <= 4"),
        (129, 1100, "weight < 2^22, M > 128"),
    ],
)
def test_shape_class_when_weights_are_small_or_large_then_it_tells_them_apart(
    make_noise, rows, width, named
):
    graph = torch.export.export(nn.Linear(width, width), (make_noise(rows, width),)).graph
    patterns = [(kernel, op) for kernel in DYNAMIC for op in kernel.row.find]
    (found,) = find_matches(graph, patterns)
    assert cpu.dynamic_class(found[1]) == f"x per token, {named}"


def test_shape_class_when_rows_are_symbolic_then_it_is_that_of_the_example(make_noise):
    gm, artifact = lowered_net(make_noise)
    kernels = [n.meta[KERNEL_KEY] for n in artifact.program.graph.nodes if KERNEL_KEY in n.meta]
    assert [kernel.op for kernel in kernels] == ["int8_linear"] * 2
    patterns = [(kernel, op) for kernel in DYNAMIC for op in kernel.row.find]
    found = find_matches(gm.graph, patterns)
    assert [kernel.shape_class(match) for kernel, match in found] == [AS_EXPORTED] * 2


def test_class_when_slower_than_float_then_float_and_a_warning_says_what_to_do(
    make_noise, monkeypatch
):
    monkeypatch.setattr(policy, "measured_here", lambda op: {AS_EXPORTED: 0.8})
    with pytest.warns(Pt2eQuantWarning, match="measured no slower than float") as told:
        _, artifact = lowered_net(make_noise)
    assert 'pq.backends.get("cpu").allowing_slower()' in str(told[0].message)
    assert not artifact.report.integer_ops


def test_class_when_slower_but_allowed_then_fused_and_the_report_says_how_slow(
    make_noise, monkeypatch
):
    for module in (policy, lower):
        monkeypatch.setattr(module, "measured_here", lambda op: {AS_EXPORTED: 0.8})
    _, artifact = lowered_net(make_noise, CPU.allowing_slower())
    assert artifact.report.integer_ops[ROWS] == 2
    assert any(f"{AS_EXPORTED} (2 calls): measured 0.80 times" in n for n in artifact.report.notes)


def test_one_slow_row_when_many_are_fast_then_many_are_quantized(make_noise, monkeypatch):
    slow, fast = (cpu.dynamic_class_of(rows, 48 * 32) for rows in (1, 64))
    monkeypatch.setattr(policy, "measured_here", lambda op: {slow: 0.5, fast: 1.2})
    assert CPU.lower(converted(nn.Linear(32, 48), (make_noise(64, 32),))).report.integer_ops[ROWS]
    with pytest.warns(Pt2eQuantWarning, match="measured no slower than float"):
        converted(nn.Linear(32, 48), (make_noise(1, 32),))


def test_weights_whose_sums_float32_lacks_when_lowered_then_of_a_class_of_their_own(make_noise):
    net = nn.Linear(1200, 4)
    with torch.no_grad():
        net.weight.fill_(1.0)
    artifact = CPU.lower(converted(net, (make_noise(3, 1200),)))
    assert artifact.report.integer_ops["pt2e_quant.int8_linear"] == 1
    wanted = f"int8_linear, x per token, by torch._int_mm (1 call): not measured on {cpu_slug()}"
    assert wanted in artifact.report.notes


@pytest.mark.parametrize("recipe", ["int8", "int8_dynamic", pytest.param("w8", marks=NEEDS_VNNI)])
def test_sum_when_it_is_written_into_a_buffer_then_the_next_call_reads_it(recipe):
    class Totals(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 8)
            self.register_buffer("total", torch.zeros(4, 16))
            self.register_buffer("unread", torch.zeros(4, 16))

        def forward(self, x):
            y = self.first(x)
            self.unread.add_(self.first(x * 0.5))
            return self.last(self.total.add_(y)), y

    torch.manual_seed(0)
    model, x = Totals().eval(), torch.randn(4, 16)
    start = {name: value.clone() for name, value in model.named_buffers()}
    artifact = pq.quantize(
        model, (x,), calibration_data=[(x,)], backend="cpu", recipe=recipe, progress=False
    )
    model.load_state_dict(start, strict=False)
    for call in (x, x.flip(0), x * 0.5):
        for expected, found in zip(model(call), artifact.run(call), strict=True):
            assert sqnr_db(expected, found) > 25
