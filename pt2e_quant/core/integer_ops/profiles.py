"""Rounding of each target as data: one profile a runtime.

The integers of a product or a sum are the same everywhere. Runtimes differ in how they bring them
to the scale of the output, and each source below is the file that a profile was written from.
"""

from dataclasses import dataclass
from enum import StrEnum

from pt2e_quant.core.errors import ConfigError, near


class Requantization(StrEnum):
    """Requantization of an accumulator to the output's scale."""

    FLOAT32 = "float32"
    """clamp(half_even(float32(total) * ((x * w) / y)) + zero); each step rounds to float32."""
    FLOAT32_WITH_ZERO = "float32_with_zero"
    """clamp(half_even(float32(total) * ((x * w) / y) + zero)); each step rounds to float32; a zero
    of int8 as that of uint8."""
    TWO_FACTORS = "two_factors"
    """clamp(half_even(float32(total) * (x * w) * (1 / y) + zero)); each step rounds to float32."""
    TWO_FACTORS_THEN_ZERO = "two_factors_then_zero"
    """clamp(half_even(float32(total) * (x * w) * (1 / y)) + zero); each step rounds to float32."""
    SINGLE = "single"
    """(total * multiplier + 2**(shift - 1)) >> shift: one rounding, ties up."""
    GEMMLOWP = "gemmlowp"
    """High half of the doubled product, ties up; then a shift, ties away from zero."""
    TOSA_DOUBLE = "tosa_double"
    """SINGLE with half of 2**31 added before, away from zero, where the shift is above 31."""

    @property
    def is_fixed(self) -> bool:
        """True if it multiplies by an integer of 31 bits and shifts."""
        return not self.value.startswith("float32") and not self.has_two_factors

    @property
    def has_two_factors(self) -> bool:
        """True if a real result, in float32, stands between its two factors."""
        return self in (Requantization.TWO_FACTORS, Requantization.TWO_FACTORS_THEN_ZERO)

    @property
    def rounds_with_zero(self) -> bool:
        """True if the zero_point is added before rounding, so that it decides where ties go."""
        return self in (Requantization.FLOAT32_WITH_ZERO, Requantization.TWO_FACTORS)


class Quantization(StrEnum):
    """Quantization of a real value to an integer."""

    INVERSE = "inverse"
    """half_even(x * (1 / scale)) + zero, each step in float32, as PyTorch has it."""
    DIVIDED = "divided"
    """half_even(x / scale) + zero, in float32."""


class RowQuantization(StrEnum):
    """Quantization of a row of float values to int8 by a scale chosen at run time.

    The range [min, max] of a row is widened to hold 0.
    """

    DOUBLE = "double"
    """half_even(x * (1 / s) + zero) in float64 with s = (max - min) / 255, as PyTorch has it."""
    INVERSE_OF_INVERSE = "inverse_of_inverse"
    """half_even(x * (1 / s)) + zero with s = 1 / (255 / (max - min)), each step in float32."""
    DIVIDED = "divided"
    """half_even(x / s) + zero with s = (max - min) * (1 / 255), each step in float32."""


class Functions(StrEnum):
    """The implementation that computes the entries of tables in float32."""

    TORCH = "torch"
    """PyTorch."""
    MLAS = "mlas"
    """PyTorch, but sigmoid, silu and tanh as `core.integer_ops.tables` has them; softmax of 8 bits
    has the output scale 1 / floor(1 / scale)."""
    XNNPACK = "xnnpack"
    """PyTorch, but leaky_relu by multipliers of 8 fraction bits."""


class Addition(StrEnum):
    """Addition of two tensors of different scales."""

    EXACT = "exact"
    """31-bit multipliers with one shift, one rounding, ties up."""
    MULTIPLIERS_OF_21_BITS = "multipliers_of_21_bits"
    """21-bit multipliers with one shift, from float32 ratios rounded to even."""
    FLOAT_RATIOS = "float_ratios"
    """float32: fma(x, x_ratio, fma(y, y_ratio, constant)), half to even, with the constant
    zero - fma(x_ratio, x_zero, y_ratio * y_zero), all int8 as uint8; 16 bits as REAL."""
    REAL = "real"
    """float32: both dequantized, added, quantized."""
    RESCALED = "rescaled"
    """Both to 2**20 / (2 * the greater scale) by the target's requantization, then the sum."""


