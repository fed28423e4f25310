"""Buffers that a program writes: bytes that are planned for them, and what they hold at first."""

import pytest
import torch
from executorch.exir._serialize._program import deserialize_pte_binary
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.artifact import XnnpackArtifact
from pt2e_quant.flow.calibrate.sample import sqnr_db
from tests.parameters import named_subset

BACKEND = pq.backends.get("xnnpack")
WIDTH, ROOM = 32, 256


class Step(nn.Module):
    def __init__(self, *, is_empty: bool) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        start = torch.zeros if is_empty else torch.randn
        self.register_buffer("keys", start(1, ROOM, WIDTH))
        self.register_buffer("values", start(1, ROOM, WIDTH))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        new = self.project(x)
        self.keys.index_copy_(1, at, new)
        self.values.index_copy_(1, at, -new)
        return torch.softmax(x @ self.keys.transpose(1, 2), -1) @ self.values


def lowered(bits: int, *, is_empty: bool) -> tuple[torch.fx.GraphModule, XnnpackArtifact]:
    """Caches in so many bits, 32 for float."""
    torch.manual_seed(0)
    tokens = torch.export.Dim("tokens", min=1, max=8)
    call = torch.randn(1, 4, WIDTH), torch.arange(4)
    shapes = ({1: tokens}, {0: tokens})
    ep = torch.export.export(Step(is_empty=is_empty).eval(), call, dynamic_shapes=shapes)
    quantizer = BACKEND.quantizer("int8_dynamic")
    if bits < 32:
        quantizer.quantize_caches(bits)
    gm = pq.convert_pt2e(pq.prepare_pt2e(ep, quantizer))
    artifact = BACKEND.lower(gm, call)
    assert isinstance(artifact, XnnpackArtifact)
    return gm, artifact


def planned_bytes(artifact: XnnpackArtifact) -> int:
    """What the program has ExecuTorch allocate: buffers, and values between delegates."""
    plans = deserialize_pte_binary(artifact.pte).program.execution_plan
    return sum(next(p for p in plans if p.name == "forward").non_const_buffer_sizes)


@pytest.fixture(scope="module")
def float_bytes() -> int:
    return planned_bytes(lowered(32, is_empty=True)[1])


@pytest.mark.parametrize(
    ("bits", "row"), named_subset([(8, WIDTH + 4), (4, WIDTH // 2 + 4)], (8, WIDTH + 4))
)
def test_caches_when_quantized_then_planned_memory_shrinks_by_what_they_save(
    bits, row, float_bytes
):
    gm, artifact = lowered(bits, is_empty=True)
    saved = 2 * ROOM * (4 * WIDTH - row)
    between = 8 * (3 * WIDTH + 16) * 4  # new rows, integers and scales of 8 tokens at most
    assert float_bytes - planned_bytes(artifact) > saved - between
    kernels = artifact.contents().kernels
    assert kernels["aten.index_put_"] == 4  # in place
    assert not artifact.contents().undelegated_qdq()
    for first, last in ((0, 4), (4, 5), (5, 6), (6, 8)):
        x, at = torch.randn(1, last - first, WIDTH), torch.arange(first, last)
        # A row whose linear is rounded the other way is a step of int8 away.
        assert sqnr_db(gm(x, at), artifact.run(x, at)) > 45


@pytest.mark.parametrize("bits", named_subset([32, 8], 8))
def test_buffers_when_not_empty_then_the_file_keeps_what_they_hold(bits, tmp_path):
    gm, artifact = lowered(bits, is_empty=False)
    artifact.save(tmp_path / "x.pte")
    loaded = BACKEND.load(tmp_path / "x.pte")
    assert artifact.size_bytes > 2 * ROOM * WIDTH * bits // 8
    x, at = torch.randn(1, 1, WIDTH), torch.tensor([7])
    expected = gm(x, at)
    for program in (artifact, loaded):
        assert sqnr_db(expected, program.run(x, at)) > 45
        program.run(x, at + 1)
        program.reset()
        assert sqnr_db(expected, program.run(x, at)) > 45


class Shift(nn.Module):
    """A window of the last rows that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("window", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.window[:-1] = self.window[1:].clone()
        self.window[-1] = x.mean(0)
        return self.project(x + self.window.sum(0))


class Accumulate(nn.Module):
    """A scatter of rows, which ExecuTorch's in-place kernel does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        columns = torch.arange(WIDTH) % 5
        return self.project(torch.zeros_like(h).index_add(1, columns, h))


class ReturnOld(nn.Module):
    """A buffer's former value, read through a view and returned behind the write."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        old = self.rows.clone()
        self.rows.index_copy_(0, torch.tensor([1, 3]), self.project(x[:2]))
        return old.view(-1), self.rows + x[:1]


@pytest.mark.parametrize("recipe", ["int8", "int8_dynamic", "w8"])
@pytest.mark.parametrize("kind", [Shift, Accumulate, ReturnOld])
def test_writes_when_called_several_times_then_as_the_graph(kind, recipe):
    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=2, max=8)
    ep = torch.export.export(kind().eval(), (torch.randn(4, WIDTH),), dynamic_shapes=({0: rows},))
    prepared = pq.prepare_pt2e(ep, BACKEND.quantizer(recipe))
    if recipe == "int8":
        pq.calibrate(prepared, [torch.randn(4, WIDTH) for _ in range(4)], progress=False)
    gm = pq.convert_pt2e(prepared)
    artifact = BACKEND.lower(gm)
    for size in (4, 4, 7, 2, 4):
        x = torch.randn(size, WIDTH)
        # int8: a value at a tie may round to the other step.
        assert sqnr_db(gm(x), artifact.run(x)) > 40


class WriteInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        z[:, 1] = y.sum(1)
        x[:, :4].mul_(2.0)
        return self.project(x) + z, y + z


def test_inputs_that_the_model_writes_when_run_then_written_as_by_the_graph(tmp_path):
    torch.manual_seed(0)
    call = tuple(torch.randn(2, WIDTH) for _ in range(3))
    ep = torch.export.export(WriteInputs().eval(), call)
    gm = pq.convert_pt2e(pq.prepare_pt2e(ep, BACKEND.quantizer("w8")))
    kept = [value.clone() for value in call]
    artifact = BACKEND.lower(gm, call)
    assert all(torch.equal(a, b) for a, b in zip(call, kept, strict=True))
    artifact.save(tmp_path / "x.pte")
    for program in (artifact, BACKEND.load(tmp_path / "x.pte")):
        theirs = [value.clone() for value in call]
        ours = [value.t().contiguous().t() for value in call]
        expected, found = gm(*theirs), program.run(*ours)
        assert sqnr_db(expected, found) > 100
        for a, b in zip(theirs, ours, strict=True):
            torch.testing.assert_close(a, b)
