"""Modern blocks on three runtimes, static and dynamic: as their graph, and near the float model.

Without `-m slow` a fixed few of them run, each on one backend. `cached_rotary` and `memory_read`
write buffers: their calls are compared in order.
"""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.pt2e import disable_observer
from tests.fuzz.judge import complaint, expect
from tests.fuzz.trial import Watched
from tests.zoo import attentions, images, others, sequences
from tests.zoo.block import Block

pytestmark = pytest.mark.usefixtures("integers_everywhere")

ZOO: dict[str, Block] = {
    **attentions.BLOCKS,
    **sequences.BLOCKS,
    **images.BLOCKS,
    **others.BLOCKS,
}
EXTRAS = {"xnnpack": "executorch", "onnx": "onnxruntime", "cpu": "torch"}
STATIC, DYNAMIC = "static", "dynamic"
ALWAYS = [
    ("latent_attention", "onnx", DYNAMIC),
    ("shifted_window_attention", "cpu", DYNAMIC),
    ("grouped_rotary", "xnnpack", STATIC),
    ("conformer", "onnx", STATIC),
    ("experts", "cpu", DYNAMIC),
    ("selective_scan", "cpu", STATIC),
    ("inverted_residual", "xnnpack", DYNAMIC),
    ("diffusion_unet", "onnx", DYNAMIC),
    ("feature_pyramid", "cpu", DYNAMIC),
    ("graph_attention", "xnnpack", STATIC),
    ("spectrogram", "cpu", DYNAMIC),
    ("low_rank", "cpu", STATIC),
]

WRITES_STATE = {"cached_rotary", "memory_read"}
"""Blocks that torch computes no gradients of: what they write is read by the next call."""
TRAINED = [("minimal_gate", "xnnpack"), ("routing", "onnx"), ("conformer", "cpu")]
LEAST_OF_TRAINED_DB = 25.0
"""One step of the last activations: a value near a tie goes either way on some CPUs."""
# torch.export's own, of inputs of control flow
IGNORED = "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"


def check(name, backend, form, tmp_path):
    if find_spec(EXTRAS[backend]) is None:
        pytest.skip(f"needs {EXTRAS[backend]}")
    block = ZOO[name]
    torch.manual_seed(0)
    model = block.make().eval()
    untouched = copy.deepcopy(model)  # A graph that is run writes the buffers of its own model.
    sizes = block.sizes if form == DYNAMIC else block.sizes[:1]
    shapes = None
    if form == DYNAMIC:
        size = Dim("size", max=block.largest)
        shapes = tuple(None if dim is None else {dim: size} for dim in block.dynamic)
    target = pq.backends.get(backend)
    watched = Watched(target.allowing_slower() if backend == "cpu" else target, None, bounded=False)
    artifact = pq.quantize(
        model,
        block.inputs(sizes[0]),
        dynamic_shapes=shapes,
        calibration_data=[block.inputs(sizes[0]) for _ in range(8)],
        backend=watched,
        progress=False,
    )
    calls = [block.inputs(size) for size in (*sizes, sizes[0])]
    with torch.no_grad():
        floats = [untouched(*call) for call in calls]
        expected = [expect(watched.gm, f, c, {}) for f, c in zip(floats, calls, strict=True)]
        artifact.save(tmp_path / f"block{target.suffix}")
        loaded = target.load(tmp_path / f"block{target.suffix}")
        for program in (artifact, loaded):
            found = [complaint(e, program.run(*c)) for e, c in zip(expected, calls, strict=True)]
            assert [text for text in found if text is not None] == []
    for one in expected:
        assert pq.sqnr_db(one.floats, one.graph) > block.least_db
    return artifact


def check_trained(name, backend):
    """A training step in fake-quantize, then the integers that it has come to."""
    if find_spec(EXTRAS[backend]) is None:
        pytest.skip(f"needs {EXTRAS[backend]}")
    block = ZOO[name]
    torch.manual_seed(0)
    call = block.inputs(block.sizes[0])
    target = pq.backends.get(backend)
    program = torch.export.export(block.make().train(), call)
    prepared = pq.prepare_qat_pt2e(program, target.quantizer("int8"))
    made = floats_of(prepared(*copy.deepcopy(call)))
    sum(value.square().mean() for value in made).backward()
    assert any(value.grad is not None for value in prepared.parameters())
    prepared.eval().apply(disable_observer)
    trained = copy.deepcopy(prepared)
    graph = pq.convert_pt2e(prepared)
    artifact = target.lower(copy.deepcopy(graph), verify=False)
    with torch.no_grad():
        runs = (trained, graph, artifact.run)
        by_training, expected, found = (floats_of(run(*copy.deepcopy(call))) for run in runs)
    assert all(map(torch.equal, by_training, expected))
    assert pq.sqnr_db(flat(expected), flat(found)) > LEAST_OF_TRAINED_DB


def floats_of(outputs):
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return [v for v in leaves if isinstance(v, torch.Tensor) and v.is_floating_point()]


def flat(values):
    return torch.cat([value.flatten() for value in values])


def test_zoo_when_counted_then_at_least_sixty_blocks():
    assert len(ZOO) >= 60


@pytest.mark.parametrize(("name", "backend", "form"), ALWAYS)
def test_block_when_quantized_then_as_its_graph_at_each_size(name, backend, form, tmp_path):
    artifact = check(name, backend, form, tmp_path)
    assert sum(artifact.report.integer_ops.values()) > 0


@pytest.mark.slow
# A router of experts amplifies its own rounding; how near a block must be is `Block.least_db`.
@pytest.mark.filterwarnings("ignore:the quantized graph is at")
@pytest.mark.filterwarnings("ignore:The tensor attributes self.layer:UserWarning")
@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize("form", [STATIC, DYNAMIC])
@pytest.mark.parametrize("backend", EXTRAS)
@pytest.mark.parametrize("name", sorted(ZOO))
def test_block_when_any_form_then_as_its_graph(name, backend, form, tmp_path):
    block = ZOO[name]
    if form == DYNAMIC and all(dim is None for dim in block.dynamic):
        pytest.skip("no dimension of it is dynamic")
    check(name, backend, form, tmp_path)


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize(("name", "backend"), TRAINED)
def test_block_when_trained_in_fake_quantize_then_its_artifact_computes_that(name, backend):
    check_trained(name, backend)


@pytest.mark.slow
@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.filterwarnings("ignore:The tensor attributes self.layer:UserWarning")
@pytest.mark.parametrize("backend", EXTRAS)
@pytest.mark.parametrize("name", sorted(ZOO.keys() - WRITES_STATE))
def test_block_when_any_is_trained_then_its_artifact_computes_that(name, backend):
    check_trained(name, backend)
