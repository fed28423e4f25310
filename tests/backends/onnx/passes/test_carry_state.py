"""Programs that write buffers, in ONNX: the artifact carries them from call to call."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import onnx

import pt2e_quant as pq
from pt2e_quant.backends.onnx.artifact import OnnxArtifact
from pt2e_quant.backends.onnx.passes.carry_state import StateTensor, carry_state
from pt2e_quant.core.errors import ArtifactError, InvariantError
from pt2e_quant.core.read_capture import CAPTURE_KEY, rebuild_capture
from pt2e_quant.flow.calibrate.sample import sqnr_db

BACKEND = pq.backends.get("onnx")
WIDTH, ROOM = 64, 8


class Step(nn.Module):
    """A head whose keys are a buffer of an inner module, and a counter that does not start at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Module()
        self.inner.register_buffer("cache", torch.zeros(1, ROOM, WIDTH))
        self.register_buffer("count", torch.tensor([3, 5]))

    def forward(self, x: Tensor, *, at: Tensor) -> dict[str, Tensor]:
        assert isinstance(self.inner.cache, Tensor)
        keys = self.inner.cache.index_copy_(1, at, self.key(x))
        self.count.add_(at.shape[0])
        return {"y": self.out(torch.softmax(x @ keys.transpose(1, 2), -1) @ keys), "n": +self.count}


