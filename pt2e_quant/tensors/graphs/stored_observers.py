"""Qparams that a tensor has already, in the place of what a graph's observer would find."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.formats.block_qparams import BlockQParams
from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.qparams import QParams
from pt2e_quant.graph.meta import attribute
from pt2e_quant.observers.static.fixed import ImportedQParams
from pt2e_quant.observers.weights.block_weight import BlockWeightObserver
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.values import Parts, decode, encode, to_qparams

_ROUNDING = 1e-5
"""Of the greatest magnitude: products of float32 scales are off by less."""


class StoredObserver(ImportedQParams):
    """Qparams that a tensor has already, in the place of an observer that would look for them.

    Args:
        like: the observer.
        found: the qparams.
    """

    def __init__(self, like: Any, found: QParams) -> None:
        super().__init__(
            found.scale,
            found.zero_point,
            dtype=like.dtype,
            qscheme=like.qscheme,
            quant_min=found.quant_min,
            quant_max=found.quant_max,
            ch_axis=getattr(like, "ch_axis", 0),
            group_size=getattr(like, "group_size", None),
        )
        self.observes_constant = False
        ends = [
            found.scale * (end - found.zero_point) for end in (found.quant_min, found.quant_max)
        ]
        self.min_val, self.max_val = ends[0].reshape(-1), ends[1].reshape(-1)


class FoldedWeightError(UnsupportedError):
    """A graph has folded into a stored weight what its codes under no scales are."""


def held_by(graph: GraphModule, name: str) -> Tensor | None:
    """The constant that a prepared graph reads by a name; None if it holds no such one."""
    value = attribute(graph, name)
    return value.detach() if isinstance(value, Tensor) else None


def stored_observer(
    observer: Any, tensor: QuantizedTensor, name: str, held: Tensor | None
) -> nn.Module:
    """An observer with the qparams of a stored weight.

    Args:
        observer: of the prepared graph.
        tensor: the weight.
        name: its name.
        held: what the graph reads in its place, float: the weight's real values, or those times a
            batch norm that was folded into them.

    Raises:
        UnsupportedError: the graph quantizes the weight otherwise.
        FoldedWeightError: the graph reads other values.
    """
    found = _qparams_of(tensor, name, held)
    wanted = getattr(observer, "scheme", None)
    if isinstance(found, BlockQParams):
        if wanted is not None and wanted != tensor.form.scheme:
            raise differs(name, str(tensor.form.scheme), str(wanted))
        made = BlockWeightObserver(tensor.form.scheme)
        made.found = found
        made.min_val = made.max_val = torch.zeros(1)
        return made
    axis = getattr(observer, "ch_axis", None)
    is_other = observer.dtype != found.dtype or getattr(observer, "group_size", None) != (
        found.group_size
    )
    if wanted is not None or is_other or (found.axis is not None and axis != found.axis):
        other = f"{observer.dtype} {getattr(observer, 'qscheme', '')}"
        raise differs(name, str(tensor.form.scheme), other)
    return StoredObserver(observer, found)


def differs(name: str, own: str, wanted: str) -> UnsupportedError:
    """The error of a weight or input that a graph would quantize otherwise."""
    return UnsupportedError(
        f"{name} is {own}, and would be quantized anew as {wanted}",
        fix="give a recipe whose weights have this scheme, or quantize_ with the recipe's",
    )


def _qparams_of(tensor: QuantizedTensor, name: str, held: Tensor | None) -> QParams | BlockQParams:
    """The qparams of a tensor for what a graph reads in its place."""
    parts, form = tensor.plain_parts(), tensor.form
    real = decode(parts, form)
    is_same = held is None or held.shape != real.shape or bool((held == real).all())
    scaled = parts if is_same or held is None else _scaled(parts, form, real, held)
    if scaled is None:
        raise FoldedWeightError(
            f"the graph does not read {name} as it is stored ({form.scheme}), but what a batch norm"
            " or a calculation makes of it, which the codes with other scales are not",
            fix="fold it before the weight is quantized "
            "(torch.nn.utils.fusion.fuse_conv_bn_eval), or leave the weight float by the filter",
        )
    return to_qparams(scaled, form)


def _scaled(parts: Parts, form: TensorForm, real: Tensor, held: Tensor) -> Parts | None:
    """Parts whose scales take in the factor that a graph has multiplied each block with.

    None if the codes under such scales are not the graph's values.
    """
    scale = parts.get("scale")
    if scale is None or scale.dtype is not torch.float32 or "steps" in parts:
        return None
    products = _sums(held.double() * real.double(), form)
    factor = (products / _sums(real.double().square(), form)).reshape(scale.shape)
    # A factor of 0 leaves zeros, which any scale has.
    usable = torch.where(factor.isfinite() & (factor != 0), factor, 1.0)
    made = parts | {"scale": (scale.double() * usable.abs()).float()}
    if "zero_point" in parts:
        low, high = form.scheme.range
        zero = parts["zero_point"]
        mirrored = (low + high - zero.to(torch.int32)).to(zero.dtype)
        made["zero_point"] = torch.where(usable < 0, mirrored, zero)
    made["codes"] = encode(held.to(real.dtype), made, form)
    is_near = (decode(made, form) - held).abs().max() <= _ROUNDING * held.abs().max()
    return made if bool(is_near) else None


def _sums(values: Tensor, form: TensorForm) -> Tensor:
    """The sums of blocks that share a scale."""
    sizes: list[int] = []
    for size, length in zip(form.shape, form.block, strict=True):
        own = size if length == WHOLE else length
        if size % own:
            return values.new_full((1,), torch.nan)
        sizes += [size // own, own]
    return values.reshape(sizes).sum(tuple(range(1, len(sizes), 2)))
