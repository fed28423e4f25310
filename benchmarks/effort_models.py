"""Small unlike models with settled batch norms, in a half to tune on and a half to run at the end.

Weights are drawn as torchvision draws them, batch-norm statistics are those of 1/f-noise images.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import (
    BasicBlock,
    Bottleneck,
    MobileNetV2,
    ResNet,
    VisionTransformer,
)

Act = Callable[[], nn.Module]
IMAGE = 64


def conv(a: int, b: int, k: int = 3, stride: int = 1, groups: int = 1, act: Act = nn.ReLU):
    """Return conv, batch norm and an activation."""
    layer = nn.Conv2d(a, b, k, stride, k // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(b), act())


class UNet(nn.Module):
    """Three levels with skips by concatenation (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        w = width
        self.down1, self.down2 = self.double(3, w), self.double(w, 2 * w)
        self.middle = self.double(2 * w, 4 * w)
        self.up2 = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2)
        self.join2 = self.double(4 * w, 2 * w)
        self.up1 = nn.ConvTranspose2d(2 * w, w, 2, 2)
        self.join1 = self.double(2 * w, w)
        self.head = nn.Conv2d(w, classes, 1)

    @staticmethod
    def double(a: int, b: int) -> nn.Sequential:
        """Return two convolutions."""
        return nn.Sequential(conv(a, b), conv(b, b))

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of scores."""
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.join2(torch.cat((self.up2(c), b), 1))
        return self.head(self.join1(torch.cat((self.up1(b), a), 1)))


class Excite(nn.Module):
    """Squeeze and excite (Hu et al. 2017)."""

    def __init__(self, width: int, reduced: int, act: Act, gate: Act) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, reduced, 1), nn.Conv2d(reduced, width, 1)
        self.act, self.gate = act(), gate()

    def forward(self, x: Tensor) -> Tensor:
        """Scale each channel."""
        pooled = F.adaptive_avg_pool2d(x, 1)
        return x * self.gate(self.up(self.act(self.down(pooled))))


class MobileBlock(nn.Module):
    """Expand, depthwise, squeeze and excite, project (Tan and Le 2019)."""

    def __init__(self, a: int, b: int, stride: int, act: Act, gate: Act) -> None:
        super().__init__()
        hidden = 4 * a
        self.body = nn.Sequential(
            conv(a, hidden, 1, act=act),
            conv(hidden, hidden, 3, stride, hidden, act=act),
            Excite(hidden, max(a // 4, 4), act, gate),
            conv(hidden, b, 1, act=nn.Identity),
        )
        self.has_skip = stride == 1 and a == b

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return x + self.body(x) if self.has_skip else self.body(x)


class Classifier(nn.Module):
    """A body, a global average and a linear."""

    def __init__(self, body: nn.Module, width: int, classes: int = 100) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1))


def mobile_se(act: Act, gate: Act) -> nn.Module:
    """Return a small EfficientNet or MobileNetV3."""
    plan = ((16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 80, 2))
    blocks = [MobileBlock(a, b, s, act, gate) for a, b, s in plan]
    return Classifier(nn.Sequential(conv(3, 16, 3, 2, act=act), *blocks, conv(80, 160, 1)), 160)


class DenseBlock(nn.Module):
    """Each layer reads all before it (Huang et al. 2016)."""

    def __init__(self, a: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(a + i * growth),
                nn.ReLU(),
                nn.Conv2d(a + i * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Append what each layer finds."""
        for layer in self.layers:
            x = torch.cat((x, layer(x)), 1)
        return x


def dense_net() -> nn.Module:
    """Return a DenseNet of two blocks."""
    body = nn.Sequential(
        conv(3, 24, 3, 2), DenseBlock(24, 12, 4), conv(72, 36, 1), nn.AvgPool2d(2),
        DenseBlock(36, 12, 4), nn.BatchNorm2d(84), nn.ReLU(),
    )  # fmt: skip
    return Classifier(body, 84)


class AutoEncoder(nn.Module):
    """Strided convolutions down, transposed ones up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2), conv(32, 64, 3, 2))
        up: list[nn.Module] = []
        for a, b in ((64, 32), (32, 16)):
            layer = nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False)
            up += [layer, nn.BatchNorm2d(b), nn.ReLU()]
        self.up = nn.Sequential(*up, nn.ConvTranspose2d(16, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return an image."""
        return torch.tanh(self.up(self.down(x)))


class FrozenNorm(nn.Module):
    """A batch norm's affine of buffers, computed in each call, as detection models freeze it."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, getattr(norm, name).detach().reshape(1, -1, 1, 1))
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with fixed statistics."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale + (self.bias - self.running_mean * scale)


def freeze_norms(model: nn.Module) -> None:
    """Put a FrozenNorm in the place of each batch norm."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, FrozenNorm(child))


