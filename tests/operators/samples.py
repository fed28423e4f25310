"""torch's own samples of its operators, each as a model: the operator between two linears."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

__all__ = ["Sample", "names", "samples"]

_LEFT_OUT = (
    *("bernoulli", "cauchy", "dropout", "empty", "exponential", "geometric", "log_normal"),
    *("multinomial", "normal", "rand", "rrelu", "uniform"),  # drawn anew in each call
    *("complex", "jiterator", "polar", "resize_", "sparse", "to_sparse", "view_as_complex"),
    *("allclose", "equal", "item", "tolist"),  # give no tensor
    *("linalg.", "special.", "fft."),  # exercised in tests/passes/functions
)
_MOST_COLUMNS = 512


@dataclass(frozen=True)
class Sample:
    """An operator's model and what to call it with; the first input is observed.

    Attributes:
        name: of the operator and its variant.
        model: a linear, the operator, and a linear where the result has columns.
        inputs: tensors of floats; others of the sample are constants of the model.
    """

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]

    def batches(self, count: int) -> list[tuple[Tensor, ...]]:
        """Inputs beside the sample's, to calibrate with."""
        draws = (torch.Generator().manual_seed(at) for at in range(count))
        x, *rest = self.inputs
        return [(x * (1 + 0.05 * torch.randn(x.shape, generator=g)), *rest) for g in draws]


class _Between(nn.Module):
    def __init__(self, operator: Any, columns: int, args: Any, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.before, self.after = _near_identity(columns), nn.Identity()
        self.operator, self.args, self.kwargs = operator, args, kwargs

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        given = iter(others)
        args = pytree.tree_map(lambda a: next(given) if a is _INPUT else a, self.args)
        return self.after(self.operator(self.before(x), *args, **self.kwargs))


_INPUT: Any = type("Input", (), {})()
"""Stands for an input among a sample's arguments."""


def _near_identity(columns: int) -> nn.Linear:
    """A linear that keeps its input about in the range that the operator is defined on."""
    made = nn.Linear(columns, columns)
    with torch.no_grad():
        made.weight.copy_(torch.eye(columns) + 0.02 * made.weight)
        nn.init.zeros_(made.bias)
    return made


def _name(info: OpInfo) -> str:
    return ".".join(filter(None, (info.name, info.variant_test_name)))


@cache
def _operators() -> dict[str, OpInfo]:
    found = (o for o in op_db if not any(part in o.name for part in _LEFT_OUT))
    return {_name(o): o for o in found if torch.float32 in o.supported_dtypes("cpu")}


def names() -> list[str]:
    """Operators that compute with float32, sorted."""
    return sorted(_operators())


def samples(name: str, count: int) -> Iterator[Sample]:
    """As many samples of an operator, drawn from torch's, that torch can export."""
    info = _operators()[name]
    found = [s for s in info.sample_inputs("cpu", torch.float32) if _is_quantizable(s.input)]
    random.Random(0).shuffle(found)
    for sample in found[:count]:
        yield _made(name, info, sample)


def _is_quantizable(x: Any) -> bool:
    is_float = isinstance(x, Tensor) and x.dtype is torch.float32
    return is_float and x.dim() > 1 and x.shape[-1] > 1 and x.numel() > 0


def _made(name: str, info: OpInfo, sample: SampleInput) -> Sample:
    torch.manual_seed(0)
    inputs = [sample.input]

    def constant(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype is torch.float32 and value.numel() > 1:
            inputs.append(value)
            return _INPUT
        return value

    args = pytree.tree_map(constant, tuple(sample.args))
    model = _Between(info.op, sample.input.shape[-1], args, dict(sample.kwargs)).eval()
    given = tuple(v.detach().contiguous().clone() for v in inputs)
    with torch.no_grad():
        result = model(*given)
    if isinstance(result, Tensor) and result.dtype is torch.float32 and result.dim():
        if 1 < result.shape[-1] <= _MOST_COLUMNS:
            model.after = _near_identity(result.shape[-1])
    return Sample(name, model, given)
