"""Which operators compute in float, with reason, remedy and the bytes at their borders."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.backends.registry import get
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.flow.report.audit import audit

pytestmark = pytest.mark.usefixtures("integers_everywhere")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + x)


class Cnn(nn.Module):
    """A convolution, a residual block, a bottleneck of MobileNetV2, pools and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6())
        self.block = Residual()
        self.wide = nn.Conv2d(8, 16, 1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.narrow = nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.block(self.stem(x)), 2)
        x = x + self.narrow(functional.relu6(self.depthwise(functional.relu6(self.wide(x)))))
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class SqueezeExcite(nn.Module):
    """The block of EfficientNet, with its silu and sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.reduce, self.expand = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.hardswish(self.conv(x))
        squeezed = functional.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.expand(torch.relu(self.reduce(squeezed))))


class Functions(nn.Module):
    """What users of quanto asked about: log, cat and elu are functions, not modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.elu(self.conv(x))
        return self.conv(torch.cat([torch.log(y.abs() + 1.5), y], 1)[:, 2:5])


class Cumulative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.cumprod(self.first(x), 0))


def converted(model, x, recipe="int8_minmax", **options):
    quantizer = get("xnnpack").quantizer(recipe)
    prepared = pq.prepare_pt2e(export(model.eval(), (x,)), quantizer, **options)
    return pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False))


IMAGE = torch.linspace(-2, 2, 2 * 3 * 16 * 16).sin().reshape(2, 3, 16, 16)


@pytest.mark.parametrize("model", [Cnn, SqueezeExcite, Functions])
def test_audit_when_a_cnn_is_integer_only_then_no_float_operator_is_found(model):
    torch.manual_seed(0)
    quantized = converted(model(), IMAGE, int_only=True)
    found = audit(quantized)
    assert found.islands == ()
    assert found.is_integer_only
    assert found.integer_operators >= 5
    expected = quantized(IMAGE)
    reference = pq.integer_reference(quantized)(IMAGE)
    assert pq.sqnr_db(expected, reference) > 25.0


def test_audit_when_an_operator_is_float_then_says_place_bytes_reason_remedy():
    found = audit(converted(Cumulative(), torch.randn(4, 6)))
    (operator,) = found.islands
    assert operator.operator == "aten.cumprod"
    assert "test_audit.py" in operator.source
    assert operator.bytes_across == 2 * 4 * 6 * 4  # float32 in, float32 out
    assert operator.reason == "aten.cumprod has no integer form"
    assert "decompose" in operator.remedy
    assert "1 in float" in str(found)
    assert "aten.cumprod" in str(found)


@pytest.mark.parametrize("model", [Cnn, SqueezeExcite])
def test_int_only_when_the_recipe_takes_scales_at_run_time_then_calibrated_ones(model):
    torch.manual_seed(0)
    assert audit(converted(model(), IMAGE, "int8", int_only=True)).is_integer_only


def test_audit_when_scales_are_of_run_time_then_one_row_says_how_to_calibrate_them():
    torch.manual_seed(0)
    found = audit(converted(Cumulative(), torch.randn(4, 6), "int8"))
    chosen = [o for o in found.islands if "choose_qparams" in o.operator]
    assert len(found.islands) == len(chosen) + 1  # and the product, which has no integer form
    assert {o.reason for o in chosen} == {"it chooses scales at run time"}
    assert all("run_time_scales" in o.remedy for o in chosen)


def test_int_only_when_an_operator_has_no_integer_form_then_prepare_refuses():
    with pytest.raises(UnsupportedError, match=r"int_only: aten.cumprod(.|\n)*fix") as caught:
        converted(Cumulative(), torch.randn(4, 6), int_only=True)
    assert "cumprod" in caught.value.node_name


def test_audit_when_run_then_the_graph_is_not_touched():
    quantized = converted(Cnn(), IMAGE)
    before = [str(node) for node in quantized.graph.nodes], set(quantized.state_dict())
    audit(quantized)
    assert ([str(node) for node in quantized.graph.nodes], set(quantized.state_dict())) == before


