"""Train with weights in a format of your own: uint8 codes, bf16 gradients, an fp32 master.

Run `python examples/own_uint8_format.py`. The format is a table of 255 real values and a scale for
each output channel. Between steps, weights are codes and scales and nothing else.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from pt2e_quant import training
from pt2e_quant.core.formats.format_schemes import code_book_scheme
from pt2e_quant.core.formats.number_formats import CodeBook
from pt2e_quant.core.granularity import PerChannel

# The format: denser near 0 than near 1.
LEVELS = [(16 ** (i / 127) - 1) / 15 for i in range(1, 128)]
BOOK = CodeBook(name="mu_law", bits=8, values=(*(-v for v in reversed(LEVELS)), 0.0, *LEVELS))
SCHEME = code_book_scheme(BOOK, PerChannel(axis=0))


def make_model() -> nn.Module:
    """Return a classifier of 8x8 images."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> float:
    """Return the share of held-out digits that are named right, in per cent."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train_part, test_part = order[:1400], order[1400:]
    for _ in range(epochs):
        for batch in train_part.split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        right = model(x[test_part]).argmax(1) == y[test_part]
    return 100 * right.float().mean().item()


def main() -> None:
    """Train in float32 and in the format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs

    plain = make_model()
    accuracy = train(plain, torch.optim.AdamW(plain.parameters(), lr=2e-3), epochs)
    print(f"float32             {accuracy:5.1f} %   {plain[0].weight.nbytes} bytes of weights")

    model = make_model()
    training.quantize_parameters(model, SCHEME, grad_dtype=torch.bfloat16)
    optimizer = training.with_master_weights(torch.optim.AdamW, model, lr=2e-3)
    accuracy = train(model, optimizer, epochs)
    weight = model[0].weight
    print(f"uint8, own table    {accuracy:5.1f} %   {weight.nbytes} bytes of weights")
    print(f"gradients {weight.grad.dtype}, quantized {weight.requantizations} times")


if __name__ == "__main__":
    main()
