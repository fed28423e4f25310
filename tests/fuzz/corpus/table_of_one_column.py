"""ExecuTorch's embedding_byte takes no rows of one value."""

import torch
from torch import nn

BACKEND, RECIPE, STRICT = "xnnpack", "a8w4", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = True


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 1)
        self.linear = nn.Linear(16, 10)
        self.rows = nn.Embedding(11, 16)

    def forward(self, x0):
        return self.table(x0), self.linear(self.rows(x0))


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    return (torch.randint(0, 11, (2, 4)),), {}
