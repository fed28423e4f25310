"""Every operator of the op table's rows, as a branch of a model; groups are lowered together."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

C = 8
Branch = Callable[[Tensor, Tensor], Tensor]


def weight(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * 0.2


class Branches(nn.Module):
    """Two convolutions make integers of an image; each branch reads them and is an output."""

    def __init__(self, branches: dict[str, Branch]) -> None:
        super().__init__()
        self.branches = branches
        self.x = nn.Conv2d(3, C, 3, padding=1)
        self.y = nn.Conv2d(3, C, 3, padding=1)
        self.bias = nn.Parameter(weight(C))
        for rank in (1, 2, 3):
            self.register_parameter(f"kernel{rank}", nn.Parameter(weight(C, C, *[2] * rank)))
        self.square = nn.Parameter(weight(C, C))
        self.other = nn.Parameter(weight(C, C).flip(0))

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        x, y = self.x(image), self.y(image)
        return {name: self.run(name, x, y) for name in self.branches}

    def run(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        branch = self.branches[name]
        names = branch.__code__.co_varnames[: branch.__code__.co_argcount]
        values = {"x": x, "y": y, "m": self}
        return branch(*(values[n] for n in names))


def conv3d(x: Tensor, m: Any) -> Tensor:
    return F.conv3d(x.unsqueeze(2).expand(-1, -1, 2, -1, -1), m.kernel3, m.bias)


CONVS: dict[str, tuple[Branch, str]] = {
    "conv1d": (lambda x, m: F.conv1d(x.flatten(2), m.kernel1, m.bias), "QLinearConv"),
    "conv2d": (lambda x, m: F.conv2d(x, m.kernel2, m.bias, stride=2), "QLinearConv"),
    "conv2d grouped": (lambda x, m: F.conv2d(x, m.kernel2[:, :2], m.bias, groups=4), "QLinearConv"),
    "conv2d depthwise": (lambda x, m: F.conv2d(x, m.kernel2[:, :1], groups=C), "QLinearConv"),
    "conv3d": (conv3d, "QLinearConv"),
    "conv1d_clip": (lambda x, m: F.conv1d(x.flatten(2), m.kernel1).relu(), "QLinearConv"),
    "conv2d_clip": (lambda x, m: F.relu6(F.conv2d(x, m.kernel2, m.bias)), "QLinearConv"),
    "conv2d_clip hardtanh": (
        lambda x, m: F.hardtanh(F.conv2d(x, m.kernel2, padding=1)),
        "QLinearConv",
    ),
    "conv2d_clip clamp": (
        lambda x, m: F.conv2d(x, m.kernel2, dilation=2).clamp(-0.2, 0.3),
        "QLinearConv",
    ),
    "conv3d_clip": (lambda y, m: conv3d(y, m).relu(), "QLinearConv"),
}
LINEARS: dict[str, tuple[Branch, str]] = {
    "linear": (lambda x, m: F.linear(x.mean((2, 3)), m.square, m.bias), "QGemm"),
    "linear relu": (lambda x, m: F.linear(x.mean((2, 3)), m.square, m.bias).relu() * 2, "QGemm"),
    "linear no bias": (lambda x, m: F.linear(x.mean((2, 3)), m.square), "QGemm"),
    "linear 3-D": (
        lambda x, m: F.linear(x.flatten(2).transpose(1, 2), m.square, m.bias),
        "MatMulIntegerToFloat",
    ),
    "addmm": (lambda x, m: torch.addmm(m.bias, x.mean((2, 3)), m.square), "QGemm"),
    "mm": (
        lambda x, m: x.flatten(2).transpose(1, 2) @ m.other,
        "MatMulIntegerToFloat",
    ),
}
ARITHMETIC: dict[str, tuple[Branch, str]] = {
    "add": (lambda x, y: x + y, "QLinearAdd"),
    "add_clip": (lambda x, y: (y + x).relu(), "QLinearAdd"),
    "sub": (lambda x, y: x - y, "BitwiseNot"),
    "sub_clip": (lambda x, y: F.relu6(y - x), "BitwiseNot"),
    "mul": (lambda x, y: x * y, "QLinearMul"),
    "mul_clip": (lambda x, y: (y * x).clamp(min=-0.1), "QLinearMul"),
    "mul broadcast": (lambda x, y: x * y[:, :, 1:].mean((2, 3), keepdim=True), "QLinearMul"),
    "matmul": (lambda x, y: x @ y, "QLinearMatMul"),
    "matmul bmm": (lambda x, y: torch.bmm(x[:, 0], y[:, 1]), "QLinearMatMul"),
    "sigmoid": (lambda x: x.sigmoid(), "QLinearSigmoid"),
    "softmax": (lambda x: x.softmax(-1), "QLinearSoftmax"),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), "QLinearLeakyRelu"),
    "avg_pool1d": (lambda x: F.avg_pool1d(x.flatten(2), 2), "QLinearAveragePool"),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), "QLinearAveragePool"),
    "avg_pool2d excl": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        "QLinearAveragePool",
    ),
    "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool2d(x, 1), "QLinearGlobalAveragePool"),
    "mean": (lambda y: y.mean((2, 3)), "QLinearGlobalAveragePool"),
    "mean keepdim": (lambda x: x[:, 1:].mean((-1, -2), keepdim=True), "QLinearGlobalAveragePool"),
}
MOVING: dict[str, tuple[Branch, str]] = {
    "clip": (lambda x: x.relu(), "Clip"),
    "max_pool": (lambda x: F.max_pool2d(x, 2), "MaxPool"),
    "max_pool 1d": (lambda x: F.max_pool1d(x.flatten(2), 2), "MaxPool"),
    "amax": (lambda x: x.amax((2, 3)), "ReduceMax"),
    "amin": (lambda x: x.amin((2, 3)), "ReduceMin"),
    "reshape": (lambda x: x.flatten(1), "Reshape"),
    "unsqueeze": (lambda x: x.unsqueeze(1), "Unsqueeze"),
    "squeeze": (lambda x: x[:, :, :1].squeeze(2), "Squeeze"),
    "permute": (lambda x: x.permute(0, 2, 3, 1), "Transpose"),
    "expand": (lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1), "Expand"),
    "repeat": (lambda x: x.repeat(1, 2, 1, 1), "Tile"),
    "slice": (lambda x: x[:, 1:5, ::2], "Slice"),
    "slice of a chunk": (lambda x: x.chunk(2, 1)[0], "Slice"),
    "select": (lambda x: x[:, 3], "Gather"),
    "index_select": (lambda x: x.index_select(1, torch.tensor([0, 2])), "Gather"),
    "identity": (lambda x: x.clone(), "DequantizeLinear"),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), "DepthToSpace"),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), "SpaceToDepth"),
    "flip": (lambda x: x.flip(3), "Slice"),
    "pad": (lambda x: F.pad(x, (1, 1, 2, 0)), "Pad"),
    "pad value": (lambda x: F.pad(x, (1, 1), value=0.25), "Pad"),
    "pad reflect": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), "Pad"),
    "upsample_nearest": (lambda x: F.interpolate(x, scale_factor=2.0), "Gather"),
    "cat": (lambda x, y: torch.cat([x, y], 1), "QLinearConcat"),
    "where": (lambda x, y: torch.where(torch.ones(1, dtype=torch.bool), x, y), "QLinearWhere"),
    "maximum": (lambda x, y: torch.maximum(x, y), "Max"),
    "minimum": (lambda x, y: torch.minimum(x, y), "Min"),
}
GROUPS = {"convs": CONVS, "linears": LINEARS, "arithmetic": ARITHMETIC, "moving": MOVING}
"""With activations of 8 bits: a branch, and the operator that ONNX Runtime runs it as."""


def _transposed(rank: int) -> Branch:
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    return lambda x, m: convolve(
        {1: x.flatten(2), 2: x, 3: x.unsqueeze(2)}[rank], getattr(m, f"kernel{rank}"), m.bias
    )


FUNCTIONS: dict[str, Branch] = {
    "abs": lambda x: x.abs(),
    "conv_transpose1d": _transposed(1),
    "conv_transpose2d": _transposed(2),
    "conv_transpose3d": _transposed(3),
    "div": lambda x, y: x / (y.abs() + 1),
    "elu": lambda x: F.elu(x),
    "exp": lambda x: x.exp(),
    "gelu": lambda x: F.gelu(x),
    "group_norm": lambda x: F.group_norm(x, 2),
    "hardsigmoid": lambda x: F.hardsigmoid(x),
    "hardswish": lambda x: F.hardswish(x),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "linear_clip": lambda x, m: F.linear(x.mean((2, 3)), m.square, m.bias).relu(),
    "mean over one axis": lambda x: x.mean(1),
    "neg": lambda x: -x,
    "number": lambda x: x * 0.5,
    "number added": lambda x: x + 0.5,
    "pow": lambda x: x**2,
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "silu": lambda x: F.silu(x),
    "sqrt": lambda x: (x.abs() + 0.5).sqrt(),
    "tanh": lambda x: x.tanh(),
    "upsample_bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
}
"""Operators that have entries for activations of 16 bits alone."""