class ByHand(nn.Module):
    """The same with the cache handed in and out."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.key, self.out = step.key, step.out

    def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        keys = cache.index_copy(1, at, self.key(x))
        return self.out(torch.softmax(x @ keys.transpose(1, 2), -1) @ keys), keys


def lowered(model: nn.Module, *inputs: Any, recipe: str, **options: Any) -> OnnxArtifact:
    """`at` by keyword where the model takes it so; any number of tokens."""
    size = torch.export.Dim("t", max=ROOM)
    shapes = {"x": {1: size}, "at": {0: size}} | ({"cache": None} if len(inputs) > 2 else {})
    is_step = isinstance(model, Step)
    args, kwargs = (inputs[:1], {"at": inputs[1]}) if is_step else (inputs, {})
    with torch.no_grad():
        ep = torch.export.export(model.eval(), args, kwargs, dynamic_shapes=shapes)
    gm = pq.convert_pt2e(pq.prepare_pt2e(ep, BACKEND.quantizer(recipe)))
    found = BACKEND.lower(gm, inputs, **options)
    assert isinstance(found, OnnxArtifact)
    return found


def calls() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(1, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    return [(x[:, a:b], torch.arange(a, b)) for a, b in ((0, 3), (3, 4), (4, 5), (5, 6))]


@pytest.mark.parametrize(("recipe", "portable"), [("int8_dynamic", False), ("w4_g32", True)])
def test_run_when_buffers_are_written_then_as_with_caches_by_hand(recipe, portable, tmp_path):
    torch.manual_seed(0)
    model = Step()
    before = {name: value.clone() for name, value in model.named_buffers()}
    artifact = lowered(model, *calls()[0], recipe=recipe, portable=portable)
    cache = torch.zeros(1, ROOM, WIDTH)
    by_hand = lowered(ByHand(model), *calls()[0], cache, recipe=recipe, portable=portable)
    artifact.save(tmp_path / "x.onnx")
    loaded = BACKEND.load(tmp_path / "x.onnx")
    for program in (artifact, loaded):
        for _ in range(2):  # the second time from the beginning again
            cache, count = torch.zeros(1, ROOM, WIDTH), torch.tensor([3, 5])
            for x, at in calls():
                expected, cache = by_hand.run(x, at, cache)
                found = program.run(x, at=at)
                count = count + len(at)
                torch.testing.assert_close(found["y"], expected, rtol=1e-5, atol=1e-5)
                assert torch.equal(found["n"], count)
            program.reset()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_file_when_buffers_are_written_then_inputs_and_outputs_are_named_after_them(tmp_path):
    torch.manual_seed(0)
    artifact = lowered(Step(), *calls()[0], recipe="int8_dynamic")
    artifact.save(tmp_path / "x.onnx")
    graph = onnx.load(tmp_path / "x.onnx").graph
    assert [value.name for value in graph.input][2:] == ["count", "inner_cache"]
    assert [value.name for value in graph.output][2:] == ["count_next", "inner_cache_next"]
    loaded = BACKEND.load(tmp_path / "x.onnx")
    assert isinstance(loaded, OnnxArtifact)
    state = {tensor.name: tensor.initial for tensor in loaded.metadata.state}
    assert torch.equal(state["count"], torch.tensor([3, 5]))
    assert torch.equal(state["inner.cache"], torch.zeros(1, ROOM, WIDTH))
    assert all("cache" not in i.name for i in graph.initializer)


def test_run_when_a_call_is_refused_then_the_state_is_as_before():
    torch.manual_seed(0)
    artifact = lowered(Step(), *calls()[0], recipe="int8_dynamic")
    x, at = calls()[0]
    first = artifact.run(x, at=at)
    with pytest.raises(ArtifactError, match="indice"):
        artifact.run(x, at=at + ROOM)  # beyond the cache
    assert torch.equal(artifact.run(x, at=at)["n"], first["n"] + 3)


@pytest.mark.parametrize(
    "value",
    [torch.tensor(True), torch.arange(12.0).reshape(3, 4) / 7, torch.empty(0), torch.arange(5)],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_state_when_written_and_read_then_equal(value):
    tensor = StateTensor("a.b", value)
    again = StateTensor.from_json(tensor.to_json())
    assert again.name == "a.b"
    assert again.initial.dtype == value.dtype
    assert torch.equal(again.initial, value)


def test_state_when_damaged_then_refused():
    data = StateTensor("a", torch.ones(3)).to_json()
    with pytest.raises(ValueError, match="damaged"):
        StateTensor.from_json({**data, "initial": data["initial"][:-8]})


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.seen.add_(1)

        def yes(x: Tensor) -> Tensor:
            return x + self.seen

        return torch.cond(at.sum() > 3, yes, lambda x: x - 1, (self.a(x),))


def test_lower_when_a_branch_reads_the_buffer_then_it_is_handed_in_too():
    torch.manual_seed(0)
    model = Branch()
    x, at = calls()[0]
    artifact = lowered(model, x, at, recipe="int8_dynamic")
    for n in range(1, 4):
        found = artifact.run(x, at + 5)
        assert sqnr_db(model.a(x) + n, found) > 30


def test_lower_when_the_buffer_is_gone_then_refused():
    torch.manual_seed(0)
    gm = torch.export.export(Step().eval(), calls()[0][:1], {"at": calls()[0][1]}).module()
    gm.meta[CAPTURE_KEY] = rebuild_capture(gm, ("inner.lost",))
    with pytest.raises(InvariantError, match=r"inner\.lost, but this graph does not read it"):
        carry_state(gm)


@pytest.mark.parametrize(("bits", "row"), [(8, WIDTH + 4), (4, WIDTH // 2 + 4)])
def test_state_when_caches_are_quantized_then_so_many_bytes_and_near_the_graph(bits, row):
    torch.manual_seed(0)
    quantizer = BACKEND.quantizer("w4_g32")
    quantizer.quantize_caches(bits, names="*cache")
    (x, at), *_ = calls()
    size = torch.export.Dim("t", max=ROOM)
    shapes = {"x": {1: size}, "at": {0: size}}
    model = Step()
    ep = torch.export.export(model.eval(), (x,), {"at": at}, dynamic_shapes=shapes)
    gm = pq.convert_pt2e(pq.prepare_pt2e(ep, quantizer))
    artifact = BACKEND.lower(gm, (x, at))
    assert isinstance(artifact, OnnxArtifact)
    codes = "inner.cache_q" if bits == 8 else "inner.cache_halves"
    caches = {t.name: t.initial for t in artifact.metadata.state if "cache" in t.name}
    assert caches.keys() == {codes, "inner.cache_scale"}
    assert sum(t.nbytes for t in caches.values()) == ROOM * row < ROOM * WIDTH * 4
    declared = {i.name: i.type for i in artifact.session.get_inputs()}
    assert declared[codes.replace(".", "_")] == "tensor(int8)"
    for each, places in calls():
        expected, found = gm(each, at=places)["y"], artifact.run(each, at=places)["y"]
        assert sqnr_db(expected, found) > 100  # float rounding: the linears are float
