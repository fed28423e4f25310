"""An optimizer's state in few bits: places in a table, a scale for each block of a row.

A row is what lies behind the first axis of the parameter, and a block lies within a row. Codes and
scales of a shard of rows are then rows of the codes and scales of the whole, so that a checkpoint
can be loaded on another number of ranks.
"""

from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import Optimizer

from pt2e_quant.core.formats.format_arithmetic import (
    block_amax,
    dequantize_codebook,
    quantize_codebook,
    scale_of_amax,
)
from pt2e_quant.core.formats.number_formats import CodeBook
from pt2e_quant.core.packing import pack, unpack

_LEAST_BLOCK = 16
LEAST_ELEMENTS = 4096
"""States of smaller parameters stay float32, as in section 2 of arXiv:2110.02861."""


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Storage format of one state.

    Attributes:
        book: its values, of magnitude 1 at most.
        block: the most elements that share a scale.
    """

    book: CodeBook
    block: int


@cache
def dynamic_book(bits: int, *, is_signed: bool) -> CodeBook:
    """Values as dense near 0 as near 1: decades, each of twice as many steps as the one below.

    The "dynamic tree" data type of Dettmers et al., "8-bit Optimizers via Block-wise
    Quantization" (arXiv:2110.02861), section 1.3.

    >>> len(dynamic_book(4, is_signed=True).values), dynamic_book(4, is_signed=True).max
    (16, 1.0)
    """
    decades = bits - 1
    found = [0.0, 1.0]
    for decade in range(decades):
        edges = torch.linspace(0.1, 1.0, (1 if is_signed else 2) * 2**decade + 1).double()
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - decades + 1)).tolist()
        found += middles
        if is_signed:
            found += [-value for value in middles]
    name = f"dynamic{bits}" if is_signed else f"dynamic{bits}_positive"
    return CodeBook(name=name, bits=bits, values=tuple(sorted(found)))


@cache
def linear_book(bits: int) -> CodeBook:
    """Evenly spaced positive values without 0, so that no second moment becomes 0.

    Li et al., "Memory Efficient Optimizers with 4-bit States" (arXiv:2309.01507), section 4.1.
    """
    count = 1 << bits
    values = tuple((i + 1) / count for i in range(count))
    return CodeBook(name=f"linear{bits}_positive", bits=bits, values=values)


@cache
def signed_format(bits: int) -> StateFormat:
    """Return the format of a first moment or a momentum."""
    return StateFormat(dynamic_book(bits, is_signed=True), 256 if bits == 8 else 128)


@cache
def positive_format(bits: int) -> StateFormat:
    """Return the format of a second moment."""
    book = dynamic_book(bits, is_signed=False) if bits == 8 else linear_book(bits)
    return StateFormat(book, 256 if bits == 8 else 128)


def block_for(param: Tensor, form: StateFormat) -> int | None:
    """The elements that share a scale in a parameter's state; None if it stays float32.

    It does for small parameters, those of one axis, and where a shard would cut a block.
    """
    if param.numel() < LEAST_ELEMENTS or param.dim() < 2:
        return None
    if not isinstance(param, DTensor):
        return form.block
    others = [p for p in param.placements if isinstance(p, Shard) and p.dim != 0]
    if not others:
        return form.block
    if param.dim() != 2:
        return None
    parts = 1
    for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
        parts *= size if placement in others else 1
    length = param.shape[1]
    block = form.block
    while block >= _LEAST_BLOCK and length % (parts * block):
        block //= 2
    return block if block >= _LEAST_BLOCK else None


def encode_state(values: Tensor, form: StateFormat, block: int) -> tuple[Tensor, Tensor]:
    """A state in codes.

    Args:
        values: float32, of the parameter's shape, or of its shard's.
        form: how it is kept.
        block: elements that share a scale.

    Returns:
        uint8 codes, of values' shape or packed rows of it; float32 scales [rows, blocks].
    """
    rows = values.flatten(1)
    if rows.numel() == 0:
        scale = rows.new_zeros(rows.shape[0], -(-rows.shape[1] // block))
        codes = rows.to(torch.uint8)
    else:
        scale = scale_of_amax(block_amax(rows, (1, block)), 1.0, torch.float32)
        table = _table(form.book, rows.device)
        codes = quantize_codebook(rows, table, scale, (1, block))
    if form.book.bits == 8:
        return codes.reshape(values.shape), scale
    return pack(codes, form.book.code_dtype), scale


def decode_state(
    codes: Tensor, scale: Tensor, shape: torch.Size, form: StateFormat, block: int
) -> Tensor:
    """The values of a state: float32 of a shape."""
    if codes.numel() == 0:
        return torch.zeros(shape, device=codes.device)
    size = (shape[0], shape.numel() // shape[0])
    book = form.book
    rows = codes.reshape(size) if book.bits == 8 else unpack(codes, book.code_dtype, size)
    table = _table(book, codes.device)
    return dequantize_codebook(rows, table, scale, (1, block)).reshape(shape)


@cache
def _table(book: CodeBook, device: torch.device) -> Tensor:
    return book.table().to(device)


def like_param(local: Tensor, param: Tensor) -> Tensor:
    """A tensor of a shard's rows, as a DTensor if the parameter is one.

    Args:
        local: a tensor with the rows of the shard.
        param: the parameter.
    """
    if not isinstance(param, DTensor):
        return local
    parts = 1
    for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
        parts *= size if isinstance(placement, Shard) and placement.dim == 1 else 1
    shape = [param.shape[0], *local.shape[1:]]
    if len(shape) > 1:
        shape[1] *= parts
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def load_exactly(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Give states the dtypes of a state dict, after `Optimizer.load_state_dict`.

    Args:
        optimizer: what the state dict was loaded into.
        state_dict: as it was loaded.
    """
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, param in zip(saved, params, strict=True):
        for name, value in state_dict["state"].get(key, {}).items():
            if isinstance(value, Tensor) and value.dtype != optimizer.state[param][name].dtype:
                device = torch.device("cpu") if name == "step" else param.device
                optimizer.state[param][name] = value.detach().to(device, copy=True)
