"""Models in half precision and in float64, on every runtime, in their own dtypes."""

import copy

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.registry import get
from pt2e_quant.core.provenance import provenance_of
from tests.parameters import named_subset

pytestmark = pytest.mark.usefixtures("unmeasured")

BACKENDS = ("xnnpack", "onnx", "cpu")
DTYPES = BF16, F16, F64 = (torch.bfloat16, torch.float16, torch.float64)


class Net(nn.Module):
    """Parameters, a batch norm to fold, a table, a counter, a cast, and an input of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 32)
        self.head = nn.Linear(32, 10)
        self.register_buffer("table", torch.linspace(0.0, 1.0, 16))

    def forward(self, x, shift, *, scale):
        h = torch.relu(self.bn(self.conv(x))).mean((2, 3)) + self.table + shift
        h = torch.relu(self.fc(h)).to(torch.bfloat16).to(x.dtype)
        return {"logits": self.head(h) * scale, "hidden": h}


def make(dtype):
    torch.manual_seed(0)
    net = Net().eval()
    nn.init.uniform_(net.bn.running_var, 0.5, 2.0)
    return net.to(dtype)


def call(dtype, batch=4):
    x = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(batch)).to(dtype)
    return {"x": x, "shift": torch.tensor([1]), "scale": torch.full((1,), 2.0, dtype=dtype)}


def sqnr_db(expected, found):
    error = (expected.double() - found.double()).square().sum()
    return 10 * torch.log10(expected.double().square().sum() / error).item()


SHAPES = {"x": {0: torch.export.Dim("b", min=1, max=8)}, "shift": None, "scale": None}


CASES = [
    (backend, dtype, recipe)
    for backend in BACKENDS
    for dtype, recipe in [
        *((dtype, "int8") for dtype in DTYPES),
        (BF16, "int8_dynamic"),
        (F16, "w8"),
    ]
]
ALWAYS = [
    *((backend, BF16, "int8") for backend in BACKENDS),
    ("xnnpack", F16, "w8"),
    ("onnx", F64, "int8"),
    ("cpu", BF16, "int8_dynamic"),
]


@pytest.mark.parametrize(("backend", "dtype", "recipe"), named_subset(CASES, *ALWAYS))
def test_quantize_when_the_model_is_no_float32_then_it_runs_in_the_models_dtype(
    backend, dtype, recipe, tmp_path
):
    get(backend).require_extra()
    model = make(dtype)
    before = copy.deepcopy(model.state_dict())
    data = [call(dtype), call(dtype, 7)] if recipe == "int8" else None
    artifact = pq.quantize(
        model,
        (),
        call(dtype),
        dynamic_shapes=SHAPES,
        calibration_data=data,
        backend=backend,
        recipe=recipe,
        progress=False,
    )
    path = tmp_path / f"model{get(backend).suffix}"
    artifact.save(path)
    for made in (artifact, get(backend).load(path)):
        for batch in (4, 1, 8):
            inputs = call(dtype, batch)
            expected, found = model(**inputs), made.run(**inputs)
            for name, value in expected.items():
                assert found[name].dtype is dtype
                # bfloat16 alone is 2^-9 of each value, 48 dB, in each of eight operators.
                assert sqnr_db(value, found[name]) > 30, (name, batch)
    assert "computed in float32" in str(artifact.report)
    for name, value in model.state_dict().items():
        assert value.dtype is before[name].dtype
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_lower_when_another_quantizer_left_half_precision_then_no_runtime_sees_it(backend):
    """Its q/dq in bfloat16 stop the process inside ExecuTorch."""
    target, dtype = get(backend), torch.bfloat16
    target.require_extra()
    quantizer = target.quantizer("int8")
    quantizer.computes_in = None
    model, inputs = make(dtype), call(dtype)
    program = torch.export.export(model, (), inputs, dynamic_shapes=SHAPES)
    prepared = pq.calibrate(pq.prepare_pt2e(program, quantizer), [inputs], progress=False)
    converted = pq.convert_pt2e(prepared)
    notes = [*provenance_of(converted).notes]
    artifact = target.lower(converted)
    found = artifact.run(**inputs)["logits"]
    assert found.dtype is dtype
    assert sqnr_db(model(**inputs)["logits"], found) > 30
    assert "computed in float32" in str(artifact.report)
    assert provenance_of(converted).notes == notes


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_region_when_lowered_then_it_is_computed_in_float32(backend):
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)
            self.b = nn.Linear(16, 16)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = torch.relu(self.a(x))
            return self.b(y.float())

    get(backend).require_extra()
    torch.manual_seed(0)
    model, x = Region().eval(), torch.randn(8, 16)
    artifact = pq.quantize(model, (x,), calibration_data=[x], backend=backend, progress=False)
    assert artifact.run(x).dtype is torch.float32
    assert sqnr_db(model(x), artifact.run(x)) > 30


@pytest.mark.parametrize("backend", BACKENDS)
def test_cache_when_in_bfloat16_then_a_call_still_writes_it(backend):
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)
            self.register_buffer("rows", torch.zeros(4, 16))

        def forward(self, x, at):
            self.rows.index_copy_(0, at, self.fc(x))
            return self.rows.sum(0)

    get(backend).require_extra()
    torch.manual_seed(0)
    model = Cache().eval().bfloat16()
    x = torch.randn(1, 16).bfloat16()
    artifact = pq.quantize(
        copy.deepcopy(model), (x, torch.tensor([0])), backend=backend, recipe="w8", progress=False
    )
    for at in (0, 1, 3):
        expected, found = (
            model(x * at + 1, torch.tensor([at])),
            artifact.run(x * at + 1, torch.tensor([at])),
        )
        assert found.dtype is torch.bfloat16
        assert sqnr_db(expected, found) > 30


class Doubled(nn.Module):
    """A float32 model whose middle is float64, as `float_power` makes it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.float_power(self.inner(x).abs() + 0.1, 2) + x
        return torch.relu(y).float() + x


@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
def test_float64_value_when_the_model_is_float32_then_it_is_left_float_with_the_reason(backend):
    get(backend).require_extra()
    torch.manual_seed(0)
    model, x = Doubled().eval(), torch.randn(4, 8)
    ep = torch.export.export(model, (x,))
    prepared = pq.prepare_pt2e(ep, get(backend).quantizer("int8"))
    prepared(x)
    gm = pq.convert_pt2e(prepared)
    assert sqnr_db(model(x), gm(x)) > 25
    assert any("is float64" in record.reason for record in provenance_of(gm).floats)
