"""Small models, each with one thing in it that a quantization flow can get wrong."""

import torch
from torch import nn
from torch.nn import functional as F


class Lambda(nn.Module):
    def __init__(self, fn, **modules) -> None:
        super().__init__()
        self.fn = fn
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args):
        return self.fn(self, *args)


def images(n=1, c=3, s=6):
    return torch.randn(n, c, s, s, generator=torch.Generator().manual_seed(n + c + s))


def rows(n=4, k=8):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))


def _conv(i=3, o=4, **kwargs):
    return nn.Conv2d(i, o, 3, **kwargs)


def _bn(c=4):
    bn = nn.BatchNorm2d(c)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        bn.running_mean.copy_(torch.randn(c, generator=generator) * 0.1)
        bn.running_var.copy_(torch.rand(c, generator=generator) + 0.5)
        bn.weight.copy_(torch.rand(c, generator=generator) + 0.5)
        bn.bias.copy_(torch.randn(c, generator=generator))
    return bn


MODELS = {
    "linear": lambda: (nn.Linear(8, 4), (rows(),)),
    "linear_without_bias": lambda: (nn.Linear(8, 4, bias=False), (rows(),)),
    "linear_relu": lambda: (nn.Sequential(nn.Linear(8, 4), nn.ReLU()), (rows(),)),
    "linear_of_3_axes": lambda: (nn.Linear(8, 4), (rows().reshape(2, 2, 8),)),
    "two_linears": lambda: (nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), (rows(),)),
    "linear_read_twice": lambda: (
        Lambda(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(8, 4), b=nn.Linear(8, 4)),
        (rows(),),
    ),
    "tied_linears": lambda: (
        Lambda(lambda m, x: m.a(torch.relu(m.a(x))), a=nn.Linear(8, 8)),
        (rows(),),
    ),
    "conv": lambda: (_conv(), (images(),)),
    "conv_relu": lambda: (nn.Sequential(_conv(), nn.ReLU()), (images(),)),
    "conv_relu_inplace": lambda: (nn.Sequential(_conv(), nn.ReLU(inplace=True)), (images(),)),
    "conv_bn": lambda: (nn.Sequential(_conv(), _bn()), (images(),)),
    "conv_bn_relu": lambda: (nn.Sequential(_conv(bias=False), _bn(), nn.ReLU()), (images(),)),
    "conv_hardtanh": lambda: (nn.Sequential(_conv(), nn.Hardtanh()), (images(),)),
    "grouped_conv": lambda: (_conv(4, 8, groups=4), (images(c=4),)),
    "conv1d": lambda: (nn.Conv1d(8, 4, 3), (rows().reshape(1, 8, 4),)),
    "conv_transpose": lambda: (nn.ConvTranspose2d(3, 4, 3), (images(),)),
    "two_convs": lambda: (nn.Sequential(_conv(), nn.ReLU(), _conv(4, 4)), (images(),)),
    "residual": lambda: (
        Lambda(lambda m, x: m.c(x) + x, c=_conv(3, 3, padding=1)),
        (images(),),
    ),
    "residual_relu": lambda: (
        Lambda(lambda m, x: torch.relu(m.c(x) + x), c=_conv(3, 3, padding=1)),
        (images(),),
    ),
    "residual_inplace": lambda: (
        Lambda(lambda m, x: m.c(x).add_(x).relu_(), c=_conv(3, 3, padding=1)),
        (images(),),
    ),
    "add_itself": lambda: (Lambda(lambda m, x: m.a(x) + m.a(x), a=nn.Linear(8, 4)), (rows(),)),
    "mul": lambda: (
        Lambda(lambda m, x: m.a(x) * m.b(x), a=nn.Linear(8, 4), b=nn.Linear(8, 4)),
        (rows(),),
    ),
    "mul_relu": lambda: (
        Lambda(lambda m, x: torch.relu(m.a(x) * x[:, :4]), a=nn.Linear(8, 4)),
        (rows(),),
    ),
    "cat": lambda: (
        Lambda(
            lambda m, x: torch.cat([m.a(x), m.b(x)], 1),
            a=nn.Linear(8, 4),
            b=nn.Linear(8, 4),
        ),
        (rows(),),
    ),
    "cat_with_itself": lambda: (
        Lambda(lambda m, x: torch.cat([y := m.a(x), y], 1), a=nn.Linear(8, 4)),
        (rows(),),
    ),
    "cat_of_cat": lambda: (
        Lambda(
            lambda m, x: torch.cat([torch.cat([m.a(x), m.b(x)], 1), x], 1),
            a=nn.Linear(8, 4),
            b=nn.Linear(8, 4),
        ),
        (rows(),),
    ),
    "max_pool": lambda: (
        nn.Sequential(_conv(), nn.MaxPool2d(2), _conv(4, 4, padding=1)),
        (images(),),
    ),
    "average_pool": lambda: (
        nn.Sequential(_conv(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
        (images(),),
    ),
    "mean": lambda: (
        Lambda(lambda m, x: m.b(m.a(x).mean((2, 3))), a=_conv(), b=nn.Linear(4, 2)),
        (images(),),
    ),
    "flatten": lambda: (
        Lambda(lambda m, x: m.b(m.a(x).flatten(1)), a=_conv(), b=nn.Linear(64, 2)),
        (images(),),
    ),
    "permute": lambda: (
        Lambda(lambda m, x: m.b(m.a(x).permute(0, 2, 3, 1)), a=_conv(), b=nn.Linear(4, 2)),
        (images(),),
    ),
    "slice": lambda: (
        Lambda(lambda m, x: m.b(m.a(x)[:, 1:5]), a=nn.Linear(8, 6), b=nn.Linear(4, 2)),
        (rows(),),
    ),
    "unsupported_between": lambda: (
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)),
        (rows(),),
    ),
    "dropout": lambda: (nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 4)), (rows(),)),
    "softmax": lambda: (nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), (rows(),)),
    "input_returned": lambda: (
        Lambda(lambda m, x: (m.a(x), x), a=nn.Linear(8, 4)),
        (rows(),),
    ),
    "several_outputs": lambda: (
        Lambda(lambda m, x: (y := m.a(x), torch.relu(y)), a=nn.Linear(8, 4)),
        (rows(),),
    ),
    "functional_linear": lambda: (
        Lambda(lambda m, x: F.linear(x, m.p.weight.t(), None), p=nn.Linear(4, 8)),
        (rows(),),
    ),
    "sub_and_square": lambda: (
        Lambda(lambda m, x: (m.a(x) - m.b(x)) ** 2, a=nn.Linear(8, 4), b=nn.Linear(8, 4)),
        (rows(),),
    ),
    "attention": lambda: (
        Lambda(
            lambda m, x: m.o(F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x))),
            **{name: nn.Linear(8, 8) for name in "qkvo"},
        ),
        (rows(6, 8).reshape(1, 6, 8),),
    ),
}
