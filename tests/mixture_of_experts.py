"""A mixture of experts in the forms that models have, for the tests of several parts."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Form = Literal["grouped", "gathered", "turned"]
"""Rows sorted by expert; matrices gathered for each row, [E, N, K]; or [E, K, N] with biases."""


class Mixture(nn.Module):
    """Experts with a gate, as `transformers` writes them."""

    def __init__(
        self, form: Form, *, dim: int = 32, width: int = 48, experts: int = 8, chosen: int = 2
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*sizes, generator=generator) * sizes[-1] ** -0.5)

        self.form, self.experts, self.chosen = form, experts, chosen
        self.router = nn.Linear(dim, experts, bias=False)
        self.router.weight = drawn(experts, dim)
        self.up, self.down = drawn(experts, 2 * width, dim), drawn(experts, dim, width)
        if form == "turned":
            self.up, self.down = (nn.Parameter(p.mT.contiguous()) for p in (self.up, self.down))
            self.up_bias, self.down_bias = drawn(experts, 2 * width), drawn(experts, dim)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, experts = self.router(rows).softmax(-1).topk(self.chosen, -1)
        weights, ids = weights.reshape(-1, 1), experts.reshape(-1)
        if self.form == "grouped":
            y = self.grouped(rows, ids, weights)
        else:
            each = rows.repeat_interleave(self.chosen, 0)
            gate, up = self.gathered(each, ids, "up").chunk(2, -1)
            y = self.gathered(F.silu(gate) * up, ids, "down") * weights
        return x + y.view(rows.shape[0], self.chosen, -1).sum(1).view(x.shape)

    def grouped(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        import transformers.integrations.moe  # noqa: F401  # defines the operator

        product = torch.ops.transformers.grouped_mm_fallback
        ids, order = ids.sort()
        counts = torch.histc(ids.float(), self.experts, 0, self.experts - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = product(rows[order // self.chosen], self.up.mT, ends).chunk(2, -1)
        y = product(F.silu(gate) * up, self.down.mT, ends) * weights[order]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return y[back]

    def gathered(self, rows: Tensor, ids: Tensor, name: str) -> Tensor:
        matrices = getattr(self, name)
        if self.form == "gathered":
            return torch.bmm(matrices[ids], rows.unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(rows.unsqueeze(1), matrices[ids]).squeeze(1)
        return y + getattr(self, f"{name}_bias")[ids]
