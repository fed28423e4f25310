"""More small architectures for benchmarks.effort, of 10 to 200 thousand parameters."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.effort_models import IMAGE, Act, Classifier, Excite, conv


class Residual(nn.Module):
    """x + body(x), or shortcut(x) + body(x), with an activation behind."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None, act: Act = nn.Identity):
        super().__init__()
        self.body, self.shortcut, self.act = body, shortcut or nn.Identity(), act()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        return self.act(self.shortcut(x) + self.body(x))


class Joined(nn.Module):
    """What several branches make of one tensor, side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the channels."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class Summed(Joined):
    """What several branches make of one tensor, added."""

    def forward(self, x: Tensor) -> Tensor:
        """Add the branches."""
        return sum((branch(x) for branch in self.branches[1:]), self.branches[0](x))


def plain(a: int, b: int, k: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution and batch norm without activation."""
    return conv(a, b, k, stride, groups, act=nn.Identity)


def separable(a: int, b: int, stride: int = 1, act: Act = nn.ReLU) -> nn.Sequential:
    """Return a depthwise and a pointwise convolution (Howard et al. 2017)."""
    return nn.Sequential(conv(a, a, 3, stride, a, act=act), conv(a, b, 1, act=act))


def stages(
    make: Callable[[int, int, int], nn.Module], widths: Sequence[int], act: Act = nn.ReLU
) -> nn.Module:
    """Return a stem, two blocks for each width, the first with stride 2, and a classifier."""
    layers: list[nn.Module] = [conv(3, widths[0], 3, 2, act=act)]
    for a, b in pairwise(widths):
        layers += [make(a, b, 2), make(b, b, 1)]
    return Classifier(nn.Sequential(*layers), widths[-1])


def vgg() -> nn.Module:
    """Convolutions and maxima (Simonyan and Zisserman 2014)."""
    pairs = ((3, 16), (16, 32), (32, 64))
    blocks = [nn.Sequential(conv(a, b), conv(b, b), nn.MaxPool2d(2)) for a, b in pairs]
    return Classifier(nn.Sequential(*blocks), 64)


