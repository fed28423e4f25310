"""Every scheme by name on the runtimes' backends: it runs near its graph, or is refused by name.

Nothing may come out that is far from the canonical graph without a word.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.artifact import is_installed
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.scheme_names import scheme_named

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))

from toy_formats import converted, model_and_input, sqnr

from tests.needs_vnni import NEEDS_VNNI

pytestmark = pytest.mark.usefixtures("unmeasured")

NAMES = ("cpu", "onnx", "xnnpack")
INTEGERS = ["int8_dynamic", "int8_dynamic_per_tensor", "a16w8", "a16w4", "w8", "w4_g32", "w3", "w2"]
INTEGERS += ["a8w4", "a8w4_g32", "a8w3_g32", "w5_g64"]
SCHEMES = [*INTEGERS, *FORMAT_SCHEMES]


def backend_named(name: str) -> Backend:
    backend = pq.backends.get(name)
    for package in backend.packages:
        if not is_installed(package):
            pytest.skip(f"needs {package}")
    return backend


def nearest_in(text: str) -> str:
    """The recipe that a refusal names."""
    found = re.search(r'nearest (?:recipe )?it runs is "([^"]+)"', text)
    assert found is not None, text
    return found[1]


@pytest.mark.parametrize("name", [*NAMES, "cuda"])
def test_quantizer_when_asked_for_a_scheme_then_made_or_refused_with_one_that_runs(name):
    backend = backend_named(name)
    for scheme in SCHEMES:
        if scheme in backend.recipes:
            assert backend.quantizer(scheme).scheme is not None
            continue
        with pytest.raises(ConfigError, match=f'"{re.escape(scheme)}"') as refused:
            backend.quantizer(scheme)
        assert nearest_in(str(refused.value.fix)) in backend.recipes, scheme


LIMBS = {"pt2e_quant.linear_of_limbs": 2}


@pytest.mark.parametrize(
    ("name", "recipe", "scales", "operators"),
    [
        pytest.param("cpu", "w8", ScaleFormat(dtype=torch.float16), LIMBS, marks=NEEDS_VNNI),
        pytest.param("cpu", "w4_g32", ScaleFormat(dtype=torch.bfloat16), LIMBS, marks=NEEDS_VNNI),
        ("onnx", "w4_g32", ScaleFormat(dtype=torch.float16), {"MatMulNBits": 2}),
        ("onnx", "w8", ScaleFormat(double_group=256), {}),
        # XNNPACK rounds the scales of groups to bfloat16; these are so already.
        ("xnnpack", "a8w4_g32", ScaleFormat(dtype=torch.bfloat16), {"FullyConnected": 2}),
    ],
)
def test_scales_when_kept_in_another_form_then_fewer_bytes_and_the_same_kernels(
    name, recipe, scales, operators
):
    backend = backend_named(name)
    model, (x,) = model_and_input()

    def quantized(quantizer):
        return pq.convert_pt2e(pq.prepare_pt2e(torch.export.export(model, (x,)), quantizer))

    kept = quantized(backend.quantizer(recipe).with_scales(scales))
    assert stored(kept) < stored(quantized(backend.quantizer(recipe)))
    artifact = backend.lower(kept, (x,))
    assert artifact.report.integer_ops == operators
    # One activation that is rounded the other way leaves 65 dB, other scales 47.
    assert sqnr(kept(x), artifact.run(x)) > 60


class Cached(nn.Module):
    """Keys by index_copy_, values through a part of a buffer that is not empty at first."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 32)
        self.register_buffer("keys", torch.zeros(1, 16, 32))
        self.register_buffer("values", torch.randn(1, 16, 32))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        new = self.project(x)
        self.keys.index_copy_(1, at, new)
        self.values[:, at] = new * 2
        return torch.softmax(x @ self.keys.transpose(1, 2), -1) @ self.values


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", NAMES)
def test_caches_when_lowered_then_run_token_by_token_as_their_graph(name, bits, tmp_path):
    backend = backend_named(name)
    torch.manual_seed(0)
    model, call = Cached().eval(), (torch.randn(1, 1, 32), torch.tensor([3]))
    quantizer = backend.quantizer("int8_dynamic")
    quantizer.quantize_caches(bits=bits)
    gm = pq.convert_pt2e(pq.prepare_pt2e(torch.export.export(model, call), quantizer))
    artifact = backend.lower(gm, call)
    artifact.save(tmp_path / f"x{backend.suffix}")
    loaded = backend.load(tmp_path / f"x{backend.suffix}")
    for at in range(4):
        x = torch.randn(1, 1, 32)
        place = torch.tensor([at])
        expected, graph = model(x, place), gm(x, place)
        for program in (artifact, loaded):
            found = program.run(x, place)
            assert sqnr(expected, found) > 6 * bits - 20
            # A row whose linear is rounded the other way is a step of int8 away.
            assert sqnr(graph, found) > 45


def stored(gm: torch.fx.GraphModule) -> int:
    return sum(r.size_after + r.qparams for r in pq.provenance_of(gm).sizes)


RUN = [("onnx", "nf4"), ("xnnpack", "nf4"), ("xnnpack", "fp8_weight_only"), ("onnx", "mxfp8")]
RUN += [("onnx", "a16w8"), ("onnx", "a16w4"), ("xnnpack", "a16w8"), ("cpu", "a16w4")]
RUN += [("cpu", "w8"), ("cpu", "w4_g32"), ("cpu", "w3"), ("cpu", "nf4")]
RUN += [("onnx", "fp8_dynamic"), ("xnnpack", "w3"), ("xnnpack", "w1"), ("xnnpack", "mxfp4")]
SLOW = [(name, scheme) for name in NAMES for scheme in SCHEMES if (name, scheme) not in RUN]


@pytest.mark.parametrize(
    ("name", "scheme"), [*RUN, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_graph_when_lowered_then_near_it_or_refused_with_node_module_source_and_fix(name, scheme):
    backend = backend_named(name)
    if scheme in ("lut7", "lut8"):
        pytest.skip("tables of this toy model's rows take more than the rows: convert refuses")
    _, gm = converted(scheme_named(scheme))
    x = torch.randn(3, 5, 128)
    refused: Exception | None = None
    try:
        artifact = backend.lower(gm, (x,))
    except UnsupportedError as error:
        refused = error
    if refused is None:
        other = torch.randn(3, 5, 128)
        assert sqnr(gm(other), artifact.run(other)) > 36
        return
    assert scheme not in backend.recipes
    text = str(refused)
    assert re.search(r"node +\S+.*\s+module +[02]\s", text), text
    assert re.search(r"source +\S+:\d+", text), text
    assert "fix" in text
    # Integers that torch's own operators say can be run in float with strict=False.
    assert scheme not in FORMAT_SCHEMES or nearest_in(text) in backend.recipes
