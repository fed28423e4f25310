"""The CPU lowering against the canonical graph: single operators, aliasing, files, refusals."""

import io

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pt2e_quant.backends import get
from pt2e_quant.backends.cpu import lower as lowering
from pt2e_quant.core.errors import ArtifactError, UnsupportedError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import QuantizePerTensor
from pt2e_quant.flow.annotate.quantizer import ComposableQuantizer
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer

pytestmark = pytest.mark.usefixtures("unmeasured")

# Exact integer sums, then a float epilogue in another order of operations.
FLOAT_EPILOGUE = {"rtol": 1e-5, "atol": 1e-5}
CPU = get("cpu")
EVEN_KERNELS = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def noise(*shape, seed=0, shift=0.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + shift


class Fn(nn.Module):
    def __init__(self, fn, **modules) -> None:
        super().__init__()
        self.fn = fn
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.fn(self, x)


def quantized(model, x, recipe="int8", dynamic_shapes=None, data=None):
    ep = torch.export.export(model.eval(), (x,), dynamic_shapes=dynamic_shapes)
    prepared = prepare_pt2e(ep, CPU.quantizer(recipe))
    calibrate(prepared, data or [(x,)], progress=False)
    return convert_pt2e(prepared)


def avoid_ties(gm, x):
    """Leave out an input that lies between two integers: torch's one-pass kernel rounds twice."""
    quantize = next(n for n in gm.graph.nodes if n.target is QuantizePerTensor)
    scale = quantize.args[1]
    steps = x.double() / scale
    assume(bool((steps - steps.floor() - 0.5).abs().min() > 1e-4))


def fused(gm):
    return lowering.make_module(lowering.lower_graph(gm))


POST_OPS = {
    "none": nn.Identity,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "hardtanh": lambda: nn.Hardtanh(-0.3, 0.7),
    "hardswish": nn.Hardswish,
    "silu": nn.SiLU,
}


@settings(max_examples=40)
@given(
    data=st.data(),
    groups=st.sampled_from([1, 2, 4]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    has_bias=st.booleans(),
    post_op=st.sampled_from(sorted(POST_OPS)),
    recipe=st.sampled_from(["int8", "int8_reduced"]),
)
def test_conv_when_lowered_then_the_canonical_result(
    data, groups, kernel, stride, dilation, has_bias, post_op, recipe
):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    c, o = groups * data.draw(st.integers(1, 5)), groups * data.draw(st.integers(1, 5))
    is_even = stride == 1 and dilation * (kernel - 1) % 2 == 0
    span = dilation * (kernel - 1)
    padding = data.draw(st.sampled_from([0, min(1, span), "same" if is_even else min(2, span)]))
    conv = nn.Conv2d(c, o, kernel, stride, padding, dilation=dilation, groups=groups, bias=has_bias)
    size = dilation * (kernel - 1) + data.draw(st.integers(2, 6))
    x = noise(data.draw(st.integers(1, 3)), c, size, size + 1, shift=data.draw(st.floats(-2, 2)))
    gm = quantized(nn.Sequential(conv, POST_OPS[post_op]()), x, recipe)
    avoid_ties(gm, x)
    module = fused(gm)
    called = {str(n.target) for n in module.graph.nodes}
    assert "onednn.qconv_pointwise.default" in called
    with torch.no_grad():
        torch.testing.assert_close(module(x), gm(x), **FLOAT_EPILOGUE)


LINEAR_POST_OPS = POST_OPS | {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "tanh": nn.Tanh,
}


@pytest.mark.parametrize(
    ("kernel", "padding", "dilation", "size", "runs"),
    [(2, 2, 1, 6, False), (3, 2, 1, 6, True), (1, 1, 1, 6, False), (2, 2, 3, 2, False)],
)
def test_conv_when_a_window_lies_in_the_padding_then_left_float(
    kernel, padding, dilation, size, runs
):
    model = nn.Sequential(nn.Conv2d(2, 3, kernel, padding=padding, dilation=dilation), nn.ReLU())
    model.append(nn.Conv2d(3, 3, 1))
    x = noise(2, 2, size, size)
    ep = torch.export.export(model.eval(), (x,))
    prepared = prepare_pt2e(ep, CPU.quantizer())
    calibrate(prepared, [(x,)], progress=False)
    gm = convert_pt2e(prepared)
    reasons = [f.reason for f in provenance_of(gm).floats if "wholly in the padding" in f.reason]
    assert bool(reasons) != runs
    with torch.no_grad():
        torch.testing.assert_close(CPU.lower(gm).run(x), gm(x), **FLOAT_EPILOGUE)


@settings(max_examples=40)
@given(
    lead=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    has_bias=st.booleans(),
    post_op=st.sampled_from(sorted(LINEAR_POST_OPS)),
    shift=st.floats(-3, 3),
)
def test_linear_when_lowered_then_the_canonical_result(lead, sizes, has_bias, post_op, shift):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*sizes, bias=has_bias), LINEAR_POST_OPS[post_op]())
    x = noise(*lead, sizes[0], shift=shift)
    gm = quantized(model, x)
    avoid_ties(gm, x)
    module = fused(gm)
    assert any("qlinear_pointwise" in str(n.target) for n in module.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(module(x), gm(x), **FLOAT_EPILOGUE)


def test_conv1d_when_lowered_then_fused_and_equal():
    model = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 2, 3, stride=2))
    x = noise(2, 4, 16)
    gm = quantized(model, x)
    artifact = CPU.lower(gm)
    assert artifact.report.integer_ops["onednn.qconv_pointwise"] == 2
    with torch.no_grad():
        torch.testing.assert_close(artifact.run(x), gm(x), **FLOAT_EPILOGUE)


