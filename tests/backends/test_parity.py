"""Artifacts against the integer reference with their runtime's rounding."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.backends.registry import get
from pt2e_quant.backends.target.leave_slower import mark_slower
from pt2e_quant.core.errors import ConfigError
from tests.parameters import named_subset

pytestmark = pytest.mark.usefixtures("integers_everywhere")


class Small(nn.Module):
    """A convolution, a depthwise one, a residual add, a pool and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = x + functional.relu6(self.depthwise(x))
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def target_of(backend):
    """The backend; a CPU's also where the table says that float is as fast on this one."""
    return get(backend).allowing_slower() if backend == "cpu" else get(backend)


def lowered(backend):
    package = {"xnnpack": "executorch", "onnx": "onnxruntime"}.get(backend)
    if package:
        pytest.importorskip(package)
    torch.manual_seed(0)
    images = [torch.randn(4, 3, 16, 16) for _ in range(3)]
    target = target_of(backend)
    prepared = pq.prepare_pt2e(export(Small().eval(), (images[0],)), target.quantizer("int8"))
    quantized = pq.convert_pt2e(pq.calibrate(prepared, images, progress=False))
    return target.lower(quantized, verify=False), quantized, images


@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
def test_parity_when_a_cnn_runs_then_the_last_tensor_is_equal(backend):
    artifact, quantized, images = lowered(backend)
    labelled = [(image, torch.zeros(4)) for image in images]
    found = pq.verify_parity(artifact, labelled, quantized=quantized, inputs=0)
    assert found.share_equal >= 0.999
    assert found.most_steps <= 1
    rows = [row.node for row in found.nodes]
    assert found.table == found.nodes
    assert rows[0] == "x"
    assert len(set(rows)) == len(rows)
    assert {row.operator for row in found.nodes} & {"aten.relu", "aten.conv2d"}
    assert max(row.most_steps for row in found.nodes) <= 1
    assert "profile" in str(found)


@pytest.mark.parametrize("backend", ["xnnpack", "cpu"])
def test_parity_when_the_graph_is_not_given_then_it_is_the_one_that_was_lowered(backend, tmp_path):
    artifact, quantized, images = lowered(backend)
    quantized.graph.output_node().args = ((),)  # what the caller does to it does not matter
    found = pq.verify_parity(artifact, images, most_nodes=1)
    assert found.share_equal >= 0.999
    artifact.save(tmp_path / "model")
    loaded = get(backend).load(tmp_path / "model")
    if backend == "cpu":  # its file holds the graph
        assert pq.verify_parity(loaded, images, most_nodes=1) == found
        return
    with pytest.raises(ConfigError, match="quantized=graph"):
        pq.verify_parity(loaded, images)


@pytest.mark.parametrize("backend", named_subset(["xnnpack", "onnx"], "onnx"))
@pytest.mark.slow  # long: others of its file run in CI
def test_parity_when_an_operator_is_float_for_speed_then_named_and_parts_are_lowered_alike(
    backend,
):
    target = target_of(backend)
    _, quantized, images = lowered(backend)
    slow = next(n for n in quantized.graph.nodes if n.name == "conv2d_1")
    mark_slower(slow, "measured in a test")
    artifact = target.lower(quantized, verify=False)
    found = pq.verify_parity(artifact, images, most_nodes=4)
    assert found.slower == ("conv2d_1",)
    assert "conv2d_1" in found.floats
    assert "because that is faster: conv2d_1\nlower(..., allow_slower=True)" in str(found)
    # The reference has it in float too: both compute the same.
    assert found.share_equal >= 0.999
    assert max(row.most_steps for row in found.nodes) <= 1
    # In integers throughout: so are the parts that nodes are compared by.
    artifact = target.lower(quantized, verify=False, allow_slower=True)
    found = pq.verify_parity(artifact, images, most_nodes=2)
    assert found.slower == ()
    assert {row.most_steps for row in found.nodes} == {0}


def test_parity_when_the_profile_is_another_then_the_difference_is_told():
    artifact, quantized, images = lowered("xnnpack")
    coarse = "tflite"
    found = pq.verify_parity(artifact, images, quantized=quantized, profile=coarse, most_nodes=1)
    assert len(found.nodes) == 1
    assert found.profile == "tflite"


