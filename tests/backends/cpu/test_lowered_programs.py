"""The fused program as torch's tools take it: exported, saved, compiled; profiled; extended."""

import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from examples.own_cpu_kernel import POOL
from pt2e_quant.backends import get
from pt2e_quant.backends.cpu import artifact as artifact_module
from pt2e_quant.backends.cpu import load_compiled as compiling
from pt2e_quant.backends.cpu import load_compiled as loading
from pt2e_quant.backends.cpu.load_compiled import load_compiled
from pt2e_quant.core.errors import ArtifactError, ConfigError, InputError, UnsupportedError
from pt2e_quant.core.qdq import QuantizePerTensor

pytestmark = pytest.mark.usefixtures("unmeasured")

CPU = get("cpu")
BATCH = torch.export.Dim("n", max=64)
# The float epilogue in another order of operations.
FLOAT_EPILOGUE = {"rtol": 1e-5, "atol": 1e-5}


class Net(nn.Module):
    """A residual convolution, pools, a view of a channels-last value, a residual linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d = nn.Linear(128, 128), nn.Linear(128, 4)

    def forward(self, x):
        y = torch.relu(self.a(x))
        y = F.max_pool2d(torch.relu(self.b(y) + y), 2)
        z = y.view(y.shape[0], -1)
        return self.d(self.c(z) + z)


@pytest.fixture
def lowered(quantize_with, make_noise):
    torch.manual_seed(0)
    x = make_noise(2, 3, 8, 8)
    gm = quantize_with(Net(), (x,), dynamic_shapes={"x": {0: BATCH}})
    return gm, CPU.lower(gm)


def test_program_when_exported_saved_and_loaded_then_the_same_results(lowered, make_noise):
    gm, artifact = lowered
    stream = io.BytesIO()
    torch.export.save(artifact.exported_program(), stream)
    stream.seek(0)
    loaded = torch.export.load(stream).module()
    for n in (1, 5):
        x = make_noise(n, 3, 8, 8, seed=n)
        with torch.no_grad():
            assert torch.equal(loaded(x), artifact.run(x))
            torch.testing.assert_close(loaded(x), gm(x), **FLOAT_EPILOGUE)


def test_program_when_traced_by_torch_compile_then_one_graph_and_equal(lowered, make_noise):
    _, artifact = lowered
    compiled = torch.compile(artifact.program, backend="aot_eager", fullgraph=True)
    for n in (2, 3):
        x = make_noise(n, 3, 8, 8, seed=n)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), artifact.run(x), **FLOAT_EPILOGUE)


@pytest.mark.slow  # compiles C++
@pytest.mark.filterwarnings("ignore")  # torch's own, at compilation
def test_artifact_when_compiled_then_near_the_module_for_any_batch(lowered, make_noise, tmp_path):
    _, artifact = lowered
    batches = {n: make_noise(n, 3, 8, 8, seed=n) for n in (1, 2, 7)}
    expected = {n: artifact.run(x) for n, x in batches.items()}
    artifact.compile(tmp_path / "net.pt2")
    for n, x in batches.items():
        kept = x.clone()
        # A residual sum is rounded once more: a step of the last linear's input at most.
        torch.testing.assert_close(artifact.run(x), expected[n], rtol=1e-2, atol=1e-2)
        assert torch.equal(x, kept)
    again = torch._inductor.aoti_load_package(str(tmp_path / "net.pt2"))
    torch.testing.assert_close(again(batches[7]), artifact.run(batches[7]))
    (found,) = load_compiled(tmp_path / "net.pt2")([batches[7]])
    assert torch.equal(found, artifact.run(batches[7]))


@pytest.mark.slow  # compiles C++
@pytest.mark.filterwarnings("ignore")  # torch's own, at compilation
def test_load_compiled_when_weights_are_packed_then_they_lie_on_cache_lines(
    lowered, tmp_path, monkeypatch
):
    _, artifact = lowered
    artifact.compile(tmp_path / "net.pt2")
    seen = []
    align = loading.align_weights

    def keep(runner):
        align(runner)
        seen.append({k: v for k, v in runner.extract_constants_map(False).items() if v.is_mkldnn})

    monkeypatch.setattr(loading, "align_weights", keep)
    load_compiled(tmp_path / "net.pt2")
    (weights,) = seen
    assert len(weights) == 4
    assert all(torch.ops.mkldnn.data_ptr(weight) % 64 == 0 for weight in weights.values())


def test_compile_when_the_result_is_wrong_then_refused_and_the_module_runs(
    lowered, make_noise, monkeypatch, tmp_path
):
    _, artifact = lowered
    x = make_noise(2, 3, 8, 8)
    expected = artifact.run(x)
    monkeypatch.setattr(artifact_module, "compile_program", lambda *program: b"")
    zeros = [torch.zeros_like(expected)]

    class Wrong:
        written = ()

        def __call__(self, leaves):
            return zeros

        def reset(self):
            pass

    monkeypatch.setattr(artifact_module, "load_compiled", lambda source: Wrong())
    with pytest.raises(ArtifactError, match="differs from the canonical graph"):
        artifact.compile(tmp_path / "net.pt2")
    assert torch.equal(artifact.run(x), expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, b"", b"PK\x05\x06" + bytes(18), b"no zip file"])
def test_load_compiled_when_it_is_no_program_then_named(tmp_path, content):
    path = tmp_path / "net.pt2"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"net\.pt2"):
        load_compiled(path)


def test_compile_when_there_is_no_compiler_then_refused(lowered, monkeypatch):
    _, artifact = lowered
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match="C\\+\\+ compiler"):
        artifact.compile()


def test_compile_when_the_path_is_wrong_then_refused(lowered, tmp_path, monkeypatch):
    _, artifact = lowered
    with pytest.raises(ArtifactError, match=r"ends in \.pt2"):
        artifact.compile(tmp_path / "net.bin")
    monkeypatch.setattr(artifact_module, "compile_program", lambda *program: b"")
    monkeypatch.setattr(artifact_module, "load_compiled", lambda source: artifact.module)
    artifact.check = None
    with pytest.raises(ArtifactError, match="absent"):
        artifact.compile(tmp_path / "absent" / "net.pt2")


def test_profile_when_run_then_names_each_operator_with_its_cost(lowered, make_noise):
    _, artifact = lowered
    found = artifact.profile(make_noise(2, 3, 8, 8))
    by_kernel = {node.kernel: node for node in found.nodes if node.is_fused}
    assert set(by_kernel) == {"int8_conv2d", "int8_linear", "data_movement"}
    last = next(node for node in reversed(found.nodes) if node.kernel == "int8_linear")
    assert last.module == "d"
    assert last.cost.bytes >= 2 * 128 + 128 * 4 + 2 * 4 * 4  # x, weight, result
    assert sum(found.share(node) for node in found.nodes) == pytest.approx(1.0)
    assert "int8_conv2d" in str(found)


def test_run_when_a_profiler_watches_then_a_range_for_each_fused_operator(lowered, make_noise):
    _, artifact = lowered
    x = make_noise(2, 3, 8, 8)
    expected = artifact.run(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert torch.equal(artifact.run(x), expected)
    names = [e.name for e in profiler.events() if e.name.startswith("pt2e_quant::int8")]
    assert sum("int8_conv2d" in name for name in names) == 2
    assert any(name.startswith("pt2e_quant::int8_linear d qlinear") for name in names)


def test_run_when_nobody_watches_then_without_ranges(lowered, make_noise, monkeypatch):
    _, artifact = lowered

    def refuse(module):
        raise AssertionError("an interpreter runs though no profiler does")

    monkeypatch.setattr(artifact_module, "Profiled", refuse)
    artifact.run(make_noise(2, 3, 8, 8))


def test_kernel_when_added_from_outside_then_annotated_lowered_and_reported(
    quantize_with, make_noise
):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model, x = nn.Sequential(*layers, nn.Linear(8, 4)), make_noise(2, 3, 8, 8)
    backend = CPU.with_kernels(POOL)
    gm = quantize_with(model, (x,), backend.quantizer())
    artifact = backend.lower(gm)
    assert artifact.report.integer_ops["example.pool_uint8"] == 1
    assert any("pool_uint8: not measured" in note for note in artifact.report.notes)
    torch.testing.assert_close(artifact.run(x), gm(x), **FLOAT_EPILOGUE)
    assert "example.pool_uint8" not in CPU.lower(gm).report.integer_ops
    with pytest.raises(ConfigError, match="global_average_pool"):
        backend.with_kernels(POOL)


def test_activations_when_signed_then_shifted_for_onednn(quantize_with, make_noise):
    """torch's int8 x int8 product runs in a reference loop, a thousand times slower."""
    x = make_noise(4, 16)
    gm = quantize_with(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), (x,))
    expected = gm(x)
    for node in gm.graph.nodes:
        if "per_tensor" in node.name and node.op == "call_function":
            source, scale, zero_point, low, high, _ = node.args
            node.args = (source, scale, zero_point - 128, low - 128, high - 128, torch.int8)
    gm.recompile()
    assert torch.equal(gm(x), expected)
    assert any(n.target is QuantizePerTensor and n.args[5] is torch.int8 for n in gm.graph.nodes)
    artifact = CPU.lower(gm)
    assert artifact.report.integer_ops["onednn.qlinear_pointwise"] == 2
    fused = [n for n in artifact.module.graph.nodes if "qlinear_pointwise" in str(n.target)]
    assert all(n.args[0].meta["val"].dtype is torch.uint8 for n in fused)
    torch.testing.assert_close(artifact.run(x), expected, **FLOAT_EPILOGUE)