class Averaging(StrEnum):
    """Division of a sum over a window to its average."""

    REQUANTIZED = "requantized"
    """Requantized by scale / (output scale * count)."""
    WEIGHTED = "weighted"
    """As REQUANTIZED; windows of equal count are products with weights of 127 / (127 * count)."""
    DIVIDED = "divided"
    """Integers divided by count, ties away from zero; input and output have one scale."""
    RECIPROCAL = "reciprocal"
    """Differences times ((2**30 + 1) << k) // count >> 30 + k, where 2**k is the least power of two
    that is at least count; ties up; input and output have one scale."""


class Bias(StrEnum):
    """Addition of the bias of a linear or convolution."""

    NEAREST = "nearest"
    """half_even(bias / (x * w)) in float64, added to the accumulator."""
    FLOAT32 = "float32"
    """half_even(bias * (1 / (x * w))), each step in float32, added to the accumulator."""
    REAL = "real"
    """In float32, to the accumulator times x * w; needs a requantization of two factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The arithmetic of one target.

    Attributes:
        name: of the target.
        requantization: of products, averages and changes of scale.
        addition: of add and sub.
        averaging: of windowed averages whose scale does not change.
        source: where the arithmetic was read.
        multiplier_bits: of a requantization by multiplier and shift, 1 (a shift alone) .. 31.
        bias: of linears and convolutions.
        multiplication: of products of two tensors, element by element; None: as requantization.
        quantization: of real values: inputs, entries of tables.
        functions: that tables are made of.
        rows: of real values with a scale of run time for each row.

    Raises:
        ConfigError: multipliers have other bits, or a real bias has no real result to be added to.
    """

    name: str
    requantization: Requantization
    addition: Addition
    averaging: Averaging
    source: str
    multiplier_bits: int = 31
    bias: Bias = Bias.NEAREST
    multiplication: Requantization | None = None
    quantization: Quantization = Quantization.INVERSE
    functions: Functions = Functions.TORCH
    rows: RowQuantization = RowQuantization.DOUBLE

    def __post_init__(self) -> None:
        if not 1 <= self.multiplier_bits <= 31:
            raise ConfigError(f"multipliers have 1 .. 31 bits, found {self.multiplier_bits}")
        if self.bias is Bias.REAL and not self.requantization.has_two_factors:
            raise ConfigError(
                f'a real bias is added to a real result; "{self.requantization}" has none',
                fix="requantization=Requantization.TWO_FACTORS",
            )


DEFAULT = Profile(
    name="default",
    requantization=Requantization.FLOAT32,
    addition=Addition.EXACT,
    averaging=Averaging.REQUANTIZED,
    source="docs/integer_reference.md",
)
"""float32 factors, and sums that are rounded once."""

