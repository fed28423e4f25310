"""Torchvision-shaped image models in plain torch, with seeded weights and settled batch norms.

The layer shapes follow the papers and torchvision's published configurations; the weights are
random. Batch-norm statistics are set by forward passes, so activations keep a natural scale
through the depth and an int8 model can be compared with the float one.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.inputs import noise_images


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2015, figure 5 left)."""

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(channels_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[N, C, H, W] to float[N, width, H / stride, W / stride]."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        identity = x if self.downsample is None else self.downsample(x)
        out += identity  # in place, as torchvision writes it
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut (He et al. 2015, figure 5 right)."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = width * self.expansion
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(channels_in, channels_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[N, C, H, W] to float[N, 4 * width, H / stride, W / stride]."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        identity = x if self.downsample is None else self.downsample(x)
        out += identity
        return self.relu(out)


def shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Sequential | None:
    """Return the projection a residual block needs, or None where the shapes agree."""
    if stride == 1 and channels_in == channels_out:
        return None
    conv = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out))


class ResNet(nn.Module):
    """A residual network for float[N, 3, H, W] images."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...], classes: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = 64
        stages: list[nn.Module] = []
        for index, depth in enumerate(depths):
            width = 64 * 2**index
            blocks: list[nn.Module] = []
            for number in range(depth):
                stride = 2 if number == 0 and index > 0 else 1
                blocks.append(block(channels, width, stride))
                channels = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits float[N, classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class InvertedResidual(nn.Module):
    """Expand, depthwise, project (Sandler et al. 2018, figure 4)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = channels_in * expand
        layers: list[nn.Module] = []
        if expand != 1:
            layers.append(conv_bn_relu6(channels_in, hidden, 1))
        layers.append(conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden))
        layers.append(nn.Conv2d(hidden, channels_out, 1, bias=False))
        layers.append(nn.BatchNorm2d(channels_out))
        self.conv = nn.Sequential(*layers)
        self.has_residual = stride == 1 and channels_in == channels_out

    def forward(self, x: Tensor) -> Tensor:
        """Map float[N, C, H, W] to float[N, channels_out, H / stride, W / stride]."""
        return x + self.conv(x) if self.has_residual else self.conv(x)


def conv_bn_relu6(
    channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Return conv, batch norm and relu6 with same padding."""
    conv = nn.Conv2d(
        channels_in, channels_out, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False
    )
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out), nn.ReLU6(inplace=True))


class MobileNetV2(nn.Module):
    """MobileNetV2 at width 1.0 for float[N, 3, H, W] images (Sandler et al. 2018, table 2)."""

    # expansion, output channels, repeats, first stride
    STAGES = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn_relu6(3, 32, 3, 2)]
        channels = 32
        for expand, width, repeats, first_stride in self.STAGES:
            for number in range(repeats):
                stride = first_stride if number == 0 else 1
                layers.append(InvertedResidual(channels, width, stride, expand))
                channels = width
        layers.append(conv_bn_relu6(channels, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits float[N, classes]."""
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


class SqueezeExcite(nn.Module):
    """Channels weighted by a function of their means (Hu et al. 2017, figure 2)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[N, channels, H, W] to the same shape."""
        scale = self.fc2(F.silu(self.fc1(F.adaptive_avg_pool2d(x, 1))))
        return torch.sigmoid(scale) * x


class MbConv(nn.Module):
    """Expand, depthwise, squeeze-excite, project, with silu (Tan and Le 2019, section 4)."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int, expand: int):
        super().__init__()
        hidden = channels_in * expand
        layers = [conv_bn_silu(channels_in, hidden, 1)] if expand != 1 else []
        layers += [
            conv_bn_silu(channels_in * expand, hidden, kernel, stride, groups=hidden),
            SqueezeExcite(hidden, max(1, channels_in // 4)),
            nn.Sequential(
                nn.Conv2d(hidden, channels_out, 1, bias=False), nn.BatchNorm2d(channels_out)
            ),
        ]
        self.block = nn.Sequential(*layers)
        self.has_residual = stride == 1 and channels_in == channels_out

    def forward(self, x: Tensor) -> Tensor:
        """Map float[N, C, H, W] to float[N, channels_out, H / stride, W / stride]."""
        return x + self.block(x) if self.has_residual else self.block(x)


def conv_bn_silu(
    channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Return conv, batch norm and silu with same padding."""
    conv = nn.Conv2d(
        channels_in, channels_out, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False
    )
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out), nn.SiLU(inplace=True))


