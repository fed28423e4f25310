"""Programs compiled ahead of time: with state, with activations quantized at run time."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from pt2e_quant.backends import get
from pt2e_quant.backends.cpu.load_compiled import load_compiled
from pt2e_quant.backends.cpu.passes.module_passes import write_out
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.unpack_op import Unpack
from pt2e_quant.flow.calibrate.calibrate import calibrate, preserve_buffers
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact
from pt2e_quant.passes.caches.quantize_caches import quantize_caches

pytestmark = pytest.mark.usefixtures("unmeasured")

CPU = get("cpu")
LENGTH = 16
LEAST_DB = 40.0
"""Float rounding moves a value in thousands to the next integer of its row."""
WITHOUT_THIS_PACKAGE = """
import sys, torch
run = torch._inductor.aoti_load_package(sys.argv[1])
x, at = torch.load(sys.argv[2])
torch.save([run(x[:, :3], at[:3]), run(x[:, 3:], at[3:])], sys.argv[3])
assert not any(name.startswith("pt2e_quant") for name in sys.modules)
"""

needs_vnni = pytest.mark.skipif(not onednn_is_exact(), reason="oneDNN saturates here")


class Attention(nn.Module):
    """Causal attention over a cache of keys and of values."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("keys", torch.zeros(1, 2, LENGTH, width // 2))
        self.register_buffer("values", torch.ones(1, 2, LENGTH, width // 2))

    def forward(self, x, at):
        q, k, v = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        keys, values = self.keys.index_copy_(2, at, k), self.values.index_copy_(2, at, v)
        scores = (q @ keys.transpose(-1, -2)) / 4
        seen = torch.arange(LENGTH) <= at[:, None]
        mixed = scores.masked_fill(~seen, -1e9).softmax(-1) @ values
        return self.out(mixed.transpose(1, 2).flatten(-2))


def lowered(recipe, *finishing, width=64):
    torch.manual_seed(0)
    tokens = torch.export.Dim("tokens", min=1, max=LENGTH)
    ep = torch.export.export(
        Attention(width).eval(),
        (torch.randn(1, 3, width), torch.arange(3)),
        dynamic_shapes=({1: tokens}, {0: tokens}),
    )
    quantizer = CPU.quantizer(recipe)
    quantizer.finishing = (*quantizer.finishing, *finishing)
    prepared = prepare_pt2e(ep, quantizer)
    if recipe == "int8":
        calibrate(prepared, [(torch.randn(1, LENGTH, width), torch.arange(LENGTH))], progress=False)
    gm = convert_pt2e(prepared)
    return gm, CPU.lower(gm, (torch.randn(1, 8, width), torch.arange(8)))


def decoded(run, x, prompt):
    """Results of a prompt and of what follows it, token by token."""
    at = torch.arange(x.shape[1])
    cuts = [slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, x.shape[1]))]
    return torch.cat([run(x[:, cut], at[cut]) for cut in cuts], dim=1)


def check_state(gm, artifact, path, width=64):
    """Compile; decode as the graph, from any prompt, again and again, also from the file."""
    x = torch.randn(1, 11, width)
    expected = {}
    for prompt in (1, 6):
        with torch.no_grad(), preserve_buffers(gm, capture_of(gm)):
            expected[prompt] = decoded(gm, x, prompt)
    artifact.run(x[:, :5], torch.arange(5))  # a compiled program starts afresh all the same
    artifact.compile(path)
    loaded = load_compiled(path)
    for run, holder in (
        (artifact.run, artifact),
        (lambda x, at: loaded([x, at])[0], loaded),
    ):
        for prompt, wanted in expected.items():
            found = decoded(run, x, prompt)
            assert sqnr_db([wanted], [found]) >= LEAST_DB
            assert not torch.equal(decoded(run, -x, prompt), found)
            holder.reset()
            assert torch.equal(decoded(run, x, prompt), found)
            holder.reset()


@needs_vnni
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # torch's own, at compilation
def test_cache_when_compiled_then_kept_reset_and_read_without_this_package(tmp_path):
    path, inputs, results = (tmp_path / name for name in ("net.pt2", "inputs.pt", "results.pt"))
    gm, artifact = lowered("int8_dynamic")
    check_state(gm, artifact, path)
    x, at = torch.randn(1, 9, 64), torch.arange(9)
    torch.save([x, at], inputs)
    names = [str(name) for name in (path, inputs, results)]
    subprocess.run([sys.executable, "-c", WITHOUT_THIS_PACKAGE, *names], check=True, timeout=300)
    first, second = torch.load(results)
    assert torch.equal(artifact.run(x[:, :3], at[:3]), first)
    assert torch.equal(artifact.run(x[:, 3:], at[3:]), second)


@needs_vnni
@pytest.mark.slow  # compiles C++
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["int8", "w8", "w4_g32", "a8w4"])
def test_cache_when_compiled_in_any_recipe_then_kept_and_reset(recipe, tmp_path):
    check_state(*lowered(recipe), tmp_path / "net.pt2")


@needs_vnni
@pytest.mark.slow  # compiles C++
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [4, 8])
def test_cache_of_integers_when_compiled_then_kept_and_reset(bits, tmp_path):
    check_state(*lowered("int8_dynamic", quantize_caches(bits)), tmp_path / "net.pt2")


@needs_vnni
@pytest.mark.slow  # compiles C++
@pytest.mark.filterwarnings("ignore")
def test_sums_that_float32_cannot_hold_when_compiled_then_near_the_artifact(tmp_path):
    gm, artifact = lowered("int8_dynamic", width=4096)
    assert artifact.report.integer_ops["pt2e_quant.int8_linear"] == 2
    check_state(gm, artifact, tmp_path / "net.pt2", width=4096)


@needs_vnni
def test_program_when_written_out_then_the_same_results_in_torchs_own():
    _, artifact = lowered("int8_dynamic", quantize_caches(4))
    x = torch.randn(1, 7, 64)
    with torch.no_grad():
        written = write_out(artifact.exported_program()).module()
        assert torch.equal(decoded(written, x, 4), decoded(artifact.run, x, 4))
    names = {str(node.target) for node in written.graph.nodes if node.op == "call_function"}
    assert all(".pack_" in name for name in names if name.startswith("pt2e_quant."))


def test_operator_without_a_written_form_when_compiled_then_refused_by_name():
    class Unpacked(nn.Module):
        def forward(self, x):
            return Unpack(x, 4, True, [2, 8]) + 1

    ep = torch.export.export(Unpacked(), (torch.zeros(2, 4, dtype=torch.uint8),))
    with pytest.raises(UnsupportedError, match=r"pt2e_quant\.unpack.*no form") as caught:
        write_out(ep)
    assert "node    unpack" in str(caught.value)


def test_buffer_that_is_read_without_an_input_when_compiled_then_refused_by_name():
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls.add_(1)
            return x + self.calls

    ep = torch.export.export(Counted(), (torch.zeros(4),))
    with pytest.raises(UnsupportedError, match="keep what it gave at first") as caught:
        write_out(ep, ["calls"])
    assert "self.calls.add_(1)" in str(caught.value)
