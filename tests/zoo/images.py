"""Blocks of image models: convolutional stages, detection and segmentation heads, diffusion."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.block import Block

__all__ = ["BLOCKS"]


def image(channels, size=8):
    return lambda n: (torch.randn(n, channels, size, size),)


def conv(a, b, k=3, stride=1, groups=1, act=nn.ReLU):
    layers = [nn.Conv2d(a, b, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(b)]
    return nn.Sequential(*layers, act())


class InvertedResidual(nn.Module):
    """MobileNetV3's: expand, depthwise, squeeze and excite, project."""

    def __init__(self):
        super().__init__()
        self.expand, self.depth = conv(12, 36, 1, act=nn.Hardswish), conv(36, 36, 5, groups=36)
        self.down, self.up = nn.Conv2d(36, 9, 1), nn.Conv2d(9, 36, 1)
        self.project = conv(36, 12, 1, act=nn.Identity)

    def forward(self, x):
        y = self.depth(self.expand(x))
        gate = F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.project(y * gate)


class ConvNext(nn.Module):
    """A wide depthwise convolution, a layer norm over channels, two linears, a layer scale."""

    def __init__(self):
        super().__init__()
        self.depth, self.norm = nn.Conv2d(12, 12, 7, padding=3, groups=12), nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)
        self.scale = nn.Parameter(torch.full((12,), 0.3))

    def forward(self, x):
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ShuffleUnit(nn.Module):
    """Half the channels pass, half are convolved, then they are shuffled."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(conv(8, 8, 1), conv(8, 8, 3, groups=8), conv(8, 8, 1))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        y = torch.cat([a, self.branch(b)], 1)
        n, c, h, w = y.shape
        return y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class DenseBlock(nn.Module):
    """Each layer reads all before it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, 6, 3, padding=1))
            for c in (8, 14, 20)
        )
        self.transition = nn.Sequential(conv(26, 12, 1), nn.AvgPool2d(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.transition(x)


class GhostModule(nn.Module):
    """Some channels by a convolution, others from them by cheap depthwise ones."""

    def __init__(self):
        super().__init__()
        self.main, self.cheap = conv(8, 10, 1), conv(10, 10, 3, groups=10)

    def forward(self, x):
        y = self.main(x)
        return torch.cat([y, self.cheap(y)], 1)[:, :17]


class SplitAttention(nn.Module):
    """Two branches, weighted by a softmax over them (ResNeSt, SKNet)."""

    def __init__(self):
        super().__init__()
        self.three, self.five = conv(12, 12, 3, groups=4), conv(12, 12, 5, groups=2)
        self.down, self.up = nn.Linear(12, 6), nn.Linear(6, 24)

    def forward(self, x):
        branches = torch.stack([self.three(x), self.five(x)], 1)
        pooled = F.relu(self.down(branches.sum(1).mean((2, 3))))
        weights = self.up(pooled).view(-1, 2, 12).softmax(1)
        return (branches * weights[..., None, None]).sum(1)


class SpatialGate(nn.Module):
    """Channel and spatial gates of CBAM."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 12))
        self.conv = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x):
        gate = self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3)))
        x = x * torch.sigmoid(gate)[:, :, None, None]
        both = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return x * torch.sigmoid(self.conv(both))


class Csp(nn.Module):
    """YOLO's cross-stage block with a spatial pyramid of pools behind it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(12, 8, 1, act=nn.SiLU), conv(12, 8, 1, act=nn.SiLU)
        self.inner = nn.Sequential(conv(8, 8, 1, act=nn.SiLU), conv(8, 8, 3, act=nn.SiLU))
        self.out, self.last = conv(16, 12, 1, act=nn.SiLU), conv(48, 12, 1, act=nn.SiLU)

    def forward(self, x):
        a = self.a(x)
        y = self.out(torch.cat([a + self.inner(a), self.b(x)], 1))
        pools = [y]
        for _ in range(3):
            pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
        return self.last(torch.cat(pools, 1))


class FeaturePyramid(nn.Module):
    """Three scales, each added to the next, finer one; the result is a dict."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([conv(3, 8, 3, 2), conv(8, 12, 3, 2), conv(12, 16, 3, 2)])
        self.sides = nn.ModuleList(nn.Conv2d(c, 8, 1) for c in (8, 12, 16))
        self.smooth = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x):
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        levels = [side(y) for side, y in zip(self.sides, found, strict=True)]
        for i in (1, 0):
            levels[i] = levels[i] + F.interpolate(levels[i + 1], scale_factor=2, mode="nearest")
        return {f"p{i}": s(y) for i, (s, y) in enumerate(zip(self.smooth, levels, strict=True))}


class AnchorHead(nn.Module):
    """Scores, boxes decoded against a grid of anchors, and the best class of each."""

    def __init__(self):
        super().__init__()
        self.tower = conv(8, 8)
        self.scores, self.boxes = nn.Conv2d(8, 3 * 4, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1)
        y, x = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
        self.register_buffer("centres", torch.stack([x, y], -1).view(1, 36, 1, 2))

    def forward(self, x):
        y, n = self.tower(x), x.shape[0]
        scores = self.scores(y).permute(0, 2, 3, 1).reshape(n, -1, 4).sigmoid()
        boxes = self.boxes(y).permute(0, 2, 3, 1).reshape(n, 36, 3, 4)
        centre = self.centres + boxes[..., :2].tanh()
        size = boxes[..., 2:].clamp(max=2).exp()
        corners = torch.cat([centre - size / 2, centre + size / 2], -1).view(n, -1, 4)
        return scores, corners


class DistributionHead(nn.Module):
    """Distances as the mean of a softmax over bins (YOLOv8)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(conv(8, 16, act=nn.SiLU), nn.Conv2d(16, 4 * 8 + 3, 1))
        self.register_buffer("bins", torch.arange(8.0))

    def forward(self, x):
        y = self.conv(x).flatten(2)
        boxes, classes = y.split([32, 3], 1)
        boxes = boxes.view(x.shape[0], 4, 8, -1).softmax(2)
        return torch.cat([(boxes * self.bins[:, None]).sum(2), classes.sigmoid()], 1)


class DetectionTransformer(nn.Module):
    """An encoder's image, a decoder's queries, class and box heads (DETR)."""

    def __init__(self):
        super().__init__()
        self.stem, self.queries = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(5, 16))
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        self.classes, self.boxes = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        memory = self.encoder(self.stem(x).flatten(2).transpose(1, 2))
        y = self.decoder(self.queries.expand(x.shape[0], -1, -1), memory)
        return {"classes": self.classes(y), "boxes": self.boxes(y).sigmoid()}


class Deformable(nn.Module):
    """Features sampled where the queries say (deformable attention)."""

    def __init__(self):
        super().__init__()
        self.offsets, self.weights = nn.Linear(16, 8), nn.Linear(16, 4)
        self.value, self.out = nn.Conv2d(16, 16, 1), nn.Linear(16, 16)

    def forward(self, x, queries):
        at = torch.tanh(self.offsets(queries)).unflatten(-1, (4, 2))
        found = F.grid_sample(self.value(x), at, align_corners=False)
        y = (found * self.weights(queries).softmax(-1)[:, None]).sum(-1)
        return self.out(y.transpose(1, 2)) + queries


class UNet(nn.Module):
    """A diffusion model's: residual blocks with a time embedding, attention, down and up."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.into, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down, self.up = nn.Conv2d(16, 16, 3, 2, 1), nn.ConvTranspose2d(16, 16, 2, 2)
        self.norms = nn.ModuleList(nn.GroupNorm(4, c) for c in (16, 16, 32))
        self.convs = nn.ModuleList(nn.Conv2d(c, 16, 3, padding=1) for c in (16, 16, 32))
        self.qkv, self.project = nn.Conv2d(16, 48, 1), nn.Conv2d(16, 16, 1)

    def block(self, i, x, time):
        y = self.convs[i](F.silu(self.norms[i](x))) + time[:, :, None, None]
        return y if i == 2 else y + x

    def forward(self, x, t):
        frequency = torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        angle = t.float()[:, None] * frequency
        time = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        first = self.block(0, self.into(x), time)
        y = self.block(1, self.down(first), time)
        q, k, v = self.qkv(y).flatten(2).chunk(3, 1)
        y = y + self.project((v @ (q.mT @ k / 4).softmax(-1).mT).view(y.shape))
        return self.out(self.block(2, torch.cat([self.up(y), first], 1), time))


class DiffusionTransformer(nn.Module):
    """Norms whose scale and shift come from the time (DiT)."""

    def __init__(self):
        super().__init__()
        self.modulate = nn.Linear(16, 96)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU("tanh"), nn.Linear(32, 16))

    def forward(self, x, time):
        a, b, c, d, e, f = self.modulate(F.silu(time))[:, None].chunk(6, -1)
        y = F.layer_norm(x, (16,)) * (1 + a) + b
        x = x + c * self.attention(y, y, y, need_weights=False)[0]
        return x + f * self.mlp(F.layer_norm(x, (16,)) * (1 + d) + e)


class SuperResolution(nn.Module):
    """Features, a pixel shuffle, added to a bicubic image."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PReLU(12))
        self.up = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x):
        return self.up(self.layers(x)) + F.interpolate(x, scale_factor=2, mode="bicubic")


