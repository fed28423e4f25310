"""A toy backend's op table, and small models to quantize with it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Role, Scheme
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph.op_table import OUT, OpKind, OpRow, OpTable, Slot
from pt2e_quant.graph.pattern import Many, Op, Var

sys.path.append(str(Path(__file__).resolve().parent))  # tests are no package

aten = torch.ops.aten
INT8 = Scheme(name="int8", input=INT8_ACTIVATION, output=INT8_ACTIVATION, weight=INT8_WEIGHT)


def _slots(*inputs: str, weight: bool = False) -> tuple[Slot, ...]:
    made = [Slot(at=i, role=Role.INPUT, accepts=(INT8_ACTIVATION,)) for i in inputs]
    if weight:
        made.append(Slot(at="w", role=Role.WEIGHT, accepts=(INT8_WEIGHT,)))
    return (*made, Slot(at=OUT, role=Role.OUTPUT, accepts=(INT8_ACTIVATION,)))


def _row(name: str, *find: Op, slots: tuple[Slot, ...], **rest: object) -> OpRow:
    return OpRow(name=name, find=find, slots=slots, lowers_to=name, **rest)


CONV = Op(aten.conv2d.default, Var("x"), Var("w"), name="conv")
TABLE = OpTable(
    backend="Toy",
    rows=(
        _row("conv2d", CONV, slots=_slots("x", weight=True)),
        _row("conv2d_relu", Op(aten.relu.default, CONV), slots=_slots("x", weight=True)),
        _row("linear", Op(aten.linear.default, Var("x"), Var("w")), slots=_slots("x", weight=True)),
        _row("add", Op(aten.add.Tensor, Var("x"), Var("y")), slots=_slots("x", "y")),
        _row("cat", Op(aten.cat.default, Many("xs")), slots=_slots("xs"), share=(("xs", OUT),)),
        _row(
            "max_pool2d",
            Op(aten.max_pool2d.default, Var("x")),
            slots=_slots("x"),
            share=(("x", OUT),),
            kind=OpKind.MOVES,
        ),
    ),
    reasons={"aten.tanh": "Toy's tanh is slower than float"},
)


class ConvNet(nn.Module):
    """conv-bn-relu, pool, a residual add, linear; a buffer counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8 * 16, 10)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls.add_(1)
        y = torch.relu_(self.bn(self.stem(x)))
        y = torch.nn.functional.max_pool2d(y, 2)
        y = y + self.body(y)
        return {"logits": self.head(self.drop(y).flatten(1)), "calls": self.calls + 0}


@pytest.fixture
def net() -> ConvNet:
    torch.manual_seed(0)
    model = ConvNet().train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 8, 8))
        model.calls.zero_()
    return model.eval()


@pytest.fixture
def quantizer() -> Callable[..., TableQuantizer]:
    return lambda **options: TableQuantizer(TABLE, INT8, **options)


@pytest.fixture
def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(3)]


@pytest.fixture
def batch_dim() -> dict[str, object]:
    return {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
