"""Tables of 4-bit integers: packed as each reader reads them, once for a lookup and a linear."""

import pytest
import torch
from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.accelerate.share_constants import share_constants as share
from pt2e_quant.backends.xnnpack import lower
from pt2e_quant.backends.xnnpack.artifact import XnnpackArtifact
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.contents import read_named_data
from pt2e_quant.backends.xnnpack.passes import embeddings
from pt2e_quant.backends.xnnpack.passes.embeddings import embed_bytes, embed_portable, pack_int4
from pt2e_quant.core.qdq import DequantizePerChannel, DequantizePerGroup
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize

WIDTH = 64


class Tied(nn.Module):
    """Lookups and heads of one table, or a table and a head of their own."""

    def __init__(self, rows: int, *, tied: bool = True, lookups: int = 1, heads: int = 1) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for _ in range(lookups))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, rows, bias=False) for _ in range(heads))
        self.middle = nn.Linear(WIDTH, WIDTH)
        for other in (*self.tables, *self.heads) if tied else ():
            other.weight = self.tables[0].weight

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.tables[0](ids)
        for table in self.tables[1:]:
            x = x * table(ids)
        x = self.middle(x)
        return [head(torch.relu(x) if i else x) for i, head in enumerate(self.heads)]


def converted(model: nn.Module, table: str, linear: str | None = None) -> torch.fx.GraphModule:
    quantizer = BACKEND.quantizer("a8w4").set_operator("embedding", scheme_named(table))
    if linear is not None:
        quantizer.set_operator("linear", scheme_named(linear))
    sizes = {0: torch.export.Dim("batch", max=4), 1: torch.export.Dim("length", max=16)}
    ids = torch.tensor([[3, 7, 0], [1, 2, 5]])
    program = torch.export.export(model.eval(), (ids,), dynamic_shapes=(sizes,))
    return pq.convert_pt2e(pq.prepare_pt2e(program, quantizer))


def lowered(gm: torch.fx.GraphModule, **options: bool) -> XnnpackArtifact:
    return BACKEND.lower(gm, **options)  # type: ignore[arg-type,return-value]


