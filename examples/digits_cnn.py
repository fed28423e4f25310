"""A small residual CNN for scikit-learn's digits: 1797 real images of 8x8 pixels."""

from dataclasses import dataclass

import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Digits:
    """Images float[N, 1, 8, 8] in 0..1 and labels int64[N], split once and for all."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_images(train_count: int = 1200) -> Digits:
    """Return the digits in a seeded order, the first `train_count` for training."""
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16).float()[:, None]
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    fit, test = order[:train_count], order[train_count:]
    return Digits(images[fit], labels[fit], images[test], labels[test])


class Residual(nn.Module):
    """Two conv-bn and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[N, width, H, W] to the same shape."""
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class DigitsCnn(nn.Module):
    """A CNN from float[N, 1, 8, 8] to logits float[N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.block1 = Residual(64)
        self.conv2, self.bn2 = nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128)
        self.block2 = Residual(128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.block1(F.relu(self.bn1(self.conv1(x))))
        x = F.relu(self.bn2(self.conv2(F.max_pool2d(x, 2, 2))))
        x = F.adaptive_avg_pool2d(self.block2(x), 1)
        return self.head(torch.flatten(x, 1))


def train_cnn(images: Tensor, labels: Tensor, *, epochs: int) -> nn.Module:
    """Return a CNN fitted with AdamW in batches of 64, in eval mode; the same at every run."""
    torch.manual_seed(0)
    model = DigitsCnn()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    steps = epochs * -(-len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in track(range(epochs), description=f"training, {epochs} epochs"):
        for batch in torch.randperm(len(images)).split(64):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()
