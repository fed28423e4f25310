"""Products of two float8 matrices: torch's kernel, its emulation, and filling up for the kernel."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.blocks import block_lengths, grid_shape
from pt2e_quant.core.formats.format_arithmetic import dequantize_float
from pt2e_quant.core.granularity import Granularity, PerRow, PerTensor
from pt2e_quant.training.float8.config import ScaledMMConfig, format_of

MULTIPLE = 16
"""The inner size and the columns must be multiples of this for a GPU's kernel."""
_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own


def _emulate(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mm(left.contiguous(), right.contiguous()).to(dtype)


def _fake_emulate(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


# An operator, because Inductor skips the rounding to bfloat16 where it fuses what reads it.
_LIBRARY.define("emulated_mm(Tensor left, Tensor right, ScalarType dtype) -> Tensor")  # type: ignore[no-untyped-call]
torch.library.impl(_LIBRARY, "emulated_mm", "CompositeExplicitAutograd")(_emulate)
torch.library.register_fake("pt2e_quant::emulated_mm", lib=_LIBRARY)(_fake_emulate)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operand:
    """A matrix of a product.

    Attributes:
        codes: float8[M, K].
        scale: float32, real units per code; its shape broadcasts over codes, or is that of blocks.
        granularity: what shares a scale.
    """

    codes: Tensor
    scale: Tensor
    granularity: Granularity

    def real(self) -> Tensor:
        """Real values: float32[M, K]."""
        block = block_lengths(self.granularity, self.codes.dim())
        grid = grid_shape(self.codes.shape, block)
        form = format_of(self.codes.dtype).name
        return dequantize_float(self.codes, self.scale.reshape(grid), None, block, form)


def scaled_mm(
    left: Operand, right: Operand, out_dtype: torch.dtype, config: ScaledMMConfig
) -> Tensor:
    """The product of two float8 matrices, [M, K] and [K, N].

    Blocks have no kernel that torch offers everywhere and are always emulated.

    Raises:
        ConfigError: the kernel takes no matrices of these sizes and may not fill them up.
    """
    dtype = torch.float8_e4m3fn if config.fp8_output else out_dtype
    if config.emulate or not _has_kernel(left, right):
        real = (left.real().contiguous(), right.real().contiguous())
        made: Tensor = torch.ops.pt2e_quant.emulated_mm.default(*real, dtype)
        return made
    (M, K), N = left.codes.shape, right.codes.shape[1]
    a, b = left.codes.contiguous(), right.codes.t().contiguous()
    a_scale, b_scale = _kernel_scales(left, right, M, N)
    if config.pad_inner_dim:
        a, b = _pad(a, M, _round_up(K)), _pad(b, _round_up(N), _round_up(K))
        if b_scale.dim() == 2:
            b_scale = torch.nn.functional.pad(b_scale, (0, b.shape[0] - N), value=1.0)
    else:
        check_sizes(a.device.type, M, K, N)
    y = torch._scaled_mm(
        a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=config.use_fast_accum
    )
    return y if y.shape[1] == N else y[:, :N].contiguous()


def check_sizes(device_type: str, M: int, K: int, N: int) -> None:
    """Check that a device's kernel takes matrices of these sizes, [M, K] and [K, N].

    Raises:
        ConfigError: it does not.
    """
    if device_type == "cuda" and (K % MULTIPLE or N % MULTIPLE):
        raise ConfigError(
            f"the kernel multiplies [M, K] and [K, N] with K and N multiples of {MULTIPLE}, found "
            f"[{M}, {K}] and [{K}, {N}]",
            fix="ScaledMMConfig(pad_inner_dim=True), or emulate=True",
        )


@cache
def has_scaled_mm(device_type: str, *, is_rowwise: bool) -> bool:
    """True if `torch._scaled_mm` runs on a device; tried once."""
    size = MULTIPLE
    codes = torch.zeros(size, size, device=device_type).to(torch.float8_e4m3fn)
    ones = torch.ones(size if is_rowwise else 1, 1, device=device_type)
    try:
        torch._scaled_mm(codes, codes.t(), ones, ones.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _has_kernel(left: Operand, right: Operand) -> bool:
    both, device_type = (left.granularity, right.granularity), left.codes.device.type
    if both not in ((PerTensor(), PerTensor()), (PerRow(-1), PerRow(0))):
        return False
    if device_type == "meta" or torch.compiler.is_compiling():
        return True
    return has_scaled_mm(device_type, is_rowwise=both[0] != PerTensor())


def _kernel_scales(left: Operand, right: Operand, M: int, N: int) -> tuple[Tensor, Tensor]:
    if left.granularity == PerTensor():
        return left.scale.reshape(()), right.scale.reshape(())
    # by way of one axis: strides of a transposed scale are not those the kernel asks for
    return left.scale.reshape(M).view(M, 1), right.scale.reshape(N).view(1, N)


def _round_up(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE


def _pad(codes: Tensor, rows: int, columns: int) -> Tensor:
    missing = (0, columns - codes.shape[1], 0, rows - codes.shape[0])
    if not any(missing):
        return codes
    # By bits, of which all are 0 in 0.0: torch fills up no float8.
    return torch.nn.functional.pad(codes.view(torch.uint8), missing).view(codes.dtype)