def c(i=4, o=4, k=3):
    return nn.Conv2d(i, o, k, padding=k // 2)


def own_input(m, x):
    """The residual is the convolution's own input: it must not be written while it is read."""
    y = torch.relu(m.a(x))
    return m.d(torch.relu(m.b(y) + y))


def read_again(m, x):
    """The residual is read once more after the sum."""
    y = torch.relu(m.a(x))
    z = torch.relu(m.b(torch.relu(m.c(y))) + y)
    return m.d(z) + m.e(y)


def chained(m, x):
    y = torch.relu(m.a(x))
    y = torch.relu(m.b(torch.relu(m.c(y))) + y)
    return m.d(torch.relu(m.e(y) + y))


def viewed(m, x):
    """A view of the residual is taken before the sum and read after it."""
    y = torch.relu(m.a(x))
    half = y[:, :4, :3]
    z = torch.relu(m.b(torch.relu(m.c(y))) + y)
    return m.d(z).mean((2, 3)) + m.e(half).mean((2, 3))


def read_by_a_fused_one(m, x):
    """The convolution that reads the residual stands before the sum, its relu behind it."""
    y = torch.relu(m.a(x))
    late = m.e(y)
    z = torch.relu(m.b(torch.relu(m.c(y))) + y)
    return m.d(z) * torch.relu(late)


def returned(m, x):
    y = torch.relu(m.a(x))
    return torch.relu(m.b(torch.relu(m.c(y))) + y), y


def of_input(m, x):
    return m.d(torch.relu(m.a(x) + x))


def float_summand(m, x):
    return torch.relu(m.a(x) + torch.sigmoid(m.b(x)))


def scaled_twice(m, x):
    y = torch.relu(m.a(x))
    return m.d(torch.relu(m.b(y) + m.c(y))) + torch.sigmoid(y)


RESIDUALS = [
    own_input,
    read_again,
    read_by_a_fused_one,
    chained,
    viewed,
    returned,
    of_input,
    float_summand,
    scaled_twice,
]


@pytest.mark.parametrize("fn", RESIDUALS)
@pytest.mark.parametrize("recipe", ["int8", "int8_reduced"])
def test_sum_when_fused_then_no_summand_is_overwritten(fn, recipe):
    torch.manual_seed(0)
    model, x = Fn(fn, a=c(), b=c(), c=c(), d=c(), e=c()), noise(2, 4, 8, 8)
    gm = quantized(model, x, recipe)
    module = fused(gm)
    assert any("qconv2d_pointwise" in str(n.target) for n in module.graph.nodes)
    kept = x.clone()
    with torch.no_grad():
        for _ in range(2):  # the second call sees what the first one wrote
            found, wanted = module(x), gm(x)
            torch.testing.assert_close(found, wanted, **FLOAT_EPILOGUE)
    assert torch.equal(x, kept)


def test_linear_sum_when_fused_then_the_residual_is_intact():
    torch.manual_seed(0)

    def block(m, x):
        y = m.a(x)
        return m.c(F.gelu(m.b(y))) + y, y

    model = Fn(block, a=nn.Linear(8, 8), b=nn.Linear(8, 16), c=nn.Linear(16, 8))
    x = noise(3, 5, 8)
    gm = quantized(model, x)
    module = fused(gm)
    assert any(n.target is torch.ops.onednn.qlinear_pointwise.binary for n in module.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(module(x), gm(x), **FLOAT_EPILOGUE)


def moved(m, x):
    y = torch.relu(m.a(x))
    y = torch.cat([F.max_pool2d(y, 3, 2, 1), F.max_pool2d(y, 3, 2, 1)], 1)
    n, channels, h, w = y.shape
    y = y.reshape(n, 2, channels // 2, h, w).transpose(1, 2).reshape(n, channels, h, w)
    return m.b(torch.relu(m.c(y)).flatten(1))


def test_movers_when_between_convolutions_then_on_integers():
    torch.manual_seed(0)
    model, x = Fn(moved, a=c(), c=c(8, 2), b=nn.Linear(32, 3)), noise(2, 4, 8, 8)
    gm = quantized(model, x)
    artifact = CPU.lower(gm)
    assert not any("dequantize" in name for name in artifact.report.float_ops)
    assert artifact.report.integer_ops["quantized.max_pool2d"] == 2
    assert artifact.report.integer_ops["quantize_once"] == 1
    with torch.no_grad():
        torch.testing.assert_close(artifact.run(x), gm(x), **FLOAT_EPILOGUE)


def small_net():
    return nn.Sequential(
        c(3, 8), nn.ReLU(), nn.MaxPool2d(2), c(8, 8), nn.Flatten(), nn.Linear(128, 4)
    )


def test_batch_when_dynamic_then_any_size():
    torch.manual_seed(0)
    x = noise(2, 3, 8, 8)
    gm = quantized(small_net(), x, dynamic_shapes={"input": {0: torch.export.Dim("n", max=64)}})
    artifact = CPU.lower(gm)
    for n in (1, 2, 7, 33):
        batch = noise(n, 3, 8, 8, seed=n)
        with torch.no_grad():
            torch.testing.assert_close(artifact.run(batch), gm(batch), **FLOAT_EPILOGUE)


def test_file_when_loaded_then_the_same_results_and_report(tmp_path):
    torch.manual_seed(0)
    x = noise(2, 3, 8, 8)
    gm = quantized(small_net(), x, dynamic_shapes={"input": {0: torch.export.Dim("n", max=64)}})
    artifact = CPU.lower(gm)
    artifact.save(tmp_path / "net.qpt2")
    loaded = CPU.load(tmp_path / "net.qpt2")
    batch = noise(5, 3, 8, 8)
    assert torch.equal(loaded.run(batch), artifact.run(batch))
    assert loaded.report.integer_ops == artifact.report.integer_ops
    assert loaded.report.provenance.tensors == artifact.report.provenance.tensors
    assert loaded.size_bytes == artifact.size_bytes == (tmp_path / "net.qpt2").stat().st_size
    # Also a plain exported program, for whoever has only torch.
    plain = torch.export.load(io.BytesIO((tmp_path / "net.qpt2").read_bytes())).module()
    with torch.no_grad():
        torch.testing.assert_close(plain(batch), gm(batch))


@pytest.mark.parametrize("content", [None, b"", b"no archive", "foreign"])
def test_file_when_not_ours_then_refused(tmp_path, content):
    path = tmp_path / "net.qpt2"
    if content == "foreign":
        with path.open("wb") as stream:
            torch.export.save(torch.export.export(nn.ReLU(), (torch.ones(1),)), stream)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"cannot read|no exported program|not written by it"):
        CPU.load(path)


@EVEN_KERNELS
def test_conv_when_padded_unevenly_then_float_with_the_reason():
    model = nn.Sequential(nn.Conv2d(3, 4, 2, padding="same"), nn.ReLU(), nn.Conv2d(4, 4, 1))
    gm = quantized(model, noise(1, 3, 8, 8))
    artifact = CPU.lower(gm)
    assert artifact.report.integer_ops["onednn.qconv_pointwise"] == 1
    reasons = {record.op: record.reason for record in artifact.report.provenance.floats}
    assert "the same on both sides" in reasons["aten.conv2d"]


def test_lower_when_a_weight_has_no_operator_then_refused_or_named():
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    ep = torch.export.export(model.eval(), (torch.tensor([[1, 2]]),))
    quantizer = ComposableQuantizer([EmbeddingQuantizer(), CPU.quantizer()])
    prepared = prepare_pt2e(ep, quantizer)
    calibrate(prepared, [(torch.tensor([[1, 2]]),)], progress=False)
    gm = convert_pt2e(prepared)
    with pytest.raises(UnsupportedError, match="strict=False"):
        CPU.lower(gm)
    artifact = CPU.lower(gm, strict=False)
    found = [region.what for region in artifact.report.float_regions]
    assert found.count("dequantize of a weight") == 1


def test_lower_when_done_then_the_canonical_graph_is_as_it_was():
    x = noise(1, 3, 8, 8)
    gm = quantized(small_net(), x)
    code, state = gm.code, {k: v.clone() for k, v in gm.state_dict().items()}
    CPU.lower(gm)
    assert gm.code == code
    assert all(torch.equal(v, state[k]) for k, v in gm.state_dict().items())


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return self.linear(x) + self.calls


def test_buffers_when_written_then_the_artifacts_own():
    x = noise(2, 4)
    gm = quantized(Counted(), x)
    artifact = CPU.lower(gm)
    before = dict(gm.named_buffers())["calls"].clone()
    first, second = artifact.run(x), artifact.run(x)
    torch.testing.assert_close(second, first + 1)
    assert torch.equal(dict(gm.named_buffers())["calls"], before)
    artifact.reset()
    assert torch.equal(artifact.run(x), first)
