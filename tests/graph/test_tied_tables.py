"""Which linears compute with an embedding table."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2e_quant.graph.tied_tables import (
    is_embedding,
    is_tied_embedding,
    is_tied_linear,
    is_untied_embedding,
)


class Words(nn.Module):
    def __init__(self, *, tied: bool, functional: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.other = nn.Embedding(5, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.functional = functional
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids, kinds):
        x = self.middle(self.table(ids) + self.other(kinds))
        return F.linear(x, self.table.weight) if self.functional else self.head(x)


def names(gm, question):
    return [n.name for n in gm.graph.nodes if question(n)]


@pytest.mark.parametrize(("tied", "functional"), [(True, False), (False, True), (False, False)])
def test_table_when_a_linear_computes_with_it_then_both_are_tied(tied, functional):
    inputs = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    model = Words(tied=tied, functional=functional).eval()
    gm = torch.export.export(model, inputs).module()
    is_tied = tied or functional
    assert names(gm, is_embedding) == ["embedding", "embedding_1"]
    assert names(gm, is_tied_embedding) == (["embedding"] if is_tied else [])
    assert names(gm, is_untied_embedding) == (
        ["embedding_1"] if is_tied else ["embedding", "embedding_1"]
    )
    assert names(gm, is_tied_linear) == (["linear_1"] if is_tied else [])