def test_parity_when_there_is_no_batch_then_says_so():
    artifact, quantized, _ = lowered("xnnpack")
    with pytest.raises(ConfigError, match="at least one batch"):
        pq.verify_parity(artifact, [], quantized=quantized)


class Attention(nn.Module):
    """Attention of one head whose residual stream has 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.qkv, self.out = nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.last = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.last(x + self.out(functional.scaled_dot_product_attention(q, k, v)))


def test_parity_when_16_bits_stand_behind_floats_then_at_most_a_step_apart():
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    tokens = [torch.randn(2, 16, 8) for _ in range(2)]
    program = export(Attention().eval(), (tokens[0],))
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, tokens, progress=False))
    artifact = get("onnx").lower(quantized, verify=False, strict=False, allow_slower=True)
    found = pq.verify_parity(artifact, tokens, most_nodes=3)
    # The residual sum has 16 bits; a step of the softmax's 8 bits is a hundred of its steps.
    assert {"linear_2", "add", "layer_norm"} <= set(found.floats)
    assert max(row.most_steps for row in found.nodes) <= 1
    assert min(row.share_equal for row in found.nodes) >= 0.99


class Normed(Attention):
    """The same with a linear behind, which reads the stream in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.layer_norm(super().forward(x), [8]))


@pytest.mark.parametrize("most_nodes", named_subset([8, 20], 8))
@pytest.mark.slow  # long: others of its file run in CI
def test_parity_when_xnnpack_leaves_16_bits_unrounded_then_so_does_the_reference(most_nodes):
    pytest.importorskip("executorch")
    torch.manual_seed(0)
    tokens = [torch.randn(8, 16, 8) for _ in range(3)]
    prepared = pq.prepare_pt2e(export(Normed().eval(), (tokens[0],)), pq.IntegerQuantizer())
    quantized = pq.convert_pt2e(pq.calibrate(prepared, tokens, progress=False))
    target = get("xnnpack").allowing_slower()
    artifact = target.lower(quantized, verify=False, strict=False)
    found = pq.verify_parity(artifact, tokens, most_nodes=most_nodes)
    # What is left is the order of sums of floats: none of the integers' own.
    assert found.share_equal >= 0.99
    assert max(row.most_steps for row in found.nodes) <= 1
    assert found.integers[-1].share_equal == 1.0
    assert [row.most_steps for row in found.of_floats if row.most_steps > 1] == []
    left_out = dict(found.not_compared)
    assert "does not round it" in left_out["add"]
    assert "add" not in {row.node for row in found.nodes}


def test_parity_when_a_program_rounds_nothing_of_its_graph_then_says_so():
    pytest.importorskip("executorch")
    torch.manual_seed(0)
    images = [torch.randn(4, 3, 16, 16)]
    prepared = pq.prepare_pt2e(export(Small().eval(), (images[0],)), pq.IntegerQuantizer(16))
    quantized = pq.convert_pt2e(pq.calibrate(prepared, images, progress=False))
    artifact = get("xnnpack").lower(quantized, verify=False, strict=False)
    with pytest.raises(ConfigError, match=r"has more bits than its runtime has kernels for"):
        pq.verify_parity(artifact, images)


def test_parity_when_weights_alone_are_integers_then_says_so():
    pytest.importorskip("executorch")
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    model = nn.Linear(64, 64).eval()
    artifact = pq.quantize(model, (x,), backend="xnnpack", recipe="w8", progress=False)
    with pytest.raises(ConfigError, match=r"(?s)this graph has none.*dynamic recipe"):
        pq.verify_parity(artifact, [x])


OF_RUN_TIME = (
    *(("xnnpack", "int8_dynamic"), ("xnnpack", "a8w4_g32"), ("xnnpack", "int8")),
    *(("onnx", "int8_dynamic"), ("onnx", "int8_dynamic_per_tensor"), ("cpu", "int8_dynamic")),
)


