"""Graphs of other quantizers through their own lowerings: ours give what torchao's give."""

import warnings
from collections import Counter

import pytest
import torch

pytest.importorskip("torchao")

from foreign import NETWORKS, QUANTIZERS, ethos_u_spec, import_or_skip
from pt2e_flows import both

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("cached_patterns")]

_VENDORS = "executorch.backends"


def _xnnpack():
    return import_or_skip(f"{_VENDORS}.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner()


def _tosa():
    spec = import_or_skip(f"{_VENDORS}.arm.tosa.compile_spec").TosaCompileSpec("TOSA-1.0+INT")
    return import_or_skip(f"{_VENDORS}.arm.tosa.partitioner").TOSAPartitioner(spec)


def _ethos_u():
    import_or_skip("ethosu.vela")
    return import_or_skip(f"{_VENDORS}.arm.ethosu").EthosUPartitioner(ethos_u_spec())


def _vulkan():
    return import_or_skip(f"{_VENDORS}.vulkan.partitioner.vulkan_partitioner").VulkanPartitioner()


def _core_ml():
    targets = import_or_skip("coremltools").target
    compiler = import_or_skip(f"{_VENDORS}.apple.coreml.compiler").CoreMLBackend
    specs = compiler.generate_compile_specs(minimum_deployment_target=targets.iOS17)
    partition = import_or_skip(f"{_VENDORS}.apple.coreml.partition")
    return partition.CoreMLPartitioner(compile_specs=specs)


PARTITIONERS = {
    "xnnpack_per_channel": _xnnpack,
    "xnnpack_dynamic_per_channel": _xnnpack,
    "testing_xnnpack": _xnnpack,
    "tosa": _tosa,
    "ethos_u": _ethos_u,
    "vulkan": _vulkan,
    "core_ml": _core_ml,
}
# Minutes each: coremltools converts one operator at a time.
SLOWEST = {("core_ml", "block")}
SLOW = (pytest.mark.slow, pytest.mark.timeout(3600))
CASES = [
    pytest.param(quantizer, name, marks=SLOW)
    for quantizer in PARTITIONERS
    for name in NETWORKS
    if (quantizer, name) not in SLOWEST
]


def converted(quantizer, name):
    torch.manual_seed(0)
    model, inputs = NETWORKS[name]()
    return both(model, inputs, QUANTIZERS[quantizer], strict=True), inputs


def to_executorch(gm, inputs, partitioner):
    """The delegated program's calls, and its file."""
    exir = import_or_skip("executorch.exir")
    edge = exir.to_edge_transform_and_lower(
        torch.export.export(gm, inputs, strict=True),
        partitioner=[partitioner],
        compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
    )
    nodes = edge.exported_program().graph.nodes
    calls = Counter(str(n.target) for n in nodes if n.op == "call_function")
    return calls, bytes(edge.to_executorch().buffer)


@pytest.mark.parametrize(("quantizer", "name"), CASES)
def test_graph_when_lowered_ahead_of_time_then_delegated_as_torchaos(quantizer, name):
    QUANTIZERS[quantizer]()
    PARTITIONERS[quantizer]()
    (theirs, ours), inputs = converted(quantizer, name)
    expected, _ = to_executorch(theirs.gm, inputs, PARTITIONERS[quantizer]())
    found, _ = to_executorch(ours.gm, inputs, PARTITIONERS[quantizer]())
    assert found == expected
    assert found["executorch_call_delegate"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "quantizer", ["xnnpack_per_channel", "xnnpack_dynamic_per_channel", "testing_xnnpack"]
)
def test_program_when_run_by_xnnpack_then_as_torchaos(quantizer, name):
    runtime = import_or_skip("executorch.runtime").Runtime.get()
    (theirs, ours), inputs = converted(quantizer, name)
    results = []
    for outcome in (theirs, ours):
        _, file = to_executorch(outcome.gm, inputs, _xnnpack())
        results.append(runtime.load_program(file).load_method("forward").execute(list(inputs))[0])
    # Batch norm is folded in another order of operations: qparams differ in their last bits.
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_graph_when_lowered_for_x86_then_as_torchaos(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowering = import_or_skip("torchao.quantization.pt2e.lowering")
    (theirs, ours), inputs = converted("x86_inductor", name)
    found = []
    for outcome in (theirs, ours):
        with torch.no_grad():
            gm = lowering.lower_pt2e_quantized_to_x86(outcome.gm, inputs)
            calls = Counter(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
            found.append((calls, gm(*inputs)))
    assert found[1][0] == found[0][0]
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-5, atol=1e-5)


def _to_cortex_m(gm, inputs):
    exir = import_or_skip("executorch.exir")
    manager = import_or_skip(f"{_VENDORS}.cortex_m.passes.cortex_m_pass_manager").CortexMPassManager
    edge = exir.to_edge(
        torch.export.export(gm, inputs, strict=True),
        compile_config=exir.EdgeCompileConfig(
            preserve_ops=[
                torch.ops.aten.linear.default,
                torch.ops.aten.hardsigmoid.default,
                torch.ops.aten.hardswish.default,
            ],
            _check_ir_validity=False,
        ),
    )
    program = manager(edge.exported_program()).transform()
    return Counter(str(n.target) for n in program.graph.nodes if n.op == "call_function")


@pytest.mark.slow
def test_graph_when_lowered_for_cortex_m_then_its_operators_as_torchaos():
    QUANTIZERS["cortex_m"]()
    (theirs, ours), inputs = converted("cortex_m", "conv_net")
    expected, found = (_to_cortex_m(outcome.gm, inputs) for outcome in (theirs, ours))
    assert found == expected
    assert any("cortex_m" in name for name in found)