_ALL = (
    DEFAULT,
    Profile(
        name="xnnpack",
        requantization=Requantization.FLOAT32,
        addition=Addition.MULTIPLIERS_OF_21_BITS,
        averaging=Averaging.WEIGHTED,
        source="XNNPACK src/microparams-init.c (xnn_init_qs8_qc8w_conv_minmax_fp32_scalar_params, "
        "xnn_init_qs8_add_minmax_scalar_params), src/qs8-requantization/fp32-scalar-lrintf.c and "
        "fp32-scalar-fmagic.c; "
        "ExecuTorch backends/xnnpack/operators/quant_params.py (from_bias); "
        "src/xnnpack/quantization.h (xnn_f32_qd8_asymmetric_quantization_params), "
        "src/operator-run.c (xnn_compute_f32_qd8_convert); src/microparams-init.c "
        "(xnn_init_qs8_lrelu_scalar_params), src/qs8-vlrelu/",
        bias=Bias.FLOAT32,
        functions=Functions.XNNPACK,
        rows=RowQuantization.INVERSE_OF_INVERSE,
    ),
    Profile(
        name="onnxruntime_x86",
        requantization=Requantization.FLOAT32,
        addition=Addition.FLOAT_RATIOS,
        averaging=Averaging.REQUANTIZED,
        source="ONNX Runtime onnxruntime/core/mlas/lib/quantize.cpp (MlasRequantizeOutput, "
        "MlasQuantizeLinear), qlmul.cpp (MlasQLinearMulVectorS16), "
        "intrinsics/avx2/qladd_avx2.cpp (MlasQLinearAddKernelAvx2Helper), logistic.cpp, "
        "tanh.cpp; contrib_ops/cpu/quantization/qlinear_softmax.cc; that its compiler fuses "
        "the first product of the add's constant was measured; rows: this package, "
        "backends/onnx/rewrites/expand_per_token.py (choose_rows)",
        multiplication=Requantization.FLOAT32_WITH_ZERO,
        quantization=Quantization.DIVIDED,
        functions=Functions.MLAS,
        rows=RowQuantization.DIVIDED,
    ),
    Profile(
        name="onednn",
        requantization=Requantization.TWO_FACTORS,
        addition=Addition.REAL,
        averaging=Averaging.REQUANTIZED,
        source="oneDNN src/cpu/ref_convolution_int8.cpp (execute_forward): input scale, weight "
        "scale, bias in float32, post-ops, division by the output scale, zero point, rounding; "
        "its kernels multiply both scales first, src/cpu/scale_utils.cpp (precompute_scales), and "
        "invert the output's, src/cpu/x64/jit_avx512_core_amx_convolution.cpp: the profile is "
        "that of the kernels",
        bias=Bias.REAL,
    ),
    Profile(
        name="triton",
        requantization=Requantization.TWO_FACTORS_THEN_ZERO,
        addition=Addition.REAL,
        averaging=Averaging.REQUANTIZED,
        source="this package, kernels/epilogue/reference.py (finish)",
        bias=Bias.REAL,
    ),
    Profile(
        name="tflite",
        requantization=Requantization.GEMMLOWP,
        addition=Addition.RESCALED,
        averaging=Averaging.DIVIDED,
        source="TensorFlow Lite tensorflow/lite/kernels/internal/common.cc "
        "(MultiplyByQuantizedMultiplier), reference/add.h, reference/integer_ops/pooling.h; "
        "gemmlowp fixedpoint/fixedpoint.h",
    ),
    Profile(
        name="tosa",
        requantization=Requantization.SINGLE,
        addition=Addition.RESCALED,
        averaging=Averaging.RECIPROCAL,
        source="TOSA specification, apply_scale_32 (SINGLE_ROUND), reciprocal_scale, AVG_POOL2D; "
        "the same in TOSA's reference model, reference_model/src/quant_util.h; ruy "
        "ruy/apply_multiplier.cc (MultiplyByQuantizedMultiplier) rounds products alike",
    ),
    Profile(
        name="tosa_double",
        requantization=Requantization.TOSA_DOUBLE,
        addition=Addition.RESCALED,
        averaging=Averaging.RECIPROCAL,
        source="TOSA specification, apply_scale_32 (DOUBLE_ROUND), reciprocal_scale; "
        "LLVM mlir/lib/Conversion/TosaToArith/TosaToArith.cpp has it in operators",
    ),
)

PROFILES = {profile.name: profile for profile in _ALL}
"""Every profile by name."""

_OTHER_NAMES = {"gemmlowp": "tflite"}
"""Other names: gemmlowp is the library that TensorFlow Lite's arithmetic comes from."""


def profile_named(profile: Profile | str) -> Profile:
    """The profile of a name, in capitals or not; a profile is returned as it is.

    Raises:
        ConfigError: no profile has that name.

    >>> profile_named("XNNPACK").name, profile_named("gemmlowp").name
    ('xnnpack', 'tflite')
    """
    if isinstance(profile, Profile):
        return profile
    name = str(profile).lower()
    name = _OTHER_NAMES.get(name, name)
    if name not in PROFILES:
        raise ConfigError(f'no rounding profile is named "{profile}"', fix=near(name, PROFILES))
    return PROFILES[name]
