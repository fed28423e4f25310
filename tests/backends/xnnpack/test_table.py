"""Every row: lowered, run, and read back from the file, on static and dynamic shapes.

Files with dynamic shapes run in a process of their own, small calls first: what the delegate did
not plan for larger calls would write over other memory.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.contents import ProgramContents
from pt2e_quant.backends.xnnpack.table import STATIC_ROWS
from pt2e_quant.core.qdq import DequantizePerTensor
from tests.backends.call_saved import call_pte

Body = Callable[..., Tensor]
SIZES = ((2, 8, 12, 12), (3, 6, 9, 10))
ROWS_1D = ((2, 8, 16), (3, 6, 11))
MATRICES = ((2, 16), (4, 24))


@dataclass(frozen=True)
class Case:
    """One spelling of a row; `runs` is the delegate's operator, or a kernel on the integers."""

    row: str
    label: str
    make: Callable[[tuple[int, ...]], nn.Module]
    runs: str
    sizes: tuple[tuple[int, ...], ...] = SIZES
    inputs: int = 1
    runs_dynamic: str = ""

    def __str__(self) -> str:
        return f"{self.row}-{self.label}" if self.label else self.row


class Body1(nn.Module):
    """A function of one tensor; movers stand behind a relu, which gives them integers."""

    def __init__(self, body: Body, behind: Body | None = None) -> None:
        super().__init__()
        self.body, self.behind = body, behind

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x if self.behind is None else self.behind(x))


class Body2(nn.Module):
    def __init__(self, body: Body, behind: Body | None = None) -> None:
        super().__init__()
        self.body, self.behind = body, behind

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.behind is not None:
            x, y = self.behind(x), self.behind(y)
        return self.body(x, y)


class Then(nn.Module):
    def __init__(self, first: nn.Module, after: Body) -> None:
        super().__init__()
        self.first, self.after = first, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.first(x))


class Product(nn.Module):
    def __init__(self, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inner, 5))
        self.bias = nn.Parameter(torch.randn(5)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x, self.weight)


def relu6_inplace(x: Tensor) -> Tensor:
    return F.relu6(x, inplace=True)


def _conv(label: str, make: Callable[[int], nn.Module], runs: str, row: str = "conv2d") -> Case:
    sizes = ROWS_1D if row.endswith("1d") else SIZES
    return Case(row, label, lambda s: make(s[1]), runs, sizes)


def _one(row: str, body: Body, runs: str, label: str = "", sizes=SIZES, dynamic: str = "") -> Case:  # type: ignore[no-untyped-def]
    return Case(row, label, lambda s: Body1(body), runs, sizes, 1, dynamic)


def _two(row: str, body: Body, runs: str, label: str = "") -> Case:
    return Case(row, label, lambda s: Body2(body), runs, SIZES, 2)


def _move(row: str, body: Body, runs: str, label: str = "", sizes=SIZES, dynamic: str = "") -> Case:  # type: ignore[no-untyped-def]
    return Case(row, label, lambda s: Body1(body, torch.relu), runs, sizes, 1, dynamic)


def _join(row: str, body: Body, runs: str, label: str = "") -> Case:
    return Case(row, label, lambda s: Body2(body, torch.relu), runs, SIZES, 2)


