"""One float operator between integers, as its integer form sees it.

A form is written once. With `Site.call = compute` its values are tensors and it runs; with a caller
that inserts nodes they are nodes and it builds the graph. The float operator itself is the form's
float twin: `Site.target` on the dequantized operands gives the real result that the integers stand
for, and its gradient is the straight-through gradient of the form.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.integer_ops.calls import Call, Value, compute
from pt2e_quant.core.integer_ops.profiles import DEFAULT, Profile, Requantization
from pt2e_quant.core.integer_ops.requantize import OutputRange, factor_of, requantize
from pt2e_quant.core.qparams import QParams, dequantize
from pt2e_quant.graph.ops import Overloads, aten


class Declined(UnsupportedError):
    """Why a form cannot be written for a site; the site stays float."""


class Overflow(UnsupportedError):
    """A sum that may not fit in its accumulator; whoever has the node adds it."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The arithmetic of all sites of a graph.

    Attributes:
        profile: how the target rounds.
        accumulator_bits: 32, or 64 where sums may be longer than int32 holds.

    Raises:
        ConfigError: accumulators have other bits.
    """

    profile: Profile = DEFAULT
    accumulator_bits: int = 32

    def __post_init__(self) -> None:
        if self.accumulator_bits not in (32, 64):
            raise ConfigError(f"accumulator_bits must be 32 or 64, found {self.accumulator_bits!r}")


DEFAULT_ARITHMETIC = Arithmetic()

UNKNOWN_LENGTH = 1 << 16
"""Terms that are reckoned with in a sum of unknown length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand(Generic[Value]):
    """A tensor that a form reads in integers.

    Attributes:
        value: holds the integers.
        like: a tensor of its shape and dtype: the tensor itself, or the node's fake value.
        qparams: what the integers mean; of a run-time operand the limits and dtype alone are.
        is_constant: whether the integers are fixed.
        run_time: scale and zero_point that are chosen at run time, shaped to broadcast.
    """

    value: Value
    like: Tensor
    qparams: QParams
    is_constant: bool = False
    run_time: tuple[Value, Value] | None = None

    @property
    def storage(self) -> torch.dtype:
        """The dtype of the integers."""
        return self.like.dtype

    @property
    def reach(self) -> int:
        """The greatest abs(q - zero_point)."""
        if self.run_time is not None:
            return self.qparams.quant_max - self.qparams.quant_min
        zero = self.qparams.zero_point
        low, high = self.qparams.quant_min - zero, self.qparams.quant_max - zero
        return int(torch.maximum(low.abs().max(), high.abs().max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The quantization of a form's result.

    Attributes:
        qparams: of the quantize that ends the operator.
        range: its integers, after the clamp that may stand before the quantize.
    """

    qparams: QParams
    range: OutputRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Site(Generic[Value]):
    """One float operator whose quantized inputs are known.

    Attributes:
        call: how to compute.
        hold: makes a constant a value; the text says what it is to the operator.
        target: the float operator, the float twin of what a form writes.
        arguments: all of its arguments by their names in the schema. A quantized tensor is an
            Operand, a constant is a float tensor, any other tensor is a value.
        output: what the result is quantized to; None if it stays float.
        like: a tensor of the result's shape and float dtype.
        arithmetic: the target's.
        remarks: what a form has to say of the site, such as the error of a table.
    """

    call: Call[Value]
    hold: Callable[[Tensor, str], Any]
    target: Any
    arguments: Mapping[str, Any]
    output: Output | None
    like: Tensor
    arithmetic: Arithmetic = DEFAULT_ARITHMETIC
    remarks: list[str] = field(default_factory=list)

    def operand(self, name: str) -> Operand[Value]:
        """The operand of an argument with static qparams.

        Raises:
            Declined: it is float, or its qparams are chosen at run time.
        """
        found = self.arguments[name]
        if not isinstance(found, Operand):
            raise Declined(f'its input "{name}" is float')
        if found.run_time is not None:
            raise Declined(f'the qparams of its input "{name}" are chosen at run time')
        return found

    def required_output(self) -> Output:
        """The output, whose limits float32 must hold."""
        assert self.output is not None
        if not self.output.range.is_exact:
            raise Declined("the output's integers are wider than float32 holds")
        return self.output

    def requantized(
        self,
        total: Any,
        scales: Sequence[Tensor],
        *,
        divisor: int | Tensor = 1,
        reach: int = 0,
        output: Output | None = None,
        bias: Any = None,
        kind: Requantization | None = None,
    ) -> Any:
        """An accumulator in steps of scales[0] * scales[1] * … as integers of the output.

        Args:
            total: int32, or int64.
            scales: float32, shaped to broadcast against it.
            divisor: by which it is divided too; a float32 tensor broadcasts.
            reach: the greatest size of the accumulator, where it may be beyond int32: multipliers
                of 31 bits take its upper 31 bits then.
            output: the site's own by default.
            bias: in real units, where the profile adds it to the real result.
            kind: the profile's by default.
        """
        to = output or self.required_output()
        profile = self.arithmetic.profile
        kind, bits = kind or profile.requantization, profile.multiplier_bits
        beyond = reach.bit_length() - 31
        if kind.is_fixed and beyond > 0:
            half = self.call(aten.add.Tensor, total, 1 << (beyond - 1))
            total = self.call(aten.bitwise_right_shift.Tensor_Scalar, half, beyond)
            scales = (*scales, torch.tensor([2.0**beyond]))
        factor = factor_of(kind, scales, to.qparams.scale, divisor, bits=bits)
        return requantize(self.call, total, factor.held(self.hold), to.range, bias=bias)

    def literal(self, values: Tensor, name: str) -> Any:
        """One number as it is, several as a constant."""
        return values.item() if values.numel() == 1 else self.hold(values, name)


def is_boolean(value: Any) -> bool:
    """True if an argument of a site is a tensor of booleans, or the node of one."""
    like = value if isinstance(value, Tensor) else getattr(value, "meta", {}).get("val")
    return isinstance(like, Tensor) and like.dtype is torch.bool


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerForm:
    """The definition of float operators in integers.

    Attributes:
        name: what it is called in notes.
        operators: the float operators that it defines.
        write: the integers of the result, or its float values if the site has no output; raises
            Declined where the site is none of its.
        is_for_float: whether it also writes a result that stays float.
    """

    name: str
    operators: Overloads
    write: Callable[[Site[Any]], Any]
    is_for_float: bool = False


def computed(
    form: IntegerForm,
    target: Any,
    arguments: Mapping[str, Any],
    output: Output | None,
    arithmetic: Arithmetic = DEFAULT_ARITHMETIC,
) -> Tensor:
    """The result of a form on tensors.

    Args:
        form: of the operator.
        target: the float operator.
        arguments: as in `Site`; the operands hold tensors.
        output: what the result is quantized to.
        arithmetic: the target's.

    Raises:
        Declined: the form has no integers for these arguments.
    """
    site: Site[Tensor] = Site(
        call=compute,
        hold=lambda values, _: values,
        target=target,
        arguments=arguments,
        output=output,
        like=float_twin(target, arguments),
        arithmetic=arithmetic,
    )
    made: Tensor = form.write(site)
    return made


def float_twin(target: Any, arguments: Mapping[str, Any]) -> Tensor:
    """The float operator on the dequantized operands."""
    real: Tensor = target(**{name: _real(value) for name, value in arguments.items()})
    return real


def _real(value: Any) -> Any:
    if isinstance(value, Operand):
        return dequantize(value.value, value.qparams)
    if isinstance(value, Sequence) and any(isinstance(v, Operand) for v in value):
        return [_real(v) for v in value]
    return value