class Detector(nn.Module):
    """A feature pyramid with box and class heads (Lin et al. 2017)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = conv(3, 16, 3, 2)
        self.c3, self.c4 = BasicStage(16, 32), BasicStage(32, 64)
        self.l3, self.l4 = nn.Conv2d(32, width, 1), nn.Conv2d(64, width, 1)
        self.tower = conv(width, width)
        self.boxes, self.scores = nn.Conv2d(width, 4, 3, 1, 1), nn.Conv2d(width, 20, 3, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return boxes and scores of two levels."""
        c3 = self.c3(self.stem(x))
        c4 = self.c4(c3)
        p4 = self.l4(c4)
        p3 = self.l3(c3) + F.interpolate(p4, scale_factor=2.0, mode="nearest")
        levels = [self.tower(p) for p in (p3, p4)]
        return (*(F.relu(self.boxes(p)) for p in levels), *(self.scores(p) for p in levels))


class BasicStage(nn.Sequential):
    """Two residual blocks, the first with stride 2."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(BasicBlock(a, b, 2), BasicBlock(b, b, 1))


class MixerBlock(nn.Module):
    """Mix over tokens, then over channels (Tolstikhin et al. 2021)."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens1, self.tokens2 = nn.Linear(tokens, 2 * tokens), nn.Linear(2 * tokens, tokens)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[N, tokens, width] to the same shape."""
        y = self.tokens2(F.gelu(self.tokens1(self.norm1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + y
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Mixer(nn.Module):
    """Patches of 8x8 pixels and four blocks."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(*(MixerBlock((IMAGE // 8) ** 2, width) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


class GatedTokens(nn.Module):
    """One half gates the other along the tokens (Liu et al. 2021, gMLP)."""

    def __init__(self, tokens: int, width: int = 64) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mix = nn.Linear(tokens, tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[N, tokens, width] to the same shape."""
        a, b = F.gelu(self.up(self.norm(x))).chunk(2, -1)
        b = self.mix(self.gate(b).transpose(1, 2)).transpose(1, 2)
        return x + self.down(a * (b + 1))


class ConvNextBlock(nn.Module):
    """A wide depthwise convolution, a layer norm, two linears (Liu et al. 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        """Map a feature map to one of the same shape."""
        y = self.fc2(F.gelu(self.fc1(self.norm(self.depth(x).permute(0, 2, 3, 1)))))
        return x + (self.scale * y).permute(0, 3, 1, 2)


class ShuffleUnit(nn.Module):
    """Half of the channels pass, half are convolved, then they are shuffled (Ma et al. 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            conv(half, half, 1),
            conv(half, half, 3, groups=half, act=nn.Identity),
            conv(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map a feature map to one of the same shape."""
        a, b = x.chunk(2, 1)
        y = torch.cat((a, self.branch(b)), 1)
        n, c, h, w = y.shape
        return y.reshape(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def shuffle_net() -> nn.Module:
    """Return a ShuffleNet of two stages."""
    units = [ShuffleUnit(32) for _ in range(3)] + [conv(32, 64, 3, 2)]
    body = nn.Sequential(conv(3, 32, 3, 2), *units, *(ShuffleUnit(64) for _ in range(3)))
    return Classifier(body, 64)


def convnext() -> nn.Module:
    """Return a ConvNeXt of four blocks."""
    body = nn.Sequential(
        nn.Conv2d(3, 32, 4, 4), ConvNextBlock(32), ConvNextBlock(32),
        nn.Conv2d(32, 64, 2, 2), ConvNextBlock(64), ConvNextBlock(64),
    )  # fmt: skip
    return Classifier(body, 64)


def vit() -> nn.Module:
    """Return a ViT of width 96."""
    torch.manual_seed(5)
    model = VisionTransformer(IMAGE, patch=8, width=96, depth=4, heads=3, classes=100)
    nn.init.normal_(model.class_token, std=0.02)
    nn.init.normal_(model.positions, std=0.02)
    return model


TUNED: dict[str, Callable[[], nn.Module]] = {
    "unet": UNet,
    "efficientnet_se": lambda: mobile_se(nn.SiLU, nn.Sigmoid),
    "resnet10": lambda: ResNet(BasicBlock, (1, 1, 1, 1), 100),
    "mobilenet_v2": lambda: MobileNetV2(100),
    "vit": vit,
    "densenet": dense_net,
    "frozen_resnet": lambda: ResNet(BasicBlock, (1, 1, 1, 1), 100),
}
FINAL: dict[str, Callable[[], nn.Module]] = {
    "autoencoder": AutoEncoder,
    "detector": Detector,
    "mixer": Mixer,
    "mobilenet_v3": lambda: mobile_se(nn.Hardswish, nn.Hardsigmoid),
    "convnext": convnext,
    "shufflenet": shuffle_net,
    "resnet_bottleneck": lambda: ResNet(Bottleneck, (1, 1, 1, 1), 100),
    "unet_wide": lambda: UNet(24, 8),
}
