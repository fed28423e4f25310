"""A small transformer whose second block has a channel far above the others, with data for it."""

import torch
from torch import nn

from pt2e_quant.backends.target.recipe_file import RecipeFile

POOR = RecipeFile(backend="onnx", recipe="int8", ranges="min_max", without=("smooth_quant",))
"""Static int8 that such a channel ruins."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        h = self.first(x)
        mixed = nn.functional.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))
        x = x + self.o(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def transformer():
    torch.manual_seed(0)
    model = Transformer().eval()
    with torch.no_grad():
        model.blocks[1].second.weight[3] = 60.0
        model.blocks[1].up.weight[:, 3] /= 20
    return model


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 8, 32, generator=generator) for _ in range(count)]