CASES = (
    _conv("plain", lambda c: nn.Conv2d(c, 10, 3, padding=1), "Conv2d"),
    _conv("no_bias", lambda c: nn.Conv2d(c, 10, 3, bias=False), "Conv2d"),
    _conv("depthwise", lambda c: nn.Conv2d(c, c, 3, groups=c), "DepthwiseConv2d"),
    _conv("multiplied", lambda c: nn.Conv2d(c, 2 * c, 3, groups=c), "DepthwiseConv2d"),
    _conv("grouped", lambda c: nn.Conv2d(c, 10, 3, groups=2), "Conv2d"),
    _conv("dilated", lambda c: nn.Conv2d(c, 10, 3, stride=2, dilation=2), "Conv2d"),
    _conv("same", lambda c: nn.Conv2d(c, 10, 3, padding="same"), "Conv2d"),
    *(
        _conv(name, lambda c, act=act: Then(nn.Conv2d(c, 10, 3), act), "Conv2d")
        for name, act in {
            "relu": torch.relu,
            "relu_": torch.relu_,
            "relu6": F.relu6,
            "relu6_": relu6_inplace,
            "hardtanh": F.hardtanh,
            "hardtanh_0_6": nn.ReLU6(),
            "clamp": lambda y: y.clamp(-0.3, 0.4),
            "clamp_min": lambda y: y.clamp(min=0),
        }.items()
    ),
    _conv("plain", lambda c: nn.Conv1d(c, 10, 3, padding=1), "Conv2d", "conv1d"),
    _conv("depthwise", lambda c: nn.Conv1d(c, c, 3, groups=c), "DepthwiseConv2d", "conv1d"),
    _conv("relu6", lambda c: Then(nn.Conv1d(c, 10, 3), F.relu6), "Conv2d", "conv1d"),
    _conv(
        "strided",
        lambda c: nn.ConvTranspose2d(c, 10, 3, stride=2, output_padding=1),
        "ConvTranspose2d",
        "conv_transpose2d",
    ),
    _conv(
        "relu",
        lambda c: Then(nn.ConvTranspose2d(c, 10, 2), torch.relu),
        "ConvTranspose2d",
        "conv_transpose2d",
    ),
    _conv("plain", lambda c: nn.ConvTranspose1d(c, 10, 3), "ConvTranspose2d", "conv_transpose1d"),
    Case("linear", "matrix", lambda s: nn.Linear(s[1], 5), "FullyConnected", MATRICES),
    Case("linear", "cube", lambda s: nn.Linear(s[2], 5), "FullyConnected", ROWS_1D),
    Case("linear", "no_bias", lambda s: nn.Linear(s[1], 5, bias=False), "FullyConnected", MATRICES),
    Case(
        "linear", "relu6", lambda s: Then(nn.Linear(s[1], 5), F.relu6), "FullyConnected", MATRICES
    ),
    Case("linear", "matmul", lambda s: Product(s[1], bias=False), "FullyConnected", MATRICES),
    Case("linear", "addmm", lambda s: Product(s[1], bias=True), "FullyConnected", MATRICES),
    _two("add", torch.add, "Add"),
    _two("add", lambda x, y: torch.relu(x + y), "Add", "relu"),
    _two("add", lambda x, y: F.relu6(x + y), "Add", "relu6"),
    _two("add", lambda x, y: x + y.mean((2, 3), keepdim=True), "Add", "broadcast"),
    _one("add", lambda x: x + 1.5, "Add", "number"),
    _one("add", lambda x: x + x, "Add", "itself"),
    _two("sub", torch.sub, "Subtract"),
    _two("sub", lambda x, y: torch.relu(x - y), "Subtract", "relu"),
    _two("mul", torch.mul, "Multiply"),
    _two("mul", lambda x, y: F.hardtanh(x * y), "Multiply", "hardtanh"),
    _one("mul", lambda x: x * 0.7, "Multiply", "number"),
    _one("mul", lambda x: x / 3.0, "Multiply", "quotient"),
    _one("mul", F.silu, "Multiply", "silu"),
    _two("div", lambda x, y: x / (y.abs() + 1), "Div"),
    _two("minimum", torch.minimum, "Minimum"),
    _two("maximum", torch.maximum, "Maximum"),
    _one("abs", torch.abs, "Abs"),
    _one("ceil", torch.ceil, "Ceiling"),
    _one("clip", torch.relu, "Clamp", "relu"),
    _one("clip", F.relu6, "Clamp", "relu6"),
    _one("clip", lambda x: x.clamp(-0.5, 0.5), "Clamp", "clamp"),
    _one("clip", lambda x: x.clamp(max=0.5), "Clamp", "clamp_max"),
    _one("elu", F.elu, "ELU"),
    _one("exp", torch.exp, "Exp"),
    _one("floor", torch.floor, "Floor"),
    _one("gelu", F.gelu, "Gelu"),
    _one("hardswish", F.hardswish, "Hardswish"),
    _one("leaky_relu", F.leaky_relu, "LeakyReLU"),
    _one("neg", torch.neg, "Negate"),
    _one("log", lambda x: (x.abs() + 0.5).log(), "Log"),
    _one("sigmoid", torch.sigmoid, "Sigmoid"),
    _one("sqrt", lambda x: x.abs().sqrt(), "SquareRoot"),
    _one("tanh", torch.tanh, "Tanh"),
    _one("max_pool2d", lambda x: F.max_pool2d(x, 2), "MaxPooling2d"),
    _one("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), "MaxPooling2d", "padded"),
    _one("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 1), "GlobalAvgPooling2d"),
    _one("mean", lambda x: x.mean((2, 3)), "GlobalAvgPooling2d", "dropped"),
    _one("mean", lambda x: x.mean((-1, -2), keepdim=True), "GlobalAvgPooling2d", "kept"),
    _one("avg_pool2d", lambda x: F.avg_pool2d(x, 2), "DepthwiseConv2d"),
    _one("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), "DepthwiseConv2d", "padded"),
    _join("cat", lambda x, y: torch.cat([x, y], 1), "Concatenate2"),
    _join("cat", lambda x, y: torch.cat([x, y] * 3, 1), "Concatenate5", "six"),
    _join("stack", lambda x, y: torch.stack([x, y], 1), "aten.cat"),
    _move("slice", lambda x: x[:, 1:3], "StaticSlice", dynamic="aten.slice_copy"),
    _move("slice", lambda x: x[:, ::2], "aten.slice_copy", "step"),
    _move("slice", lambda x: x.chunk(2, 1)[1], "StaticSlice", "chunk", dynamic="aten.slice_copy"),
    _move("select", lambda x: x[:, 1], "StaticSlice", dynamic="aten.slice_copy"),
    _move("reshape", lambda x: x.flatten(1), "StaticReshape", "flatten"),
    _move("reshape", lambda x: x.unsqueeze(1), "StaticReshape", "unsqueeze"),
    _move("reshape", lambda x: x[:, :1].squeeze(1), "StaticReshape", "squeeze"),
    _move(
        "reshape", lambda x: x.transpose(1, 2).reshape(x.shape[0], -1), "StaticReshape", "turned"
    ),
    _move("permute", lambda x: x.permute(0, 2, 3, 1), "StaticTranspose"),
    _move("permute", lambda x: x.transpose(1, 2), "StaticTranspose", "transpose"),
    _move("pad", lambda x: F.pad(x, (1, 1, 2, 0)), "StaticConstantPad"),
    _move("expand", lambda x: x[:, :1].expand(-1, 4, -1, -1), "aten.expand_copy"),
    _move("flip", lambda x: x.flip(1), "aten.flip"),
    _move("repeat", lambda x: x.repeat(1, 2, 1, 1), "aten.repeat"),
    _move(
        "pixel_shuffle",
        lambda x: F.pixel_shuffle(x, 2),
        "StaticTranspose",
        sizes=((2, 8, 5, 5), (3, 4, 6, 7)),
    ),
    _move(
        "pixel_unshuffle",
        lambda x: F.pixel_unshuffle(x, 2),
        "StaticTranspose",
        sizes=((2, 8, 4, 6), (3, 4, 6, 8)),
    ),
    _move(
        "channel_shuffle",
        lambda x: F.channel_shuffle(x, 2),
        "StaticTranspose",
        sizes=((2, 8, 5, 5), (3, 4, 6, 7)),
    ),
    _move("upsample_nearest", lambda x: F.interpolate(x, scale_factor=2), "aten.index_select"),
    _move("copy", lambda x: x.permute(0, 2, 3, 1).contiguous(), "StaticTranspose"),
)


GROUPS = tuple(
    tuple(group)
    for _, group in groupby(
        sorted(CASES, key=lambda c: (c.sizes, c.inputs)), key=lambda c: (c.sizes, c.inputs)
    )
)


class Branches(nn.Module):
    """Many cases beside each other: one program lowers and runs them all."""

    def __init__(self, cases: tuple[Case, ...], size: tuple[int, ...]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(c.make(size) for c in cases)


class Branches1(Branches):
    def forward(self, x: Tensor) -> dict[int, Tensor]:
        # A copy: some cases write in place.
        return {i: branch(x.clone()) for i, branch in enumerate(self.branches)}


class Branches2(Branches):
    def forward(self, x: Tensor, y: Tensor) -> dict[int, Tensor]:
        return {i: branch(x, y) for i, branch in enumerate(self.branches)}


def output_scales(gm: GraphModule) -> list[float]:
    """The scale of the dq in front of each output: that there is one proves it is quantized."""
    outputs = gm.graph.output_node().args[0]
    found = []
    for node in tree_leaves(outputs):
        assert node.target is DequantizePerTensor, f"{node.name} is float"
        found.append(float(node.args[1]))
    return found


def counted(contents: ProgramContents) -> Counter[str]:
    delegated = Counter(o.name for o in contents.ops() if o.is_integer)
    return delegated + contents.kernels


def rows_by_mode():
    """All cases with static sizes; of rows with many, a quarter with dynamic sizes."""
    for cases in GROUPS:
        name, dynamic = f"{cases[0].row}-{len(cases)}", cases
        yield pytest.param(cases, "static", id=f"{name}-static")
        if len(cases) > 10:
            dynamic = cases[::4]
            yield pytest.param(cases, "dynamic", id=f"{name}-dynamic-all", marks=pytest.mark.slow)
        yield pytest.param(dynamic, "dynamic", id=f"{name}-dynamic")


@pytest.mark.parametrize(("cases", "mode"), list(rows_by_mode()))
def test_rows_when_lowered_then_run_in_integers(  # type: ignore[no-untyped-def]
    cases, mode, every_row, quantize_with, make_noise, tmp_path
):
    is_dynamic = mode == "dynamic"
    size = cases[0].sizes[is_dynamic]
    inputs = tuple(make_noise(size, i) for i in range(cases[0].inputs))
    model = (Branches1 if cases[0].inputs == 1 else Branches2)(cases, size)
    canonical = quantize_with(model, inputs, every_row(), dynamic=is_dynamic)
    scales = output_scales(canonical)
    artifact = BACKEND.lower(canonical)

    contents = artifact.contents()
    expected = Counter(c.runs_dynamic or c.runs if is_dynamic else c.runs for c in cases)
    ran = counted(contents)
    assert all(ran[name] >= count for name, count in expected.items()), (
        f"missing in the file: {expected - ran}; there instead: {ran - expected}"
    )
    assert not contents.float_ops(), contents
    assert not contents.undelegated_qdq(), contents

    batches = (1, 64, 1, 5, 64) if is_dynamic else (size[0],)
    calls = [
        tuple(make_noise((batch, *size[1:]), 7 + i) for i in range(len(inputs)))
        for batch in batches
    ]
    if is_dynamic:
        found = call_pte(artifact, calls, tmp_path)
    else:
        found = [artifact.run(*call) for call in calls]
    for call, results in zip(calls, found, strict=True):
        hold(cases, results, canonical(*call), scales)


def hold(cases, found, wanted, scales):  # type: ignore[no-untyped-def]
    for i, case in enumerate(cases):
        assert found[i].shape == wanted[i].shape
        error = float(((found[i] - wanted[i]) / scales[i]).abs().max())
        # One step of rounding, twice where a case is two quantized operators in a row.
        assert error <= 2.01, f"{case} of {tuple(found[i].shape)}: {error} steps"


def test_table_when_listed_then_every_static_row_has_a_case():  # type: ignore[no-untyped-def]
    assert {case.row for case in CASES} == {row.name for row in STATIC_ROWS}