@pytest.mark.parametrize(
    ("backend", "package", "function", "operator"),
    [
        ("onnx", "onnxruntime", functional.tanh, "aten.tanh"),
        ("xnnpack", "executorch", functional.silu, "aten.silu"),
        ("cpu", "torch", functional.tanh, "aten.tanh"),
    ],
)
def test_audit_when_a_runtime_computes_a_function_in_float_then_its_artifact_has_a_float_operator(
    backend, package, function, operator
):
    pytest.importorskip(package)

    class Function(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    x = torch.linspace(-3, 3, 32).reshape(2, 16)
    prepared = pq.prepare_pt2e(export(Function(), (x,)), pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False))
    assert audit(quantized).is_integer_only
    found = audit(get(backend).lower(quantized, verify=False, strict=False))
    assert not found.is_integer_only
    assert operator in str(found)
    (island,) = found.islands
    assert "test_audit.py" in island.source
    assert island.bytes_across == 2 * 2 * 16 * 4  # float32 in, float32 out


class Gate(nn.Module):
    """A function that backends leave float, and one without an integer form, in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.head = nn.Sequential(nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.conv(x)).mean((2, 3))
        return self.head(torch.triu(torch.softmax(y, -1)))


def lowered_gate(backend, **options):
    torch.manual_seed(3)
    x = torch.randn(2, 3, 8, 8)
    program = export(Gate().eval(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("b", max=8)}})
    quantizer = get(backend).quantizer("int8")
    prepared = pq.prepare_pt2e(program, quantizer)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False))
    return quantized, get(backend).lower(quantized, verify=False, **options)


def reloaded(backend, artifact, folder):
    path = folder / "file"
    artifact.save(path)
    return get(backend).load(path)


BACKENDS = [("onnx", "onnxruntime"), ("xnnpack", "executorch"), ("cpu", "torch")]


@pytest.mark.parametrize(("backend", "package"), BACKENDS)
def test_audit_when_an_artifact_is_loaded_then_it_is_that_of_the_artifact(
    backend, package, tmp_path
):
    pytest.importorskip(package)
    quantized, artifact = lowered_gate(backend, record="full")
    found = audit(artifact)
    rows = {island.operator: island for island in found.islands}
    assert all("test_audit.py" in island.source for island in found.islands)
    if backend != "cpu":  # there the machine's speed decides what is quantized
        assert rows["aten.triu"].bytes_across == 2 * 16 * 4
    assert "operators that have one" in rows["aten.triu"].remedy
    assert rows["aten.softmax"].bytes_across == 0  # inside of a float region
    assert audit(reloaded(backend, artifact, tmp_path)) == found
    # Of an operator without a form the graph's audit advises the same.
    (same,) = (i for i in audit(quantized).islands if i.operator == "aten.triu")
    assert same.remedy in rows["aten.triu"].remedy
    assert same.source == rows["aten.triu"].source


@pytest.mark.parametrize("record", ["brief", "none"])
def test_audit_when_an_onnx_file_keeps_no_record_then_its_borders_are_of_the_examples_size(
    record, tmp_path
):
    pytest.importorskip("onnxruntime")
    _, artifact = lowered_gate("onnx", record=record)
    found = audit(reloaded("onnx", artifact, tmp_path))
    rows = {island.operator: island.bytes_across for island in found.islands}
    convolved, pooled = 2 * 16 * 6 * 6 * 4, 2 * 16 * 4  # float32, the example has two images
    assert rows == {
        "QuickGelu": convolved,
        "GlobalAveragePool": 0,
        "Squeeze": 0,
        "Softmax": 0,
        "Trilu": pooled,
    }
    assert found.integer_operators == audit(artifact).integer_operators
    assert 'record="full"' in str(found)


def test_audit_when_a_pte_keeps_no_record_then_counts_and_says_so(tmp_path):
    pytest.importorskip("executorch")
    _, artifact = lowered_gate("xnnpack", record="brief")
    found = audit(reloaded("xnnpack", artifact, tmp_path))
    assert any("Softmax" in island.operator for island in found.islands)
    assert all(island.bytes_across is None for island in found.islands)
    assert 'record="full"' in found.note
    assert audit(artifact).note == ""


def test_audit_when_a_pass_puts_a_factor_behind_an_integer_product_then_the_product_is_no_island():
    pytest.importorskip("executorch")
    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    with torch.no_grad():
        model.weight[3] *= 100.0  # an outlier channel
    quantizer = get("xnnpack").quantizer("int8").remove_algorithm("run_time_scales")
    x = torch.randn(64, 16)
    prepared = pq.prepare_pt2e(export(model.eval(), (x,)), quantizer)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False))
    operators = [str(node.target) for node in quantized.graph.nodes]
    assert "aten.mul.Tensor" in operators
    artifact = get("xnnpack").lower(quantized, verify=False)
    assert artifact.report.integer_ops["FullyConnected"] == 1
    assert [island.operator for island in audit(artifact).islands] == ["aten.mul"]


@pytest.mark.parametrize("form", ["reference", "exported"])
def test_audit_when_a_graph_is_written_otherwise_then_as_the_converted_one(form):
    quantized = converted(Cumulative(), torch.randn(4, 6))
    expected = audit(quantized)
    if form == "exported":
        other = export(quantized, (torch.randn(4, 6),))
    else:
        other = pq.integer_reference(quantized)
    found = audit(other)
    assert found.integer_operators == expected.integer_operators == 2
    assert [o.operator for o in found.islands] == ["aten.cumprod"]


def test_audit_when_the_graph_is_not_converted_then_says_so():
    prepared = pq.prepare_pt2e(export(Cumulative(), (torch.randn(4, 6),)), get("onnx").quantizer())
    with pytest.raises(ConfigError, match="not known before convert"):
        audit(prepared)


@pytest.mark.parametrize("other", [nn.Linear(2, 2), "model.pte"], ids=["module", "path"])
def test_audit_when_given_something_else_then_says_what_it_reads(other):
    with pytest.raises(ConfigError, match="audit reads a quantized graph or an artifact, found"):
        audit(other)


@pytest.mark.filterwarnings("ignore:The tensor attributes self:UserWarning")
def test_audit_when_a_layer_is_recurrent_then_it_is_one_island_with_a_remedy():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer, self.last = nn.Linear(4, 4), nn.GRU(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(self.layer(self.first(x))[0])

    x = torch.randn(5, 2, 4)
    program = torch.export.export(Model().eval(), (x,))
    quantizer = pq.backends.get("xnnpack").quantizer("int8").remove_algorithm("run_time_scales")
    prepared = pq.prepare_pt2e(program, quantizer)
    found = pq.audit(pq.convert_pt2e(pq.calibrate(prepared, [x], progress=False)))
    (island,) = [i for i in found.islands if i.operator == "pt2e_quant.recurrent_layer"]
    assert island.remedy.startswith("pq.IntegerQuantizer() writes up to 64 steps out")
    # The weights [24, 4] and [24, 8] that are dequantized; what it reads, and its result.
    assert island.bytes_across == 4 * (24 * 4 + 24 * 8 + 5 * 2 * 4 + 5 * 2 * 8)
    assert "getitem" not in {i.operator for i in found.islands}


def test_audit_when_a_runtime_moves_integers_by_kernels_of_its_own_then_no_island():
    pytest.importorskip("executorch")

    class Halves(nn.Module):
        """A sum of every second row, which XNNPACK's delegate has no slice for."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            return self.second(x[::2] + x[1::2])

    torch.manual_seed(0)
    quantized = converted(Halves(), torch.randn(8, 6))
    artifact = get("xnnpack").lower(quantized, verify=False)
    assert any("slice" in name for name in artifact.report.float_ops)
    assert audit(artifact).islands == ()


