"""2:4 semi-sparse codes: two values of each four neighbours, and which two."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.packing import pack, unpack
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.layouts.layout import Layout, Parts, code_dtype

_PAIRS = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]])
"""The places of the two values that are kept of four: six ways, three bits."""
_UINT3: torch.dtype = getattr(torch, "uint3")  # noqa: B009  # torch's stubs do not list it


def prune_2_4(values: Tensor) -> Tensor:
    """Values with the two least magnitudes of each four neighbours along the last axis at 0.

    >>> prune_2_4(torch.tensor([[1.0, -3.0, 2.0, 0.5]])).tolist()
    [[0.0, -3.0, 2.0, 0.0]]

    Raises:
        ConfigError: rows are no multiple of four.
    """
    if values.shape[-1] % 4:
        raise ConfigError(f"rows of {values.shape[-1]} are no fours of neighbours")
    fours = values.reshape(-1, 4)
    least = fours.abs().topk(2, dim=1, largest=False).indices
    return fours.scatter(1, least, 0.0).reshape(values.shape)


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
        rows, columns = form.shape
        fours = parts["codes"].reshape(-1, 4)
        held = (fours != 0).to(torch.int8)
        if fours.numel() and int(held.sum(1).max()) > 2:
            raise ConfigError(
                "four neighbours hold more than two values",
                fix="prune the weight before it is quantized: prune_2_4(weight)",
            )
        # The first two places in order of (holds a value, place): zeros fill up.
        rank = held.to(torch.int64) * 4 + torch.arange(3, -1, -1)
        places = rank.topk(2, dim=1).indices.sort(1).values
        pairs = (_PAIRS[None] == places[:, None]).all(2).to(torch.uint8).argmax(1).to(torch.uint8)
        values = fours.gather(1, places).reshape(rows, columns // 2)
        return made | {
            "values": pack(values, code_dtype(form)),
            "pairs": pack(pairs.reshape(rows, columns // 4), _UINT3),
        }

    def unpack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`values` and `pairs` as `codes`."""
        made = {name: part for name, part in parts.items() if name not in ("values", "pairs")}
        rows, columns = form.shape
        values = unpack(parts["values"], code_dtype(form), (rows, columns // 2)).reshape(-1, 2)
        pairs = unpack(parts["pairs"], _UINT3, (rows, columns // 4)).reshape(-1)
        fours = values.new_zeros(len(values), 4)
        fours.scatter_(1, _PAIRS[pairs.to(torch.int64)], values)
        return {"codes": fours.reshape(rows, columns)} | made