def squeezenet() -> nn.Module:
    """Squeeze, then expand in two ways (Iandola et al. 2016), without batch norms."""

    def fire(a: int, b: int, stride: int) -> nn.Module:
        squeeze = nn.Sequential(nn.Conv2d(a, b // 4, 1, stride), nn.ReLU())
        expand = (nn.Conv2d(b // 4, b // 2, k, padding=k // 2) for k in (1, 3))
        return nn.Sequential(squeeze, Joined(*(nn.Sequential(e, nn.ReLU()) for e in expand)))

    return stages(fire, (16, 32, 64, 64))


def inception() -> nn.Module:
    """Windows of several sizes side by side (Szegedy et al. 2014)."""

    def block(a: int, b: int, stride: int) -> nn.Module:
        q = b // 4
        wide = nn.Sequential(conv(a, q, 1), conv(q, q, 5, stride))
        middle = nn.Sequential(conv(a, q, 1), conv(q, q, 3, stride))
        pooled = nn.Sequential(nn.MaxPool2d(3, stride, 1), conv(a, q, 1))
        return Joined(conv(a, q, 1, stride), middle, wide, pooled)

    return stages(block, (16, 32, 64))


def xception() -> nn.Module:
    """Separable convolutions with shortcuts (Chollet 2016)."""

    def block(a: int, b: int, stride: int) -> nn.Module:
        body = nn.Sequential(separable(a, b), plain(b, b, 3, stride, b), plain(b, b))
        return Residual(body, plain(a, b, 1, stride), nn.ReLU)

    return stages(block, (16, 32, 64))


def preact_resnet() -> nn.Module:
    """Norms and relus before the convolutions (He et al. 2016, Identity mappings)."""

    def block(a: int, b: int, stride: int) -> nn.Module:
        first = nn.Sequential(nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, b, 3, stride, 1))
        second = nn.Sequential(nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, 1, 1))
        shortcut = None if stride == 1 else nn.Conv2d(a, b, 1, stride)
        return Residual(nn.Sequential(first, second), shortcut)

    return stages(block, (16, 32, 64))


def bottleneck(groups: int, *, is_excited: bool) -> Callable[[int, int, int], nn.Module]:
    """Return what makes blocks of ResNeXt (Xie et al. 2016) or SE-ResNet (Hu et al. 2017)."""

    def block(a: int, b: int, stride: int) -> nn.Module:
        h = b // 2
        body = nn.Sequential(conv(a, h, 1), conv(h, h, 3, stride, groups), plain(h, b))
        if is_excited:
            body.append(Excite(b, b // 4, nn.ReLU, nn.Sigmoid))
        return Residual(body, None if stride == 1 else plain(a, b, 1, stride), nn.ReLU)

    return block


def repvgg() -> nn.Module:
    """Three branches that training has and a sum (Ding et al. 2021)."""

    def block(a: int, b: int, stride: int) -> nn.Module:
        branches = [plain(a, b, 3, stride), plain(a, b, 1, stride)]
        same = [nn.BatchNorm2d(b)] if a == b and stride == 1 else []
        return nn.Sequential(Summed(*branches, *same), nn.ReLU())

    return stages(block, (16, 32, 64))


class Ghost(nn.Module):
    """Half of the channels are made from the other half (Han et al. 2019)."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.first = conv(a, b // 2, 3, stride)
        self.cheap = conv(b // 2, b // 2, 3, 1, b // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return both halves."""
        y = self.first(x)
        return torch.cat((y, self.cheap(y)), 1)


def darknet() -> nn.Module:
    """Residual blocks with leaky relus (Redmon and Farhadi 2018)."""

    def block(a: int, b: int, stride: int) -> nn.Module:
        if stride == 2:
            return conv(a, b, 3, 2, act=lambda: nn.LeakyReLU(0.1))
        act = lambda: nn.LeakyReLU(0.1)  # noqa: E731
        return Residual(nn.Sequential(conv(b, b // 2, 1, act=act), conv(b // 2, b, act=act)))

    return stages(block, (16, 32, 64))


class Pyramid(nn.Module):
    """Maxima over windows of several sizes, side by side (He et al. 2014)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow, self.wide = conv(width, width // 2, 1), conv(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of the same shape."""
        parts = [self.narrow(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return self.wide(torch.cat(parts, 1))


def spp_net() -> nn.Module:
    """Convolutions, a spatial pyramid and a head per cell."""
    body = (conv(3, 16, 3, 2), conv(16, 32, 3, 2), conv(32, 64, 3, 2), Pyramid(64))
    return nn.Sequential(*body, nn.Conv2d(64, 15, 1))


class CrossStage(nn.Module):
    """Half of the channels pass by the residual blocks (Wang et al. 2019)."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.down = conv(a, b, 3, stride, act=nn.SiLU)
        half = b // 2
        layers = conv(half, half, 1, act=nn.SiLU), conv(half, half, act=nn.SiLU)
        self.body, self.join = Residual(nn.Sequential(*layers)), conv(b, b, 1, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        """Return what both halves give."""
        a, b = self.down(x).chunk(2, 1)
        return self.join(torch.cat((a, self.body(b)), 1))


class TwoResolutions(nn.Module):
    """Streams of two resolutions that exchange what they find (Wang et al. 2019, HRNet)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        self.stem, self.split = conv(3, w, 3, 2), conv(w, 2 * w, 3, 2)
        self.high, self.low = conv(w, w), conv(2 * w, 2 * w)
        self.up, self.down = plain(2 * w, w), plain(w, 2 * w, 3, 2)
        self.head = nn.Conv2d(3 * w, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of scores."""
        high = self.stem(x)
        low = self.low(self.split(high))
        high = self.high(high)
        risen = F.interpolate(self.up(low), scale_factor=2.0, mode="nearest")
        high, low = F.relu(high + risen), F.relu(low + self.down(high))
        low = F.interpolate(low, scale_factor=2.0, mode="nearest")
        return self.head(torch.cat((high, low), 1))


class Dilated(nn.Module):
    """Dilated convolutions and the global mean side by side (Chen et al. 2017, DeepLab)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 16, 3, 2), conv(16, 48, 3, 2), conv(48, 48))
        rates = (nn.Conv2d(48, 16, 3, padding=r, dilation=r, bias=False) for r in (1, 2, 4))
        self.rates = Joined(*(nn.Sequential(c, nn.BatchNorm2d(16), nn.ReLU()) for c in rates))
        self.pooled, self.join = nn.Conv2d(48, 16, 1), conv(64, 32, 1)
        self.head = nn.Conv2d(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of scores."""
        x = self.body(x)
        mean = F.relu(self.pooled(F.adaptive_avg_pool2d(x, 1)))
        parts = self.rates(x), mean.expand(-1, -1, x.shape[2], x.shape[3])
        return F.interpolate(self.head(self.join(torch.cat(parts, 1))), scale_factor=4.0)


class LinkNet(nn.Module):
    """Skips by addition (Chaurasia and Culurciello 2017)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        self.stem, self.down1, self.down2 = (
            conv(3, w),
            conv(w, 2 * w, 3, 2),
            conv(2 * w, 4 * w, 3, 2),
        )
        self.up2 = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2)
        self.up1 = nn.ConvTranspose2d(2 * w, w, 2, 2)
        self.join, self.head = conv(2 * w, 2 * w), nn.Conv2d(w, 4, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of scores."""
        a = self.stem(x)
        b = self.down1(a)
        b = self.join(b + F.relu(self.up2(self.down2(b))))
        return self.head(a + F.relu(self.up1(b)))


def espcn() -> nn.Module:
    """Twice the resolution by a shuffle of channels (Shi et al. 2016)."""
    layers = nn.Conv2d(3, 32, 5, padding=2), nn.Tanh(), nn.Conv2d(32, 16, 3, padding=1), nn.Tanh()
    return nn.Sequential(*layers, nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2))


def edsr() -> nn.Module:
    """Residual blocks without norms (Lim et al. 2017)."""

    def block() -> nn.Module:
        layers = nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1)
        return Residual(nn.Sequential(*layers))

    up = nn.Conv2d(24, 12, 3, padding=1), nn.PixelShuffle(2)
    return nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), *(block() for _ in range(3)), *up)


def dncnn() -> nn.Module:
    """The noise of an image is taken from it (Zhang et al. 2016)."""
    layers = nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), conv(24, 24), conv(24, 24), conv(24, 24)
    return Residual(nn.Sequential(*layers, nn.Conv2d(24, 3, 3, padding=1)))


class Temporal(nn.Module):
    """Rows of an image as a signal: dilated 1-D convolutions (Bai et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(3 * IMAGE, 48, 1)]
        for rate in (1, 2, 4, 8):
            body = nn.Conv1d(48, 48, 3, padding=rate, dilation=rate), nn.BatchNorm1d(48), nn.ReLU()
            layers.append(Residual(nn.Sequential(*body)))
        self.layers, self.head = nn.Sequential(*layers), nn.Conv1d(48, 20, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each row."""
        return self.head(self.layers(x.transpose(1, 2).flatten(2).transpose(1, 2)))


class PoolMixer(nn.Module):
    """Tokens are mixed by a mean over neighbours (Yu et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(1, width), nn.GroupNorm(1, width)
        self.fc1, self.fc2 = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map a feature map to one of the same shape."""
        y = self.norm1(x)
        x = x + F.avg_pool2d(y, 3, 1, 1, count_include_pad=False) - y
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def poolformer() -> nn.Module:
    """Return four blocks behind patches."""
    blocks = [PoolMixer(48) for _ in range(4)]
    return Classifier(nn.Sequential(nn.Conv2d(3, 48, 7, 4, 3), *blocks), 48)


def convmixer() -> nn.Module:
    """Depthwise and pointwise convolutions on patches (Trockman and Kolter 2022)."""

    def layer(a: int, b: int, k: int, groups: int) -> nn.Sequential:
        made = nn.Conv2d(a, b, k, padding=k // 2, groups=groups)
        return nn.Sequential(made, nn.GELU(), nn.BatchNorm2d(b))

    patches = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.GELU(), nn.BatchNorm2d(64))
    blocks = [nn.Sequential(Residual(layer(64, 64, 7, 64)), layer(64, 64, 1, 1)) for _ in range(3)]
    return Classifier(nn.Sequential(patches, *blocks), 64)


class Tokens(nn.Module):
    """Patches of 8x8 pixels, blocks on tokens, and a head on their mean."""

    def __init__(self, blocks: Sequence[nn.Module], width: int = 64) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, width, 8, 8), nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


class Affine(nn.Module):
    """A scale and a shift for each channel (Touvron et al. 2021, ResMLP)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift."""
        return x * self.scale + self.shift


class AffineMlp(nn.Module):
    """A linear over tokens, an MLP over channels, affines for norms (ResMLP)."""

    def __init__(self, tokens: int, width: int = 64) -> None:
        super().__init__()
        self.norm1, self.norm2 = Affine(width), Affine(width)
        self.mix, self.fc1 = nn.Linear(tokens, tokens), nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[N, tokens, width] to the same shape."""
        x = x + self.mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def prelu_net() -> nn.Module:
    """Convolutions with learned slopes (He et al. 2015)."""
    layers = [
        conv(a, b, 3, 2, act=lambda b=b: nn.PReLU(b)) for a, b in ((3, 16), (16, 32), (32, 64))
    ]
    return Classifier(nn.Sequential(*layers), 64)
