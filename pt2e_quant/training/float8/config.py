"""The configuration of a linear's three products: roles of operands, kernels, scaling."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

import torch

from pt2e_quant.core.arguments import check_flags, check_number, check_type
from pt2e_quant.core.errors import ConfigError, UnsupportedError, member_named
from pt2e_quant.core.formats.number_formats import FLOAT_FORMATS, FloatFormat
from pt2e_quant.core.granularity import Granularity, PerBlock, PerRow, PerTensor

BLOCK = 128
"""Elements along one axis of a block, as DeepSeek-V3 (arXiv:2412.19437), section 3.3.2, has it."""


class GemmInputRole(StrEnum):
    """The role of an operand of a product in the linear."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


class Gemm(StrEnum):
    """The three products of a linear: y = x w', dx = dy w, dw = dy' x."""

    OUTPUT = "output"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"


@dataclass(frozen=True, slots=True)
class ScaledMMConfig:
    """Configuration of one product.

    Args:
        emulate: multiply the dequantized operands in float32, with the result that
            `torch._scaled_mm` has on a CPU; runs on every device.
        use_fast_accum: let a GPU's tensor cores add with fewer bits.
        fp8_output: the kernel writes float8 (e4m3, scale 1) instead of the original dtype.
        pad_inner_dim: fill operands up with zeros where the kernel takes multiples of 16 only.
    """

    emulate: bool = False
    use_fast_accum: bool = False
    fp8_output: bool = False
    pad_inner_dim: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "emulate", "use_fast_accum", "fp8_output", "pad_inner_dim")


@dataclass(frozen=True, slots=True)
class LinearMMConfig:
    """Configuration of each of a linear's products."""

    output: ScaledMMConfig = ScaledMMConfig()
    grad_input: ScaledMMConfig = ScaledMMConfig()
    grad_weight: ScaledMMConfig = ScaledMMConfig()

    def __post_init__(self) -> None:
        for gemm in Gemm:
            check_type(gemm.value, self.of(gemm), ScaledMMConfig, "a ScaledMMConfig")

    def of(self, gemm: Gemm) -> ScaledMMConfig:
        """Return the configuration of one product."""
        found: ScaledMMConfig = getattr(self, gemm.value)
        return found


_GEMMS = MappingProxyType(
    {
        frozenset((GemmInputRole.INPUT, GemmInputRole.WEIGHT)): Gemm.OUTPUT,
        frozenset((GemmInputRole.GRAD_OUTPUT, GemmInputRole.WEIGHT)): Gemm.GRAD_INPUT,
        frozenset((GemmInputRole.GRAD_OUTPUT, GemmInputRole.INPUT)): Gemm.GRAD_WEIGHT,
    }
)


def choose_mm_config(
    left: tuple[GemmInputRole, LinearMMConfig], right: tuple[GemmInputRole, LinearMMConfig]
) -> ScaledMMConfig:
    """Return the configuration of the product of two operands, from their roles.

    Raises:
        UnsupportedError: no product of a linear has these two roles.
        ConfigError: the operands' configs say different things about it.
    """
    gemm = _GEMMS.get(frozenset((left[0], right[0])))
    if gemm is None:
        raise UnsupportedError(
            f"no product of a linear multiplies {left[0].value} and {right[0].value}",
            fix="give the operands two different roles of GemmInputRole",
        )
    first, second = left[1].of(gemm), right[1].of(gemm)
    if first != second:
        raise ConfigError(
            f'the operands disagree about "{gemm.value}": {left[0].value} has {first}, '
            f"{right[0].value} has {second}",
            fix="make both with the same LinearMMConfig",
        )
    return first


class Float8Scaling(StrEnum):
    """The part of a tensor that shares a scale."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    BLOCKWISE = "blockwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8TrainingConfig:
    """Configuration of `convert_to_float8_training`.

    Args:
        scaling: one scale for an operand; one for each row of the left and column of the right
            operand; or blocks of 128: 1x128 along the inner axis, 128x128 of weights.
        input_dtype: of the activations, float8_e4m3fn or float8_e5m2.
        weight_dtype: of the weights.
        grad_output_dtype: of the gradients.
        mm: how the three products run.
        amax_history: None finds scales from the operand itself; a length takes them from the
            greatest magnitudes of so many earlier steps (delayed scaling), see
            `update_float8_scales`. With tensorwise scaling only.
        float8_all_gather: FSDP2 gathers the weights as float8, with tensorwise scaling only.

    Raises:
        ConfigError: a dtype is no float8, there is no such scaling, or two settings exclude each
            other.
    """

    scaling: Float8Scaling = Float8Scaling.TENSORWISE
    input_dtype: torch.dtype = torch.float8_e4m3fn
    weight_dtype: torch.dtype = torch.float8_e4m3fn
    grad_output_dtype: torch.dtype = torch.float8_e5m2
    mm: LinearMMConfig = field(default_factory=LinearMMConfig)
    amax_history: int | None = None
    float8_all_gather: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaling", member_named(Float8Scaling, self.scaling, "scaling"))
        for dtype in (self.input_dtype, self.weight_dtype, self.grad_output_dtype):
            format_of(dtype)
        check_type("mm", self.mm, LinearMMConfig, "a LinearMMConfig")
        check_flags(self, "float8_all_gather")
        if self.amax_history is not None:
            check_number("amax_history", self.amax_history, least=1, is_whole=True)
        is_whole = self.scaling is Float8Scaling.TENSORWISE
        if self.amax_history is not None and not is_whole:
            raise ConfigError(
                "delayed scaling keeps 1 or more amaxes of whole tensors, found amax_history="
                f"{self.amax_history} with {self.scaling.value} scaling",
                fix="scaling=Float8Scaling.TENSORWISE, or amax_history=None",
            )
        if self.float8_all_gather and (not is_whole or self.amax_history is not None):
            raise ConfigError(
                "float8_all_gather needs one scale for a weight, found from the weight itself: "
                f"found {self.scaling.value} scaling and amax_history={self.amax_history}",
                fix="scaling=Float8Scaling.TENSORWISE and amax_history=None",
            )

    def dtype_of(self, role: GemmInputRole) -> torch.dtype:
        """The float8 of an operand."""
        found: torch.dtype = getattr(self, f"{role.value}_dtype")
        return found

    def granularity_of(self, role: GemmInputRole, *, inner_axis: int) -> Granularity:
        """The part of an operand that shares a scale.

        Args:
            role: the operand.
            inner_axis: the axis of the operand, 0 or -1, that the product sums over.
        """
        if self.scaling is Float8Scaling.TENSORWISE:
            return PerTensor()
        if self.scaling is Float8Scaling.ROWWISE:
            return PerRow(inner_axis)
        if role is GemmInputRole.WEIGHT:
            return PerBlock((BLOCK, BLOCK))
        return PerBlock((1, BLOCK) if inner_axis == -1 else (BLOCK, 1))

    def emulated(self) -> "Float8TrainingConfig":
        """The same with every product emulated."""
        mm = LinearMMConfig(*(replace(self.mm.of(gemm), emulate=True) for gemm in Gemm))
        return replace(self, mm=mm)


def format_of(dtype: torch.dtype) -> FloatFormat:
    """The small float that a torch dtype is.

    Raises:
        ConfigError: it is neither float8_e4m3fn nor float8_e5m2.
    """
    for form in FLOAT_FORMATS.values():
        if form.storage == dtype != torch.uint8:
            return form
    raise ConfigError(f"{dtype} is no float8", fix="use torch.float8_e4m3fn or torch.float8_e5m2")
