"""Functions that torch's exporter lacks are written out, or refused by their node."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import pt2e_quant as pq
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.flow.calibrate.sample import sqnr_db
from tests.parameters import in_groups, named_subset


def _matrices(x):
    """[batch, 2, 2], far from ones without an inverse."""
    return x[:, :4].unflatten(1, (2, 2)).tanh() + 3.0 * torch.eye(2)


FUNCTIONS = {
    "a pad behind a crop of all": lambda x, y: F.pad(x, (-6, 8), mode="replicate") + y[:, :1],
    "soft margin loss of little": lambda x, y: F.soft_margin_loss(
        x.abs() + 4, y.abs() + 4, reduction="none"
    ),
    "hypot": lambda x, y: torch.hypot(x, y),
    "copysign": lambda x, y: torch.copysign(x, y),
    "atan2": lambda x, y: torch.atan2(x, y),
    "atan2 of the sign": lambda x, y: torch.atan2(y, x - 1.0),
    "atan2 of zeros": lambda x, y: torch.atan2(x * 0.0, y) + torch.atan2(x.relu(), -y.abs()),
    "maxima of a row": lambda x, y: F.adaptive_max_pool1d(x.unsqueeze(0), 6)[0] + y,
    "rrelu": lambda x, y: F.rrelu(x, 0.1, 0.5) + y,
    "kthvalue": lambda x, y: x.kthvalue(3, -1, keepdim=True).values + y,
    "median": lambda x, y: x.median(-1).values.unsqueeze(-1) + y,
    "lgamma and digamma": lambda x, y: (
        torch.lgamma(x.abs() + 1) + torch.digamma(y.abs() + 1).tanh()
    ),
    "log_sigmoid": lambda x, y: F.logsigmoid(x * 100) + y,
    "logaddexp": lambda x, y: torch.logaddexp(x * 100, x) + y,
    "logaddexp2": lambda x, y: torch.logaddexp2(x * 100, x) + y,
    "logcumsumexp": lambda x, y: (x * 100).logcumsumexp(1) + y,
    "log_ndtr": lambda x, y: torch.special.log_ndtr(x * 20) + y,
    "binary cross-entropy": lambda x, y: F.binary_cross_entropy_with_logits(
        x * 100, y.sigmoid(), reduction="none"
    ),
    "log1p and expm1 of little": lambda x, y: (
        1e6 * torch.log1p(x.abs() * 1e-6) + 1e6 * torch.expm1(x * 1e-6) + y
    ),
    "functions made of log1p, of little": lambda x, y: (
        1e6 * (F.logsigmoid(x.abs() + 14) + torch.special.xlog1py(x, x.abs() * 1e-6)) + y
    ),
    "functions of float64": lambda x, y: (
        F.gelu(x.double()) + F.mish(x.double()) + F.elu(y.double().clamp(-9, 9))
    ).float(),
    "integers of 16 bits": lambda x, y: (
        x + torch.where(x > 0, x.round().to(torch.int16), torch.tensor(3, dtype=torch.int16))
    ),
    "median of the batch": lambda x, y: x.median(0).values + y,
    "cummin of the batch": lambda x, y: x.cummin(0)[0] + x.cummax(0)[1] + y,
    "cumprod of the batch": lambda x, y: x.cumprod(0) + y,
    "erfinv": lambda x, y: torch.erfinv(x.tanh() * 0.9) + y,
    "i0 and i1e": lambda x, y: torch.i0(x) + torch.special.i1e(y),
    "fmax and fmin": lambda x, y: torch.fmax(x, y) - torch.fmin(x, y.tanh()),
    "cummax": lambda x, y: x.cummax(-1)[0] + y.cummin(-1)[0].tanh(),
    "cumprod": lambda x, y: x.cumprod(-1) + y,
    "mode": lambda x, y: x.round().mode(-1)[0].unsqueeze(-1) + y,
    "searchsorted": lambda x, y: torch.searchsorted(torch.tensor([-1.0, 0.0]), x.round()) + y,
    "put": lambda x, y: x.put(torch.tensor([1, 2]), torch.tensor([5.0, 6.0])) + y,
    "transposed convolution": lambda x, y: F.conv_transpose1d(
        x.unsqueeze(0), y.unsqueeze(-1), y[0], output_padding=1, dilation=2
    ),
    "smoothed cross-entropy": lambda x, y: F.cross_entropy(
        x, y.argmax(-1), label_smoothing=0.3, reduction="none"
    ),
    "power of a size": lambda x, y: (x * 0.1).tanh().abs() ** x.shape[0] + y,
    "product with a size": lambda x, y: torch.addcmul(y, x, x, value=x.shape[0]),
    "greater than a size": lambda x, y: torch.maximum(x, torch.tensor(0.1) * x.shape[0]) + y,
    "sum into all rows": lambda x, y: (
        x[:1, None].index_put((torch.tensor([0]),), torch.tensor(0.5), accumulate=True)[0] + y
    ),
    "quotient of zeros": lambda x, y: (x * 0.0) / ((x * 0.0).sum(-1, keepdim=True) + 1e-8) + x + y,
    "norm of zeros": lambda x, y: F.rms_norm(x * 0.0, (6,), eps=1e-9) + x + y,
    "inverse": lambda x, y: torch.linalg.inv(_matrices(x)).sum((-2, -1)).unsqueeze(-1) + y,
    "determinant": lambda x, y: _matrices(x).det().unsqueeze(-1) + y,
    "triangle": lambda x, y: (
        torch.linalg.cholesky(_matrices(x) @ _matrices(x).mT).sum(-1).sum(-1, keepdim=True) + y
    ),
    "matrix exponential": lambda x, y: torch.matrix_exp(_matrices(x)).flatten(1)[:, :1] + y,
    "cdist": lambda x, y: torch.cdist(x, y.clamp(-10, 10)),
    "cdist of 1": lambda x, y: torch.cdist(x, y.clamp(-10, 10), p=1.0),
    "cdist of 3": lambda x, y: torch.cdist(x, y.clamp(-10, 10), p=3.0),
    "cdist of inf": lambda x, y: torch.cdist(x, y.clamp(-10, 10), p=float("inf")),
}


class _Between(nn.Module):
    """Functions of linears' results and of an input with signed zeros."""

    def __init__(self, *functions) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 6) for _ in functions)
        self.functions = functions

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(self.functions, self.linears, strict=True)
        return tuple(function(linear(x), y) for function, linear in pairs)


