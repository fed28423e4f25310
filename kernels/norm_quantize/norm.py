"""A normalization of rows: the arguments that both operators have, and the norms of a graph."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.graph.conditions import FLOAT_OPERANDS
from pt2e_quant.graph.idioms.rms_norm import NORMALIZED, RMS_NORM
from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.ops import CASTS, LAYER_NORM, MUL, is_call
from pt2e_quant.graph.pattern import Match, Op, Var, either_order

LONGEST = 16384
"""Elements of a row: a program holds whole rows in registers."""

NORM_SCHEMA = (
    "Tensor? weight=None, Tensor? bias=None, float eps=1e-05, bool rounds_first=False, "
    "ScalarType value_dtype=float"
)
"""The fields but for the kind, in a `torch.library` schema."""

_VALUES = (torch.float32, torch.float16, torch.bfloat16)


class NormKind(StrEnum):
    """The divisor of rows."""

    LAYER = "layer"
    """The deviation from their mean, which is taken off."""
    RMS = "rms"
    """The root of their mean square."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """y = centred / sqrt(mean(centred ** 2) + eps) * weight + bias, in float32.

    Args:
        kind: whether the mean is taken off first.
        weight: [K], of a float dtype; None for ones.
        bias: [K], of a float dtype; None for zeros.
        eps: what keeps the root from 0.
        rounds_first: round to value_dtype before the weight too, as Llama's written-out form does.
        value_dtype: what the result is rounded to before it is quantized: the graph's own dtype.

    Raises:
        ConfigError: an unknown kind, or a value_dtype that is no float dtype.
    """

    kind: str
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5
    rounds_first: bool = False
    value_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.kind not in set(NormKind):
            raise ConfigError(f'a norm is {" or ".join(NormKind)}, found "{self.kind}"')
        if self.value_dtype not in _VALUES:
            raise ConfigError(f"a norm's result is rounded to no {self.value_dtype}")


_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, *_HALF)


def _written_out() -> tuple[Op, ...]:
    """Llama's norm: weight * (x * rsqrt(mean(x ** 2) + eps)).to(dtype)."""
    scaled = (Op(op.targets, *op.args, through=CASTS) for op in NORMALIZED)
    return tuple(op for one in scaled for op in either_order(MUL, Var("w"), one, name="op"))


NORMS: dict[str, tuple[Op, ...]] = {
    "layer_norm": (
        Op(LAYER_NORM[0], Var("x"), Var("shape"), Var("w"), Var("b"), Var("eps"), name="op"),
    ),
    "rms_norm": (Op(RMS_NORM, Var("x"), Var("shape"), Var("w"), Var("eps"), name="op"),),
    "rms_norm_written_out": _written_out(),
}
"""Name to patterns; all have x and w, and their anchor is the normalized value."""


@dataclass(frozen=True, slots=True)
class FoundNorm:
    """A norm of a graph.

    Args:
        x: the rows, before a cast to float32 that only the norm needs.
        kind: and the rest: of `Norm`, with nodes for tensors.
    """

    x: Node
    kind: NormKind
    weight: Node | None
    bias: Node | None
    eps: float
    rounds_first: bool
    value_dtype: torch.dtype


def read_norm(match: Match) -> FoundNorm:
    """The norm of a match of one of `NORMS`."""
    op = match.nodes["op"]
    is_layer = is_call(op, LAYER_NORM)
    bias = match.values.get("b")
    weight = match.values.get("w")
    value: Tensor = match.anchor.meta["val"]
    return FoundNorm(
        x=_before_cast(match.node("x")),
        kind=NormKind.LAYER if is_layer else NormKind.RMS,
        weight=weight if isinstance(weight, Node) else None,
        bias=bias if isinstance(bias, Node) else None,
        eps=_eps(match),
        rounds_first=_rounds_first(match),
        value_dtype=value.dtype,
    )


def _before_cast(x: Node) -> Node:
    """The source of a cast to float32 if kernels can read it, else the node itself."""
    source = x.args[0] if x.args else None
    if not is_call(x, CASTS) or not isinstance(source, Node):
        return x
    value: Any = source.meta.get("val")
    wide = x.meta["val"].dtype is torch.float32
    return source if wide and isinstance(value, Tensor) and value.dtype in _FLOATS else x


def _eps(match: Match) -> float:
    eps = match["eps"]
    # aten.rms_norm computes narrow rows in float32, with that dtype's eps.
    return float(torch.finfo(torch.float32).eps if eps is None else eps)


def _rounds_first(match: Match) -> bool:
    """True if a written-out norm is cast to a narrow dtype before the weight."""
    if "shape" in match.values:
        return False
    factors: Any = match.anchor.args[:2]
    return any(n is not match["w"] and n.meta["val"].dtype in _HALF for n in factors)


def _is_of_rows(match: Match) -> bool:
    """True if the last axis alone is normalized, and its weight and bias are vectors."""
    shape = match.node("x").meta["val"].shape
    normalized = match.values.get("shape")
    if normalized is not None and list(normalized) != list(shape[-1:]):
        return False
    if [d % len(shape) for d in match.values.get("dims", [-1])] != [len(shape) - 1]:
        return False
    for name in ("w", "b"):
        vector = match.values.get(name)
        if vector is None:
            continue
        value = vector.meta.get("val") if isinstance(vector, Node) else None
        if not isinstance(value, Tensor) or list(value.shape) != list(shape[-1:]):
            return False
    return True


def _fits_registers(match: Match) -> bool:
    columns = match.node("x").meta["val"].shape[-1]
    return isinstance(columns, int) and columns <= LONGEST


def _is_constant_eps(match: Match) -> bool:
    return match["eps"] is None or isinstance(match["eps"], (int, float))


CONSTRAINTS = (
    Constraint(text="the last axis normalized alone", holds=_is_of_rows),
    Constraint(
        text=f"rows of at most {LONGEST} elements, which a program holds in registers",
        holds=_fits_registers,
    ),
    Constraint(text="an eps that is a number", holds=_is_constant_eps),
    FLOAT_OPERANDS,
)
