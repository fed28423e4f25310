"""Refuse a graph whose q/dq a runtime has no form for, by name, with the nearest scheme it runs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.recipe import Recipes, Wanted
from pt2e_quant.core.cache_ops import PackRows, UnpackRows
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.formats.format_ops import (
    ChooseScales,
    DequantizeBlock,
    DequantizeCodeBook,
    DequantizeFloat,
    QuantizeBlock,
    QuantizeCodeBook,
    QuantizeFloat,
)
from pt2e_quant.core.formats.number_formats import float_format
from pt2e_quant.graph.idioms.cache_writes import cache_nodes
from pt2e_quant.graph.meta import source_constant
from pt2e_quant.graph.ops import arguments

_WEIGHTS = (DequantizeBlock, DequantizeFloat, DequantizeCodeBook)
_ACTIVATIONS = (QuantizeBlock, QuantizeFloat, QuantizeCodeBook)


def refuse_formats(
    gm: GraphModule,
    recipes: Recipes,
    *,
    has_weights: bool = False,
    has_caches: bool = False,
) -> None:
    """Refuse operators of `core.format_ops` and quantized caches.

    Args:
        gm: a canonical graph, after what can be written in torch's operators has been.
        recipes: of the backend.
        has_weights: weights in these formats are fine; only activations and caches are not.
        has_caches: caches are fine.

    Raises:
        UnsupportedError: naming the first, its node and module, and the recipe that runs.
    """
    caches = cache_nodes(gm)
    for node, wanted in _found(gm):
        if has_weights and not wanted.is_activation:
            continue
        if node in caches:
            if has_caches:
                continue
            raise UnsupportedError(
                f"{recipes.runtime} has no kernel for caches in {wanted.bits} bits",
                node=node,
                fix="leave out quantizer.quantize_caches(), or narrow its names=: caches in float "
                "are lowered",
            )
        nearest = recipes.nearest(wanted)
        what = "activations" if wanted.is_activation else "weights"
        raise UnsupportedError(
            f"{recipes.runtime} has no kernel for {what} in {wanted.text}",
            node=node,
            fix=f'the nearest recipe it runs is "{nearest}": annotate this module with its scheme, '
            "or leave it float with None",
        )


def _found(gm: GraphModule) -> Iterator[tuple[Node, Wanted]]:
    for node in gm.graph.nodes:
        if node.target in (PackRows, UnpackRows):
            yield node, Wanted(4, True, True, None, "a cache of 4 bits (quantize_caches)")
        elif node.target in _ACTIVATIONS:
            yield node, _wanted(node, is_activation=True)
        elif node.target in _WEIGHTS and not _is_part(node):
            codes = node.all_input_nodes[0]
            yield node, _wanted(node, is_activation=source_constant(codes) is None)


def _is_part(node: Node) -> bool:
    """True if a dequantize makes the scales of another (double quantization)."""
    readers = [u for user in node.users for u in (user, *user.users)]
    return any(
        user.target in (*_WEIGHTS, *_ACTIVATIONS) and user.args[0] is not node for user in readers
    )


def _wanted(node: Node, *, is_activation: bool) -> Wanted:
    named: dict[str, Any] = arguments(node)
    bits, text = _codes(node, named)
    block: list[int] = list(named["block_size"])
    lengths = ["all" if length == WHOLE else str(length) for length in block]
    scales = named.get("scales")
    is_dynamic = is_activation and isinstance(scales, Node) and _is_chosen(scales)
    group = block[-1] if block and block[-1] not in (1, WHOLE) else None
    text = f"{text}, blocks of {' x '.join(lengths)}{' with scales of run time' * is_dynamic}"
    return Wanted(bits, is_activation, is_dynamic, group, text, named.get("format", ""))


def _is_chosen(scales: Node) -> bool:
    return scales.target is ChooseScales


def _codes(node: Node, named: dict[str, Any]) -> tuple[int, str]:
    """Bits of a code, and what the codes are."""
    if "format" in named:
        form = float_format(named["format"])
        return form.bits, form.name
    if "table" in named:
        table: Any = named["table"].meta.get("val")
        size = table.shape[-1] if isinstance(table, Tensor) else 256
        return max(1, (size - 1).bit_length()), f"a code book of {size} values"
    low, high = int(named["quant_min"]), int(named["quant_max"])
    bits = (high - low).bit_length()
    scales: Any = named["scales"].meta.get("val")
    dtype = scales.dtype if isinstance(scales, Tensor) else torch.float32
    kept = "" if dtype == torch.float32 else f" with {str(dtype).removeprefix('torch.')} scales"
    return bits, f"integers of {bits} bits{kept}"