def call(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(batch, n, generator=generator) for n in (8, 6))
    y[0, :4] = torch.tensor([0.0, -0.0, 1e30, -1e-30])
    return x, y


@pytest.mark.parametrize("names", in_groups(FUNCTIONS, 4))
def test_functions_when_lowered_then_as_their_graph_at_every_size(names):
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = _Between(*(FUNCTIONS[name] for name in names)).eval()
    batch = Dim("batch", min=1, max=16)
    program = torch.export.export(model, call(4, 0), dynamic_shapes=({0: batch}, {0: batch}))
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(program, backend.quantizer("int8"))
    pq.calibrate(prepared, [call(4, 1)], progress=False)
    graph = pq.convert_pt2e(prepared)
    artifact = backend.lower(graph)
    for size in (1, 16, 3):
        results = artifact.run(*call(size, 2)), graph(*call(size, 2))
        for name, found, expected in zip(names, *results, strict=True):
            finite = expected.abs() < 1e20
            assert sqnr_db(expected[finite], found[finite]) > 80, name
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("function", [F.celu, F.elu, F.selu])
def test_function_when_its_operator_is_inexact_then_written_with_others(function):
    """ONNX Runtime takes the exponential of what is near 0, and 1 from it."""
    pytest.importorskip("onnxruntime")

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), function(x * 1e-8)

    torch.manual_seed(0)
    model, x = Beside().eval(), torch.randn(4, 8)
    artifact = pq.quantize(model, (x,), calibration_data=[(x,)], backend="onnx", progress=False)
    assert sqnr_db(model(x)[1], artifact.run(x)[1]) > 100
    (region,) = [r for r in artifact.report.float_regions if "elu" in r.node]
    assert region.what == "runs in float, with plain operators"


IMAGES = {
    "places of adaptive maxima": lambda x, w: (
        F.adaptive_max_pool2d(x, (3, 2), return_indices=True)[1] * 1.0
    ),
    "adaptive maxima": lambda x, w: F.adaptive_max_pool2d(x, (3, 2)),
    "an anti-aliased resize": lambda x, w: F.interpolate(
        x, size=(5, 4), mode="bilinear", antialias=True
    ),
    "a resize by a factor": lambda x, w: F.interpolate(
        x, scale_factor=1.5, mode="bicubic", antialias=True
    ),
    "bicubic by 2": lambda x, w: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "bicubic to a size": lambda x, w: F.interpolate(x, (7, 5), mode="bicubic"),
    "means of uneven windows": lambda x, w: F.adaptive_avg_pool2d(x, (3, 2)),
    "a sum into places": lambda x, w: x.index_put(
        (torch.tensor([0, 0]),), w[0, 0, 0, 0], accumulate=True
    ),
    "nothing at size 1": lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
}
"""Functions of an image float32[batch, 4, height, width] and a weight float32[4, 4, 2, 2]."""