def integers(gm: torch.fx.GraphModule, rows: int) -> tuple[bytes, bytes]:
    """The table as the delegate keeps it, and as the lookup's kernel reads it."""
    packed = next(t for t in gm.state_dict().values() if tuple(t.shape) == (rows, WIDTH // 2))
    held = packed ^ 0x88  # convert packs in the delegate's order, but without the offset
    return held.numpy().tobytes(), ((held << 4) | (held >> 4)).numpy().tobytes()


def counts(pte: bytes, orders: tuple[bytes, bytes]) -> list[int]:
    return [pte.count(order) for order in orders]


@pytest.mark.parametrize(
    ("table", "linear", "ending"),
    [
        ("w4", "w4", "for the linear"),
        ("w4", "a8w4", "for the linear"),
        ("w4_g32", "a8w4_g32", "the delegate's are bfloat16"),
    ],
)
def test_file_when_4_bit_table_is_tied_then_once_and_the_same_results(
    table, linear, ending, monkeypatch
):
    torch.manual_seed(0)
    rows = 300
    gm = converted(Tied(rows), table, linear)
    orders = integers(gm, rows)
    copies: list[bytes] = []
    monkeypatch.setattr(lower, "share_constants", lambda pte: copies.append(pte) or share(pte))
    linked, portable = lowered(gm), lowered(gm, portable_only=True)
    for unshared, artifact in zip(copies, (linked, portable), strict=True):
        assert counts(unshared, orders) == [2, 0]
        assert counts(artifact.pte, orders) == [1, 0]
        assert len(unshared) - artifact.size_bytes > len(orders[0]) - 128  # aligned segments
        assert orders[0] in read_named_data(artifact.pte).values()
    (said,) = (note for note in linked.report.notes if "in the file once" in note)
    assert said.endswith(ending)
    # In the kernel's own order, as an untied table is stored.
    monkeypatch.setattr(embeddings, "delegate_keeps", lambda gm, table: False)
    plain = lowered(gm)
    assert "aten.index_select" not in plain.contents().kernels
    assert counts(plain.pte, orders) == [1, 1]
    for n, t in ((1, 1), (2, 16), (4, 5)):
        ids = torch.randint(0, rows, (n, t))
        (expected,) = plain.run(ids)
        assert torch.equal(linked.run(ids)[0], expected)
        assert torch.equal(portable.run(ids)[0], expected)


def test_file_when_4_bit_table_is_not_tied_then_no_column_is_moved():
    artifact = lowered(converted(Tied(300, tied=False), "w4_g32", "a8w4_g32"))
    assert dict(artifact.contents().kernels) == {"quantized_decomposed.embedding_4bit": 1}
    assert not any("in the file" in note for note in artifact.report.notes)


@pytest.mark.parametrize("portable_only", [False, True], ids=["linked", "portable"])
def test_file_when_lookups_and_heads_share_4_bits_then_once(portable_only):
    torch.manual_seed(0)
    rows = 300
    gm = converted(Tied(rows, lookups=2, heads=2), "w4_g32", "a8w4_g32")
    artifact = lowered(gm, portable_only=portable_only)
    assert counts(artifact.pte, integers(gm, rows)) == [1, 0]


def test_program_when_saved_and_loaded_then_4_bits_are_there_once_and_lowered_so(tmp_path):
    torch.manual_seed(0)
    gm = converted(Tied(300), "w4_g32", "a8w4_g32")
    pq.save(gm, tmp_path / "x.ptq", keep_sample=False)
    packed = next(t for t in gm.state_dict().values() if tuple(t.shape) == (300, WIDTH // 2))
    assert (tmp_path / "x.ptq").read_bytes().count(packed.numpy().tobytes()) == 1
    artifact = lowered(pq.load(tmp_path / "x.ptq"))
    assert counts(artifact.pte, integers(gm, 300)) == [1, 0]


def test_file_when_lookups_alone_share_4_bits_then_once():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(300, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids) * self.table(ids.flip(1))

    gm = converted(Two(), "w4_g32")
    artifact = lowered(gm)
    assert artifact.contents().kernels["quantized_decomposed.embedding_4bit"] == 2
    assert counts(artifact.pte, integers(gm, 300)) == [0, 1]


@settings(max_examples=40)
@given(rows=st.integers(1, 40), pairs=st.integers(1, 40), seed=st.integers(0, 99))
def test_bytes_when_packed_then_those_that_delegate_and_kernel_read(rows, pairs, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(-8, 8, (rows, 2 * pairs), generator=generator).to(torch.int8)
    low = pack_int4(table, even_high=False)
    assert torch.equal(low, NodeVisitor.convert_to_qc4w(table))
    read = torch.ops.quantized_decomposed.embedding_4bit.default(
        pack_int4(table, even_high=True), torch.ones(rows), None, -8, 7, torch.arange(rows)
    )
    assert torch.equal(read, table.float())


class Parts(nn.Module):
    """A lookup in groups and a head in rows of the same 4-bit integers."""

    def __init__(self, table: Tensor, scale: Tensor, size: int) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", torch.zeros(scale.shape, dtype=torch.int32))
        self.register_buffer("rows", torch.ones(len(table)))
        self.register_buffer("zeros", torch.zeros(len(table), dtype=torch.int32))
        self.size = size

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        group = self.table, self.scale, self.zero, -8, 7, torch.int8, self.size, torch.float32
        row = self.table, self.rows, self.zeros, 0, -8, 7, torch.int8
        x = torch.nn.functional.embedding(ids, DequantizePerGroup(*group))
        return x, torch.nn.functional.linear(torch.relu(x), DequantizePerChannel(*row))


def parts(rows: int, groups: int, size: int, seed: int) -> torch.fx.GraphModule:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(-8, 8, (rows, groups * size), generator=generator).to(torch.int8)
    model = Parts(table, torch.rand(rows, groups, generator=generator), size)
    return torch.export.export(model, (torch.tensor([[0, rows - 1]]),)).module()


@settings(max_examples=25)
@given(
    rows=st.integers(2, 30),
    groups=st.integers(1, 5),
    size=st.integers(2, 9),
    portable=st.booleans(),
    seed=st.integers(0, 99),
)
def test_lookup_when_rewritten_then_bit_for_bit_whatever_the_sizes(
    rows, groups, size, portable, seed
):
    gm = parts(rows, groups, size, seed)
    ids = torch.tensor([[0, rows - 1]])
    expected = gm(ids)
    records = run_passes(gm, (duplicate_dequantize, embed_portable if portable else embed_bytes))
    for got, want in zip(gm(ids), expected, strict=True):
        assert torch.equal(got, want)
    calls = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    is_even = groups * size % 2 == 0
    assert calls.count("quantized_decomposed.dequantize_per_channel_group.default") == (not is_even)
    moves = is_even and size % 2 == 0 and not portable
    assert calls.count("aten.index_select.default") == moves
    if is_even and not portable:
        (note,) = (n.text for n in records[1].notes)
        assert f"{rows * groups * size // 2:,} bytes more" in note or moves
        assert "once" in note or not moves
