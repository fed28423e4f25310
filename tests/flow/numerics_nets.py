"""A small net to train through integers, and what tests ask of it afterwards."""

import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.observers.training.fake_quantize import disable_observer

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A conv with a batch norm, a residual add, a pool, and a linear."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        y = torch.relu(self.norm(self.stem(x)))
        y = torch.relu(self.conv(y) + y)
        return self.head(self.pool(y).flatten(1))


def prepared_of(numerics="fake_quant", recipe="int8"):
    torch.manual_seed(0)
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    ep = torch.export.export(Net().train(), (X,), dynamic_shapes=(batch,))
    quantizer = pq.backends.get("xnnpack").quantizer(recipe)
    return pq.prepare_qat_pt2e(ep, quantizer, numerics=numerics)


def train(model, steps, rate=0.05):
    optimizer = torch.optim.SGD(model.parameters(), rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(X) - Y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_exact(prepared, profile="default", x=X):
    prepared.eval().apply(disable_observer)
    expected = prepared(x)
    reference = pq.integer_reference(pq.convert_pt2e(prepared), profile)
    assert torch.equal(reference(x), expected)