def test_inputs_when_they_do_not_fit_then_refused(lowered, make_noise):
    _, artifact = lowered
    with pytest.raises(InputError):
        artifact.run(make_noise(2, 3, 8, 8).double())
    with pytest.raises(InputError):
        artifact.run(make_noise(2, 3, 9, 8))


@pytest.mark.parametrize("layout", ["channels_last", "strided", "negative_view"])
def test_inputs_when_not_contiguous_then_the_same_results(lowered, make_noise, layout):
    _, artifact = lowered
    x = make_noise(4, 3, 8, 8)
    expected = artifact.run(x)
    if layout == "channels_last":
        given = x.contiguous(memory_format=torch.channels_last)
    elif layout == "strided":
        given = x.repeat_interleave(2, dim=3)[..., ::2]
    else:
        given = x.flip(0).flip(0).transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(artifact.run(given), expected)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 7), (3, 1), (2, 5)])
def test_linear_when_tiny_or_empty_then_the_canonical_result(quantize_with, make_noise, sizes):
    k, n = sizes
    x = make_noise(4, k)
    rows = torch.export.Dim("rows", max=64)
    gm = quantize_with(nn.Linear(k, n), (x,), dynamic_shapes={"input": {0: rows}})
    artifact = CPU.lower(gm)
    torch.testing.assert_close(artifact.run(x), gm(x), **FLOAT_EPILOGUE)
    assert artifact.run(x[:1]).shape == (1, n)