class EfficientNet(nn.Module):
    """EfficientNet-B0 for float[N, 3, H, W] images (Tan and Le 2019, table 1)."""

    # expansion, kernel, output channels, repeats, first stride
    STAGES = (
        (1, 3, 16, 1, 1),
        (6, 3, 24, 2, 2),
        (6, 5, 40, 2, 2),
        (6, 3, 80, 3, 2),
        (6, 5, 112, 3, 1),
        (6, 5, 192, 4, 2),
        (6, 3, 320, 1, 1),
    )

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn_silu(3, 32, 3, 2)]
        channels = 32
        for expand, kernel, width, repeats, first_stride in self.STAGES:
            for number in range(repeats):
                stride = first_stride if number == 0 else 1
                layers.append(MbConv(channels, width, kernel, stride, expand))
                channels = width
        layers.append(conv_bn_silu(channels, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits float[N, classes]."""
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


class VitBlock(nn.Module):
    """A pre-norm transformer encoder block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[N, tokens, width] to the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """ViT with a class token and learned positions (Dosovitskiy et al. 2020)."""

    def __init__(self, image: int, patch: int, width: int, depth: int, heads: int, classes: int):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(VitBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits float[N, classes] from float[N, 3, image, image]."""
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.norm(self.blocks(x + self.positions))
        return self.head(x[:, 0])


def init_conv_weights(model: nn.Module, generator: torch.Generator) -> None:
    """Draw weights as torchvision does for CNNs: He normal for convs, small normal for linears."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            nn.init.uniform_(module.bias, -bound, bound, generator=generator)


def settle_batch_norm(model: nn.Module, image: int, generator: torch.Generator) -> None:
    """Set running statistics to the average over four batches of eight 1/f-noise images."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # a plain average over the batches
    model.train()
    with torch.no_grad():
        for _ in range(4):
            model(noise_images(8, image, generator))
    model.eval()


def resnet18(image: int = 224, classes: int = 1000, seed: int = 0) -> nn.Module:
    """Return a seeded ResNet-18 in eval mode."""
    return build_cnn(ResNet(BasicBlock, (2, 2, 2, 2), classes), image, seed)


def resnet50(image: int = 224, classes: int = 1000, seed: int = 0) -> nn.Module:
    """Return a seeded ResNet-50 in eval mode."""
    return build_cnn(ResNet(Bottleneck, (3, 4, 6, 3), classes), image, seed)


def mobilenet_v2(image: int = 224, classes: int = 1000, seed: int = 0) -> nn.Module:
    """Return a seeded MobileNetV2 in eval mode."""
    return build_cnn(MobileNetV2(classes), image, seed)


def efficientnet_b0(image: int = 224, classes: int = 1000, seed: int = 0) -> nn.Module:
    """Return a seeded EfficientNet-B0 in eval mode."""
    return build_cnn(EfficientNet(classes), image, seed)


def build_cnn(model: nn.Module, image: int, seed: int) -> nn.Module:
    """Draw the weights of a CNN and settle its batch norms."""
    generator = torch.Generator().manual_seed(seed)
    init_conv_weights(model, generator)
    settle_batch_norm(model, image, generator)
    return model


def vit_small(
    image: int = 224, classes: int = 1000, depth: int = 12, seed: int = 0
) -> VisionTransformer:
    """Return a seeded ViT-Small/16 (width 384, 6 heads) in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    model = VisionTransformer(image, patch=16, width=384, depth=depth, heads=6, classes=classes)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=generator)
            nn.init.normal_(module.bias, std=1e-2, generator=generator)
        elif isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, std=math.sqrt(1 / fan_in), generator=generator)
            nn.init.zeros_(module.bias)
    nn.init.normal_(model.class_token, std=0.02, generator=generator)
    nn.init.normal_(model.positions, std=0.02, generator=generator)
    return model.eval()