@pytest.mark.parametrize(
    ("backend", "name"),
    # ExecuTorch has no transposed convolution without a result (test_delegate_limits.py).
    named_subset(
        [("onnx", name) for name in IMAGES] + [("xnnpack", name) for name in list(IMAGES)[:-1]],
        ("onnx", "places of adaptive maxima"),
        ("onnx", "an anti-aliased resize"),
        ("onnx", "bicubic by 2"),
        ("onnx", "bicubic to a size"),
        ("onnx", "nothing at size 1"),
        ("xnnpack", "a resize by a factor"),
        ("xnnpack", "a sum into places"),
        ("xnnpack", "bicubic by 2"),
    ),
)
def test_image_function_when_its_input_is_dynamic_then_as_its_graph_at_every_size(backend, name):
    pytest.importorskip({"onnx": "onnxruntime", "xnnpack": "executorch"}[backend])

    class OfImages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.weight = nn.Parameter(torch.randn(4, 4, 2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return IMAGES[name](self.conv(x), self.weight)

    torch.manual_seed(0)
    images = [torch.randn(2, 3, *size) for size in ((6, 8), (2, 7), (16, 16), (5, 3))]
    # torch 2.13 itself resizes an image with a width of 1 wrongly.
    width = Dim("width", min=3, max=16)
    sizes = {0: Dim("batch", max=4), 2: Dim("height", min=1, max=16), 3: width}
    program = torch.export.export(OfImages().eval(), (images[0],), dynamic_shapes=(sizes,))
    prepared = pq.prepare_pt2e(program, pq.backends.get(backend).quantizer("int8"))
    pq.calibrate(prepared, [(image,) for image in images], progress=False)
    graph = pq.convert_pt2e(prepared)
    artifact = pq.backends.get(backend).lower(graph)
    for image in (*images, images[0][:, :, :1], images[0]):
        torch.testing.assert_close(artifact.run(image), graph(image), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("function", "node", "word"),
    [
        (lambda x, y: torch.nextafter(x, y), "nextafter", "nextafter"),
        (lambda x, y: torch.frexp(x)[0] + y, "frexp", "frexp"),
    ],
)
def test_function_when_onnx_has_none_then_refused_with_its_node(function, node, word):
    pytest.importorskip("onnxruntime")
    model = _Between(function)
    with pytest.raises(UnsupportedError, match=word) as error:
        pq.quantize(
            model, call(4, 0), calibration_data=[call(4, 1)], backend="onnx", progress=False
        )
    assert error.value.node_name == node
    assert "test_written_functions.py" in str(error.value)


BYTES_AND_BOOLEANS = {
    "any of bytes": lambda x: (x.abs() * 2).to(torch.uint8).any(-1),
    "all of bytes": lambda x: (x.abs() * 2).to(torch.uint8).all(),
    "quotient of booleans": lambda x: (x > 0) // 2,
    "power of booleans": lambda x: (x > 0) ** 2,
    "stable order": lambda x: torch.argsort(x.relu().round(), dim=0, descending=True, stable=True),
}


class Beside(nn.Module):
    """A linear, and a function of its input as a second result."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor):
        return self.linear(x), self.function(x)


@pytest.mark.parametrize("name", BYTES_AND_BOOLEANS)
def test_function_of_bytes_or_booleans_when_lowered_then_torch_s_values_and_dtype(name):
    torch.manual_seed(0)
    data = [torch.randn(4, 8) for _ in range(2)]
    model = Beside(BYTES_AND_BOOLEANS[name]).eval()
    artifact = pq.quantize(model, (data[0],), calibration_data=data, backend="onnx", progress=False)
    expected, found = model(data[1])[1], artifact.run(data[1])[1]
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


class _Selecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), torch.masked_select(x, x[0] > 0) * 2


def test_masked_select_when_its_size_depends_on_values_then_as_torch():
    torch.manual_seed(0)
    model, data = _Selecting().eval(), [(torch.randn(4, 8),) for _ in range(3)]
    artifact = pq.quantize(
        model, data[0], calibration_data=data[:1], backend="onnx", progress=False
    )
    for call in data:
        torch.testing.assert_close(artifact.run(*call)[1], model(*call)[1])


OF_SIZES = {
    "whole power": lambda x: torch.arange(-9, 9) ** x.shape[0],
    "whole power of a size": lambda x: (1 + x.shape[0] % 7) ** torch.arange(8),
    "power of booleans": lambda x: (x > 0) ** x.shape[0],
    "float power of a size": lambda x: x.shape[0] ** x.sign(),
    "shift to the left": lambda x: torch.arange(8) << x.shape[0],
    "shift to the right": lambda x: (torch.arange(-4, 4) * 99) >> x.shape[0],
    "remainder": lambda x: torch.arange(-8, 8) % x.shape[0],
    "remainder of a size": lambda x: x.shape[0] % torch.arange(1, 8),
    "bits": lambda x: (torch.arange(8) & x.shape[0]) | (torch.arange(8) ^ x.shape[0]),
}


@pytest.mark.parametrize("name", OF_SIZES)
@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_function_of_integers_when_its_number_is_a_size_then_as_torch_at_every_size(backend, name):
    pytest.importorskip({"onnx": "onnxruntime", "xnnpack": "executorch"}[backend])
    torch.manual_seed(0)
    model, data = Beside(OF_SIZES[name]).eval(), torch.randn(6, 8)
    artifact = pq.quantize(
        model,
        (data,),
        calibration_data=[data],
        dynamic_shapes=({0: Dim("batch", min=1, max=32)},),
        backend=backend,
        progress=False,
    )
    for size in (32, 1, 6):
        x = torch.randn(size, 8)
        found, expected = artifact.run(x)[1], model(x)[1]
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