class PyramidPooling(nn.Module):
    """Pools of several sizes, resized back (PSPNet), and dilated convolutions (ASPP)."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(2))
        self.dilated = nn.Conv2d(8, 4, 3, padding=2, dilation=2)
        self.head = nn.Conv2d(20, 3, 1)

    def forward(self, x):
        parts = [x, self.dilated(x)]
        for size, layer in zip((1, 2), self.convs, strict=True):
            small = F.relu(layer(F.adaptive_avg_pool2d(x, size)))
            parts.append(F.interpolate(small, x.shape[-2:], mode="bilinear", align_corners=False))
        return self.head(torch.cat(parts, 1)).argmax(1), torch.cat(parts, 1)


class VisionStem(nn.Module):
    """Patches by a strided convolution, a class token, positions, a block, a head."""

    def __init__(self):
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 5, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(x.shape[0], -1, -1), y], 1) + self.places
        return self.head(self.block(y)[:, 0])


class Clip3d(nn.Module):
    """Video: a spatial and a temporal convolution, pooled (R(2+1)D)."""

    def __init__(self):
        super().__init__()
        self.space = nn.Conv3d(3, 8, (1, 3, 3), padding=(0, 1, 1))
        self.time, self.head = nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0)), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(F.relu(self.time(F.relu(self.space(x)))).mean((2, 3, 4)))


class StyleBlock(nn.Module):
    """Instance norm whose scale and shift come from a style (AdaIN)."""

    def __init__(self):
        super().__init__()
        self.conv, self.style = (
            nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
            nn.Linear(6, 16),
        )

    def forward(self, x, style):
        scale, shift = self.style(style)[:, :, None, None].chunk(2, 1)
        return F.leaky_relu(F.instance_norm(self.conv(x)) * (1 + scale) + shift, 0.2)


BLOCKS = {
    "inverted_residual": Block(make=InvertedResidual, inputs=image(12)),
    "convnext": Block(make=ConvNext, inputs=image(12)),
    "shuffle_unit": Block(make=ShuffleUnit, inputs=image(16)),
    "dense_block": Block(make=DenseBlock, inputs=image(8)),
    "ghost_module": Block(make=GhostModule, inputs=image(8)),
    "split_attention": Block(make=SplitAttention, inputs=image(12)),
    "spatial_gate": Block(make=SpatialGate, inputs=image(12)),
    "cross_stage": Block(make=Csp, inputs=image(12)),
    "feature_pyramid": Block(make=FeaturePyramid, inputs=image(3, 16)),
    "anchor_head": Block(make=AnchorHead, inputs=image(8, 6)),
    "distribution_head": Block(make=DistributionHead, inputs=image(8)),
    "detection_transformer": Block(make=DetectionTransformer, inputs=image(3)),
    "deformable_attention": Block(
        make=Deformable,
        inputs=lambda n: (torch.randn(n, 16, 6, 6), torch.randn(n, 5, 16)),
        dynamic=(0, 0),
    ),
    "diffusion_unet": Block(
        make=UNet,
        inputs=lambda n: (torch.randn(n, 3, 8, 8), torch.randint(0, 100, (n,))),
        dynamic=(0, 0),
    ),
    "diffusion_transformer": Block(
        make=DiffusionTransformer,
        inputs=lambda n: (torch.randn(n, 5, 16), torch.randn(n, 16)),
        dynamic=(0, 0),
    ),
    "super_resolution": Block(make=SuperResolution, inputs=image(3)),
    "pyramid_pooling": Block(make=PyramidPooling, inputs=image(8)),
    "vision_transformer": Block(make=VisionStem, inputs=image(3)),
    "video_clip": Block(
        make=Clip3d,
        inputs=lambda n: (torch.randn(n, 3, 4, 6, 6),),
    ),
    "style_block": Block(
        make=StyleBlock,
        inputs=lambda n: (torch.randn(n, 8, 6, 6), torch.randn(n, 6)),
        dynamic=(0, 0),
    ),
}
