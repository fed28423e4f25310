"""int8 weights as oneDNN packs them for this machine: products of integers, limbs of float rows.

What `docs/decisions/022` says of graphs holds here: float rows go through as two limbs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pt2e_quant.core.granularity import PerChannel, PerTensor
from pt2e_quant.graph.sum_lengths import LONGEST_SUM
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact
from pt2e_quant.kernels.onednn.operators import PackLinear
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.layouts.layout import Layout, Parts

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own


def _unpack(packed: Tensor) -> Tensor:
    return packed.to_dense().t().contiguous()


def _fake_unpack(packed: Tensor) -> Tensor:
    K, N = packed.shape
    return torch.empty((N, K), dtype=torch.int8, device=packed.device)


# An operator, since compilers have no opaque tensors to trace the steps with.
_LIBRARY.define("unpack_onednn_linear(Tensor packed) -> Tensor")  # type: ignore[no-untyped-call]
torch.library.impl(_LIBRARY, "unpack_onednn_linear", "CompositeExplicitAutograd")(_unpack)
torch.library.register_fake("pt2e_quant::unpack_onednn_linear", lib=_LIBRARY)(_fake_unpack)


class OneDnn(Layout):
    """A matrix of integers up to 8 bits with a scale for each row, or one: `packed`, opaque.

    Zero points of codes below 8 bits are taken off first: code - zero_point is an int8 weight.
    The integers come back by making the packed tensor dense.
    """

    name = "onednn"

    def refusal(self, form: TensorForm) -> str:
        """It takes matrices of integers with a scale for each row, on machines with exact sums."""
        scheme = form.scheme
        by_row = scheme.granularity == PerChannel(0) or isinstance(scheme.granularity, PerTensor)
        reasons = (
            (scheme.format is not None, f"{scheme.format} is no integer"),
            (len(form.shape) != 2, f"a matrix is needed, found {len(form.shape)} dimensions"),
            (not by_row, f"{scheme.granularity} is not a scale for each row"),
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
