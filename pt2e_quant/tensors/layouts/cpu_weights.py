"""Layouts of weights as CPU kernels read them: oneDNN's, and torch's for 4 bits in groups."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pt2e_quant.core.granularity import PerChannel, PerGroup
from pt2e_quant.graph.sum_lengths import LONGEST_SUM
from pt2e_quant.kernels.int4_linear.cpu_tiles import UnpackInt4
from pt2e_quant.kernels.int4_linear.few_rows_op import PackInt4Codes, scales_and_zeros
from pt2e_quant.kernels.int4_linear.pack import OFFSET
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact
from pt2e_quant.kernels.onednn.operators import PackLinear
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.layouts.layout import Layout, Parts

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_GROUPS = (32, 64, 128, 256)


class Int4Rows(Layout):
    """`tiles`, `PackInt4Codes` of the codes, and `scales_and_zeros` in bfloat16.

    Scales kept in bfloat16 are read back from `scales_and_zeros`; float32 ones stay beside it. The
    operator permutes codes, in an order of its CPU: packing four bits of each place tells it.
    """

    name = "int4_rows"

    def refusal(self, form: TensorForm) -> str:
        """It takes matrices of 4-bit integers in groups of 32 to 256."""
        scheme, granularity = form.scheme, form.scheme.granularity
        size = granularity.group_size if isinstance(granularity, PerGroup) else 0
        is_float = scheme.scales.dtype in (torch.float32, torch.bfloat16)
        reasons = (
            (scheme.format is not None or scheme.bits != 4, "4-bit integers are needed"),
            (len(form.shape) != 2, f"a matrix is needed, found {len(form.shape)} dimensions"),
            (size not in _GROUPS, f"groups of {', '.join(map(str, _GROUPS))} are needed"),
            (not is_float or scheme.scales.double_group is not None, f"{scheme.scales}"),
            (bool(size) and form.shape[-1] % size != 0, f"groups of {size} do not divide rows"),
        )
        return next((text for holds, text in reasons if holds), "")

    def pack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`codes` as `tiles`; zero points, and scales in bfloat16, as `scales_and_zeros`."""
        offset = _offset(form)
        codes = parts["codes"].view(torch.uint8) + offset  # wraps round
        zero = parts.get("zero_point")
        zeros = None if zero is None else zero.to(torch.int32) + offset
        made = {n: p for n, p in parts.items() if n not in ("codes", "scale", "zero_point")}
        if parts["scale"].dtype is not torch.bfloat16:
            made |= {n: parts[n] for n in ("scale", "zero_point") if n in parts}
        return made | {
            "tiles": PackInt4Codes(codes),
            "scales_and_zeros": scales_and_zeros(parts["scale"].float(), zeros),
        }

    def unpack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`tiles` as `codes`."""
        own = ("tiles", "scales_and_zeros")
        made = {name: part for name, part in parts.items() if name not in own}
        rows, columns = form.shape
        offset = _offset(form)
        tiles = parts["tiles"]
        codes = UnpackInt4(tiles, columns)[:rows]
        storage = torch.int8 if offset else torch.uint8
        made["codes"] = (codes - offset).view(storage)
        if "scale" not in made:
            both = parts["scales_and_zeros"][:, :rows].transpose(0, 1)
            made["scale"] = both[..., 0].contiguous()
            if not form.scheme.symmetric or form.scheme.range[0] >= 0:
                # Whole steps, rounded to bfloat16 once: within half a step of the integer.
                steps = (both[..., 1].float() / both[..., 0].float()).round()
                made["zero_point"] = (OFFSET - offset - steps).to(storage)
        return made


def _offset(form: TensorForm) -> int:
    """Return the offset from an integer to its code: codes are unsigned."""
    return OFFSET if form.scheme.range[0] < 0 else 0


def _unpack_onednn(packed: Tensor) -> Tensor:
    return packed.to_dense().t().contiguous()


def _fake_unpack_onednn(packed: Tensor) -> Tensor:
    K, N = packed.shape
    return torch.empty((N, K), dtype=torch.int8, device=packed.device)


# An operator, since compilers have no opaque tensors to trace the steps with.
_LIBRARY.define("unpack_onednn_linear(Tensor packed) -> Tensor")  # type: ignore[no-untyped-call]
torch.library.impl(_LIBRARY, "unpack_onednn_linear", "CompositeExplicitAutograd")(_unpack_onednn)
torch.library.register_fake("pt2e_quant::unpack_onednn_linear", lib=_LIBRARY)(_fake_unpack_onednn)


class OneDnn(Layout):
    """A matrix of integers up to 8 bits with a scale for each row, or one: `packed`, opaque.

    Zero points of codes below 8 bits are taken off first: code - zero_point is an int8 weight.
    The integers come back by making the packed tensor dense. Products take integers, or float rows
    as two limbs (`docs/decisions/022`).
    """

    name = "onednn"

    def refusal(self, form: TensorForm) -> str:
        """It takes matrices of integers with a scale for each row, on machines with exact sums."""
        scheme = form.scheme
        reasons = (
            (scheme.format is not None, f"{scheme.format} is no integer"),
            (len(form.shape) != 2, f"a matrix is needed, found {len(form.shape)} dimensions"),
            (not form.is_scaled_by_rows, f"{scheme.granularity} is not a scale for each row"),
            (not scheme.scales.is_plain, f"{scheme.scales} are not float32"),
            (scheme.bits > 8, "more than 8 bits"),
            (scheme.bits == 8 and (not scheme.symmetric or scheme.range[0] >= 0),
             "affine or unsigned integers of 8 bits less their zero points do not fit 8 bits"),
            (not 1 <= form.shape[-1] <= LONGEST_SUM, f"sums of {form.shape[-1]} products"),
            (not onednn_is_exact(), "this machine's oneDNN saturates sums (no VNNI)"),
        )  # fmt: skip
        return next((text for holds, text in reasons if holds), "")

    def pack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`codes` less their zero points as `packed`, with what the products need besides."""
        by_row = form.scheme.granularity == PerChannel(0)
        own = ("codes", "scale") if by_row else ("codes",)
        made = {name: value for name, value in parts.items() if name not in own}
        codes = parts["codes"]
        zero = parts.get("zero_point")
        integers = codes if zero is None else (codes.to(torch.int16) - zero).to(torch.int8)
        packed = {"packed": PackLinear(integers.contiguous(), None)}
        packed["row_scale"] = parts["scale"].reshape(-1).expand(form.shape[0]).contiguous()
        return packed | made

    def unpack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`packed` as `codes`."""
        own = ("packed", "row_scale")
        kept = {name: part for name, part in parts.items() if name not in own}
        if "scale" not in kept:
            kept["scale"] = parts["row_scale"].reshape(-1, 1)
        integers = torch.ops.pt2e_quant.unpack_onednn_linear.default(parts["packed"])
        zero = parts.get("zero_point")
        if zero is not None:
            integers = (integers.to(torch.int16) + zero).to(zero.dtype)
        return {"codes": integers} | kept
