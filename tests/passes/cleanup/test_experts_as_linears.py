"""Experts as linears, against the products they are written for."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from pt2e_quant.graph.idioms.experts import ROUTER_KEY
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.experts_as_linears import experts_as_linears
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.mutation.functionalize_activations import functionalize_activations
from tests.mixture_of_experts import Mixture

FORMS = ("grouped", "gathered", "turned")
PASSES = (strip_guards, functionalize_activations, experts_as_linears)
linear = torch.ops.aten.linear.default


def written(model, *inputs, shapes=None):
    if getattr(model, "form", "") == "grouped":
        pytest.importorskip("transformers")
    gm = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes).module()
    return gm, run_passes(gm, PASSES)[-1]


def linears(gm):
    return [n for n in gm.graph.nodes if n.target is linear]


def rows(*sizes, seed=1):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", FORMS)
def test_experts_when_the_number_of_tokens_varies_then_the_same_values(form):
    model, tokens = Mixture(form, experts=5, chosen=3), Dim("tokens", max=40)
    gm, record = written(model, rows(1, 7, 32), shapes=({1: tokens},))
    assert [(note.skipped, note.text) for note in record.notes] == [
        (False, "written as 5 linears")
    ] * 2
    assert len(linears(gm)) == 11
    assert not any(word in str(gm.graph) for word in ("grouped_mm", "bmm", "histc"))
    for count in (2, 7, 40):
        x = rows(1, count, 32, seed=count)
        torch.testing.assert_close(gm(x), model(x))


@pytest.mark.parametrize("form", FORMS)
def test_experts_when_written_then_each_computes_every_token_once(form):
    gm, _ = written(Mixture(form), rows(1, 6, 32))
    assert {tuple(n.meta["val"].shape) for n in linears(gm)} == {(6, 8), (6, 96), (6, 32)}


@pytest.mark.parametrize("form", FORMS)
def test_experts_when_written_again_then_nothing_changes(form):
    gm, _ = written(Mixture(form), rows(1, 6, 32))
    assert not run_passes(gm, (experts_as_linears,))[0].changed


def test_experts_when_written_then_weights_are_parameters_named_by_expert():
    gm, _ = written(Mixture("turned", experts=3), rows(1, 6, 32))
    names = {name for name, _ in gm.named_parameters()}
    assert {f"{at}.{name}" for at in range(3) for name in ("up", "down")} <= names
    # With their biases.
    assert all(len(n.all_input_nodes) == 3 for n in linears(gm)[1:])


def test_experts_when_written_then_the_router_alone_is_marked():
    gm, _ = written(Mixture("gathered"), rows(1, 6, 32))
    assert [n for n in gm.graph.nodes if ROUTER_KEY in n.meta] == linears(gm)[:1]


class OneProduct(nn.Module):
    """Rows by matrices of given numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(rows(4, 6, 8))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.bmm(self.w[ids], x.unsqueeze(-1)).squeeze(-1)


def test_one_product_when_numbers_are_inputs_then_negative_ones_count_from_the_end():
    gm, record = written(OneProduct(), rows(5, 8), torch.tensor([0, 3, -1, -4, 2]))
    assert not record.notes[0].skipped
    for ids in ([0, 3, -1, -4, 2], [1, 1, 1, -2, -3]):
        args = rows(5, 8, seed=2), torch.tensor(ids)
        torch.testing.assert_close(gm(*args), OneProduct()(*args))


class NormBetween(OneProduct):
    """What stands between the products of an expert mixes rows."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(rows(4, 8, 6, seed=3))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = super().forward(x, ids)
        y = y - y.mean(0, keepdim=True)
        return torch.bmm(self.v[ids], y.unsqueeze(-1)).squeeze(-1)


def test_products_when_rows_mix_between_them_then_the_second_reads_chosen_rows():
    gm, _ = written(NormBetween(), rows(5, 8), torch.tensor([0, 3, 1, 2, 2]))
    assert len(linears(gm)) == 8
    args = rows(5, 8, seed=2), torch.tensor([3, 3, 0, 1, 2])
    torch.testing.assert_close(gm(*args), NormBetween()(*args))


class ManyRows(OneProduct):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.bmm(self.w[ids], x)


class ComputedMatrices(OneProduct):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.bmm((self.w * x.sum())[ids], x.unsqueeze(-1)).squeeze(-1)


class KeptAxis(OneProduct):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.bmm(self.w[ids], x.unsqueeze(-1))


IDS = torch.tensor([0, 3, 1, 2, 2])


@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (ManyRows, rows(5, 8, 2), "it multiplies chosen matrices by more than a row each"),
        (KeptAxis, rows(5, 8), "its result keeps the axis of one row"),
        (ComputedMatrices, rows(5, 8), None),
    ],
)
def test_products_when_they_are_no_experts_then_they_stay_with_the_reason(model, x, reason):
    gm, record = written(model(), x, IDS)
    assert not linears(gm)
    assert [note.text for note in record.notes if note.skipped] == ([reason] if reason else [])
    torch.testing.assert_close(gm(x, IDS), model()(x, IDS))


class OneRow(OneProduct):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.matmul(self.w[ids], x[:1].unsqueeze(-1)).squeeze(-1)


class Looked(OneProduct):
    """Rows of a table, of which few are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(rows(50, 8, seed=4))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().forward(self.table[ids * 3], ids)


class PlacesBetween(NormBetween):
    """What is added between the products differs from row to row."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(rows(5, 6, seed=5))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = OneProduct.forward(self, x, ids) + self.places
        return torch.bmm(self.v[ids], y.unsqueeze(-1)).squeeze(-1)


def test_product_when_one_row_is_broadcast_then_it_stays_with_the_reason():
    gm, record = written(OneRow(), rows(5, 8), IDS)
    assert not linears(gm)
    assert [note.text for note in record.notes] == [
        "it has another number of rows than of chosen matrices"
    ]


def test_product_when_rows_are_those_of_a_table_then_only_these_are_computed():
    gm, _ = written(Looked(), rows(5, 8), IDS)
    assert {tuple(n.meta["val"].shape) for n in linears(gm)} == {(5, 6)}
    torch.testing.assert_close(gm(rows(5, 8), IDS), Looked()(rows(5, 8), IDS))


def test_products_when_a_constant_differs_by_row_between_them_then_the_same_values():
    gm, _ = written(PlacesBetween(), rows(5, 8), IDS)
    args = rows(5, 8, seed=2), torch.tensor([3, 3, 0, 1, 2])
    torch.testing.assert_close(gm(*args), PlacesBetween()(*args))


class EndsGiven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(rows(4, 8, 6))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(F.relu(x), self.w, ends)


def test_grouped_product_when_the_ends_are_an_input_then_it_stays_with_the_reason():
    pytest.importorskip("transformers.integrations.moe")
    gm, record = written(EndsGiven(), rows(5, 8), torch.tensor([1, 1, 4, 5], dtype=torch.int32))
    assert not linears(gm)
    assert [note.text for note in record.notes] == [
        "the ends of its groups are not counted of sorted numbers of experts"
    ]
