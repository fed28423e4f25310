"""The CPU quantizer: what it annotates, and how it decides about 7-bit activations."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pt2e_quant.backends import get
from pt2e_quant.backends.cpu.backend import BACKEND
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.pair_sums import MOST, greatest_pairs
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import QuantizePerTensor
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact

pytestmark = pytest.mark.usefixtures("unmeasured")

_PROBE = "from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact as m; print(m())"


def activation_limits(gm):
    return {tuple(n.args[3:5]) for n in gm.graph.nodes if n.target is QuantizePerTensor}


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


@pytest.mark.parametrize(
    ("recipe", "limits"), [("int8_full", (0, 255)), ("int8_reduced", (0, 127))]
)
def test_recipe_when_named_then_its_range(quantize_with, make_noise, recipe, limits):
    gm = quantize_with(net(), (make_noise(1, 3, 6, 6),), BACKEND.quantizer(recipe))
    assert activation_limits(gm) == {limits}


class Attention(nn.Module):
    """A layer of self-attention with two heads of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.project(x).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(1, -1, 16))


def test_int8_bf16_when_a_model_has_attention_then_it_alone_is_bfloat16_and_as_near_to_float(
    quantize_with, make_noise, tmp_path
):
    torch.manual_seed(0)
    model, x = Attention(), make_noise(1, 20, 16)
    gm = quantize_with(model, (x,), BACKEND.quantizer("int8_bf16"), data=[(x,)])
    narrow = {
        str(n.target)
        for n in gm.graph.nodes
        if getattr(n.meta.get("val"), "dtype", None) is torch.bfloat16
    }
    assert narrow == {"aten.to.dtype", "aten.scaled_dot_product_attention.default"}
    artifact = get("cpu").lower(gm)
    targets = [n.target for n in artifact.program.graph.nodes]
    assert targets.count(torch.ops.onednn.qlinear_pointwise.default) == 2
    artifact.save(tmp_path / "net.qpt2")
    again = get("cpu").load(tmp_path / "net.qpt2")
    assert torch.equal(again.run(x), artifact.run(x))
    plain = get("cpu").lower(quantize_with(model, (x,), BACKEND.quantizer("int8"), data=[(x,)]))
    with torch.no_grad():
        expected = model(x)
    loss = sqnr_db([expected], [plain.run(x)]) - sqnr_db([expected], [artifact.run(x)])
    assert loss < 1


@pytest.mark.parametrize("recipe", ["int8", "int8_bf16", "int8_full"])
def test_recipe_when_converted_then_pairs_fit_unless_it_is_full(quantize_with, make_noise, recipe):
    gm = quantize_with(net(), (make_noise(1, 3, 6, 6),), BACKEND.quantizer(recipe))
    assert activation_limits(gm) == {(0, 255)}
    held = [constant_of(gm, node) for node in gm.graph.find_nodes(op="get_attr")]
    greatest = [float(greatest_pairs(v).max()) for v in held if v.dtype is torch.int8]
    assert len(greatest) == 2
    assert (max(greatest) <= MOST) is (recipe != "int8_full")


@pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and onednn_is_exact()),
    reason="this machine has no VNNI to switch off",
)
@pytest.mark.parametrize(
    ("isa", "flag", "printed"),
    [
        ("AVX2", "avx2", "False"),
        ("AVX2_VNNI", "avx_vnni", "True"),
        ("AVX512_CORE_VNNI", "avx512_vnni", "True"),
    ],
)
def test_probe_when_the_instruction_set_is_capped_then_the_saturation_is_seen(isa, flag, printed):
    if flag not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this machine has no {flag}")
    # torch.cpu's flags stay true under this cap: only a product tells.
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROBE],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == printed


def test_recipe_when_unknown_then_near_names():
    with pytest.raises(ConfigError, match="int8_reduced"):
        BACKEND.quantizer("int8_reducd")


def qdq_around(gm, name):
    node = next(n for n in gm.graph.nodes if name in n.name)
    return "dequantize" in node.args[0].name, any("quantize" in u.name for u in node.users)


def test_max_pool_when_between_convolutions_then_on_integers(quantize_with, make_noise):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1))
    gm = quantize_with(model, (make_noise(1, 3, 8, 8),))
    assert qdq_around(gm, "max_pool2d") == (True, True)


def test_max_pool_when_read_in_float_then_float(quantize_with, make_noise):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Sigmoid())
    gm = quantize_with(model, (make_noise(1, 3, 8, 8),))
    assert qdq_around(gm, "max_pool2d") == (False, False)
    reasons = {r.op: r.reason for r in provenance_of(gm).floats}
    assert "needs: a reader that works in integers" in reasons["aten.max_pool2d"]


class Added(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return torch.add(self.a(x), self.b(x), alpha=self.scale)


@settings(max_examples=10)
@given(scale=st.sampled_from([1, 2, 0.5]))
def test_sum_when_scaled_then_not_fused(scale):
    from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e

    ep = torch.export.export(Added(scale).eval(), (torch.ones(1, 3, 4, 4),))
    prepared = prepare_pt2e(ep, BACKEND.quantizer())
    add = next(n for n in prepared.graph.nodes if n.name == "add")
    observed = [n for n in add.all_input_nodes if "activation_post_process" in n.name]
    assert len(observed) == (scale == 1)
