"""2:4 semi-sparse codes: two values of each four neighbours, and which two."""

from collections.abc import Mapping

from torch import Tensor

from pt2e_quant.kernels.sparse_linear.pack import pack_sparse, unpack_sparse
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.layouts.layout import Layout, Parts, code_dtype


class SemiSparse(Layout):
    """`values`, half of the codes, and `pairs`, three bits for each four of them.

    Of `prune_2_4` weights under a symmetric scheme, whose zeros are zeros in codes.
    """

    name = "sparse_2_4"

    def refusal(self, form: TensorForm) -> str:
        """It takes matrices of integers with 0 for 0, in rows of fours."""
        scheme = form.scheme
        reasons = (
            (len(form.shape) != 2, "a matrix is needed"),
            (form.shape[-1] % 4 != 0, f"rows of {form.shape[-1]} are no fours of neighbours"),
            (scheme.format is not None, f"{scheme.format} is no integer"),
            (not scheme.symmetric or scheme.range[0] >= 0, "0 is no code of 0"),
            (scheme.bits > 8, "more than 8 bits"),
        )
        return next((text for holds, text in reasons if holds), "")

    def pack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`codes` as `values` and `pairs`.

        Raises:
            ConfigError: four neighbours hold more than two values.
        """
        made = {name: part for name, part in parts.items() if name != "codes"}
        values, pairs = pack_sparse(parts["codes"], code_dtype(form))
        return made | {"values": values, "pairs": pairs}

    def unpack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`values` and `pairs` as `codes`."""
        made = {name: part for name, part in parts.items() if name not in ("values", "pairs")}
        values, pairs = parts["values"], parts["pairs"]
        return {"codes": unpack_sparse(values, pairs, code_dtype(form), form.shape[1])} | made
