"""Einsums of two tensors as matmuls, against einsum itself."""

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.measure import sqnr_db
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.einsums_as_products import einsums_as_products
from pt2e_quant.passes.cleanup.strip_guards import strip_guards

SIZES = dict(zip("abcdehkqt", (2, 3, 4, 5, 2, 3, 6, 4, 3), strict=True))


class Einsum(nn.Module):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, y)


def written(equation):
    terms = equation.partition("->")[0].split(",")
    inputs = tuple(torch.randn([SIZES[a] for a in term]) for term in terms)
    gm = torch.export.export(Einsum(equation), inputs).module()
    records = run_passes(gm, (strip_guards, einsums_as_products))
    return gm, inputs, records[-1].notes


@pytest.mark.parametrize(
    "equation",
    [
        *("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", "ab,bc->ac", "ab,cb->ca", "abc,abc->", "ab,b->a"),
        *("a,ab->b", "abcd,cde->abe", "abcd,cdeh->ehab", "abc,ab->ac", "dab,cbeh->aechd"),
    ],
)
def test_einsum_when_written_as_a_product_then_the_same_values(equation):
    gm, inputs, notes = written(equation)
    assert [note.skipped for note in notes] == [False]
    assert "einsum" not in str(gm.graph)
    torch.testing.assert_close(gm(*inputs), torch.einsum(equation, *inputs))


@pytest.mark.parametrize("equation", ["ab,cd->acbd", "abc,bd->ad", "ab,bc"])
def test_einsum_when_no_product_then_it_stays_with_the_reason(equation):
    gm, inputs, notes = written(equation)
    assert [(note.skipped, bool(note.text)) for note in notes] == [(True, True)]
    torch.testing.assert_close(gm(*inputs), torch.einsum(equation, *inputs))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (layer(x).unflatten(-1, [2, 4]) for layer in (self.q, self.k))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, q)


def test_attention_of_einsums_when_int_only_then_no_island():
    batches = [torch.randn(2, 5, 8) for _ in range(3)]
    shapes = ({0: torch.export.Dim("b", min=1, max=8)},)
    program = torch.export.export(Attention().eval(), (batches[0],), dynamic_shapes=shapes)
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False))
    assert pq.audit(quantized).islands == ()
    expected = quantized(batches[0])
    assert (pq.integer_reference(quantized)(batches[0]) - expected).abs().max() < 0.05


class Heads(nn.Module):
    """Attention as einsums, as many models spell it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * 8**-0.5
        y = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
def test_einsums_when_a_backend_lowers_them_then_products_for_any_batch(backend):
    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(1))
    artifact = pq.quantize(
        Heads().eval(),
        (x,),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},),
        calibration_data=[(x,)],
        backend=pq.backends.get(backend).allowing_slower(),
        progress=False,
    )
    assert "einsum" not in str(artifact.quantized.graph)
    assert not any("insum" in name for name in artifact.report.float_ops)
    if backend == "xnnpack":
        assert not artifact.contents().kernels
        assert len(artifact.contents().delegates) == 1
    for batch in (2, 8, 1):
        call = torch.randn(batch, 10, 32, generator=torch.Generator().manual_seed(batch))
        with torch.no_grad():
            expected = artifact.quantized(call)
        assert sqnr_db([expected], [artifact.run(call)]) > 30