class Attention(nn.Module):
    """Attention over what came before: a buffer of the model's own, or an input and a result."""

    def __init__(self, has_cache: bool) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(16, 16) for _ in range(3))
        self.has_cache = has_cache
        self.register_buffer("cache", torch.zeros(1, 8, 16))

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        key = self.key(x)
        if self.has_cache:
            past = self.cache.index_copy_(1, torch.arange(x.shape[1]), key)
        else:
            past = torch.cat([past, key], 1)
        scores = torch.softmax(self.query(x) @ past.transpose(1, 2) / 4, -1)
        return self.out(scores @ past), past


def test_int_only_when_a_buffer_is_written_then_its_remedy_leaves_no_float_operator():
    torch.manual_seed(0)
    calls = [(torch.randn(1, 2, 16), torch.randn(1, n, 16)) for n in (3, 1, 6)]
    program = export(Attention(True).eval(), calls[0])
    with pytest.raises(UnsupportedError, match=r"it writes a buffer(.|\n)*torch.cat appends"):
        pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    model, past = Attention(False).eval(), {1: torch.export.Dim("past", min=1, max=8)}
    program = export(model, calls[0], dynamic_shapes=(None, past))
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, calls, progress=False))
    assert pq.audit(quantized).is_integer_only
    reference = pq.integer_reference(quantized)
    for call in calls:
        for expected, found in zip(model(*call), reference(*call), strict=True):
            assert pq.sqnr_db([expected], [found]) > 25