@pytest.mark.parametrize(
    ("backend", "recipe"),
    named_subset(OF_RUN_TIME, *OF_RUN_TIME[2:4], ("cpu", "int8_dynamic")),
)
def test_parity_when_scales_are_of_run_time_then_their_integers_are_compared(backend, recipe):
    package = {"xnnpack": "executorch", "onnx": "onnxruntime"}.get(backend)
    if package:
        pytest.importorskip(package)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).eval()
    batches = [torch.randn(16, 64) for _ in range(6)]
    data = batches if recipe == "int8" else None
    artifact = pq.quantize(
        model,
        (batches[0],),
        backend=target_of(backend),
        recipe=recipe,
        calibration_data=data,
        progress=False,
    )
    found = pq.verify_parity(artifact, batches)
    assert [(row.node, row.is_run_time) for row in found.table] == [
        ("input_1", True),
        ("gelu", True),
    ]
    assert found.share_equal >= 0.999
    assert found.most_steps <= 1
    assert "scale of run time" in str(found)


def test_parity_when_a_kernel_rounds_rows_in_its_own_way_then_the_table_tells():
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    x = torch.randn(16, 64)
    model = nn.Linear(64, 48).eval()
    artifact = pq.quantize(model, (x,), backend="onnx", recipe="a8w4", progress=False)
    found = pq.verify_parity(artifact, [x])  # blocks of a row, symmetric
    assert found.share_equal < 0.95
    assert 1 <= found.most_steps < 10


class Tagger(nn.Module):
    """An LSTM and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(32, 48, batch_first=True), nn.Linear(48, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0])


def test_parity_when_a_layer_rounds_inside_then_named_as_not_compared():
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    x = torch.randn(2, 6, 32)
    artifact = pq.quantize(
        Tagger().eval(), (x,), backend="onnx", recipe="int8_dynamic", progress=False
    )
    found = pq.verify_parity(artifact, [x])
    ((name, reason),) = found.not_compared
    assert "inside" in reason
    assert f"not compared: {name}, {reason}" in str(found)
    assert found.most_steps <= 1


class Deep(nn.Module):
    """A convolution of 1,152 terms, which is to be float, and two in integers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(128, 8, 3)
        self.second, self.third = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


@pytest.mark.parametrize(
    ("backend", "package"), [("xnnpack", "executorch"), ("onnx", "onnxruntime")]
)
def test_parity_when_floats_are_summed_in_another_order_then_the_integers_behind_are_equal(
    backend, package
):
    pytest.importorskip(package)
    torch.manual_seed(0)
    images = [torch.randn(4, 128, 24, 24) for _ in range(2)]
    target = target_of(backend)
    prepared = pq.prepare_pt2e(export(Deep().eval(), (images[0],)), pq.IntegerQuantizer())
    quantized = pq.convert_pt2e(pq.calibrate(prepared, images, progress=False))
    mark_slower(next(n for n in quantized.graph.nodes if n.name == "conv2d"), "measured in a test")
    artifact = target.lower(quantized, verify=False, strict=False)
    found = pq.verify_parity(artifact, images, most_nodes=1)
    assert found.slower == ("conv2d",)
    # 15,488 values: some are near a tie, where the order of 1,152 float terms decides.
    (of_float,) = found.of_floats
    assert (of_float.node, of_float.most_steps <= 1) == ("relu", True)
    assert of_float.share_equal >= 0.99
    (integers,) = found.integers
    assert (integers.node, integers.share_equal, integers.most_steps) == ("conv2d_2", 1.0, 0.0)
    assert "behind what is float:" in str(found)


def test_parity_when_nothing_between_integers_is_float_then_one_comparison():
    artifact, _, images = lowered("cpu")
    found = pq.verify_parity(artifact, images, most_nodes=1)
    assert (found.integers, found.of_floats) == ((), ())


@pytest.mark.parametrize(
    ("backend", "package"), [("xnnpack", "executorch"), ("onnx", "onnxruntime")]
)
def test_parity_when_a_float_mean_is_quantized_at_run_time_then_its_integers_are_equal(
    backend, package
):
    pytest.importorskip(package)
    artifact, _, images = lowered(backend)
    found = pq.verify_parity(artifact, images, most_nodes=1)
    assert "adaptive_avg_pool2d" in found.floats
    (integers,) = found.integers
    assert (integers.is_run_time, integers.share_equal, integers.most_steps) == (True, 1.0, 0.0)
    assert found.of_floats == ()  # a mean that is not rounded has no steps
