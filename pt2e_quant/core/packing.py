"""Sub-byte integers in bytes: the one format in which a quantized weight is stored.

The format, for a dtype of b bits, 1 to 7:

- **Rows.** A tensor is packed row by row. A row is all that lies behind the first dimension, in
  order of the strides of a contiguous tensor: shape [N, …] has N rows; a tensor of one dimension,
  or of none, is one row. So a row of a weight or of an embedding table has an address of its own.
- **Bits.** A row is a stream of bits. Value i is the bits i*b to i*b + b - 1 of it, its least
  significant bit first. Bit j of the stream is bit j % 8 of byte j // 8, where bit 0 is the least
  significant. A value may lie across two bytes (3, 5, 6 and 7 bits).
- **Padding.** A row of K values is ceil(K * b / 8) bytes. The bits left over in its last byte are
  zero when packed, and are not read when unpacked.
- **Sign.** A signed value is its two's complement in b bits; an unsigned one is plain binary.

So the packed tensor is uint8[N, ceil(K * b / 8)], or uint8[ceil(K * b / 8)] of one row. Where
K * b is a multiple of 8 no row has padding, and the bytes do not depend on where rows begin; a
group of G values begins at a byte if G * b is a multiple of 8. For 4 bits and no padding these
are the bytes of ONNX's INT4 and UINT4. Integers of 8 bits and more are stored as they are.

Two rows of three 4-bit values, -1 = 0b1111, and 2 = 0b0010; the high half of each last byte is
padding:

>>> pack(torch.tensor([[1, -1, -8], [2, 7, 0]], dtype=torch.int8), torch.int4).tolist()
[[241, 8], [114, 0]]

Eight 3-bit values in three bytes, 0b10001000, 0b11000110 and 0b11111010:

>>> row = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.uint8)
>>> [f"{byte:08b}" for byte in pack(row, torch.uint3).tolist()]
['10001000', '11000110', '11111010']

Nine signs, and five 2-bit values from -2 to 1:

>>> pack(torch.tensor([-1, 0, 0, -1, 0, 0, 0, 0, -1], dtype=torch.int8), torch.int1).tolist()
[9, 1]
>>> pack(torch.tensor([-2, -1, 0, 1, -2], dtype=torch.int8), torch.int2).tolist()
[78, 2]
>>> unpack(torch.tensor([78, 2], dtype=torch.uint8), torch.int2, (5,)).tolist()
[-2, -1, 0, 1, -2]
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pt2e_quant.core.dtypes import DTypeInfo, info
from pt2e_quant.core.errors import ConfigError


def packed_shape(shape: Sequence[int], bits: int) -> tuple[int, ...]:
    """The shape of the uint8 tensor that integers of `bits` bits, 1 to 7, are packed in.

    >>> packed_shape((64, 3, 3, 3), 4), packed_shape((5,), 2), packed_shape((), 4)
    ((64, 14), (2,), (1,))
    """
    rows, length = shape[:1] if len(shape) > 1 else (), math.prod(shape[1:])
    if len(shape) < 2:
        length = math.prod(shape)
    return (*rows, (length * bits + 7) // 8)


def pack(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers, one per element, in the packed format.

    Args:
        values: an integer tensor of any shape; neither it nor its storage is handed out.
        dtype: int1 to int7 or uint1 to uint7; a wider one gives a copy in its storage dtype.

    Returns:
        uint8, of `packed_shape`, on the device of values.

    Raises:
        ConfigError: a value is outside the dtype.
        UnsupportedError: dtype is no integer dtype.
    """
    limits = info(dtype)
    _check_values(values, limits)
    if not limits.is_sub_byte:
        return values.to(limits.storage, copy=True)
    shape = packed_shape(values.shape, limits.bits)
    if values.numel() == 0:
        return values.new_zeros(shape, dtype=torch.uint8)
    per_unit, unit_bytes, word = _unit(limits.bits)
    flat = values.reshape(-1, values.numel() // math.prod(shape[:-1]))
    units = -(-flat.shape[1] // per_unit)
    # What a narrowing cast keeps of a negative value is its two's complement.
    codes = torch.nn.functional.pad(
        flat.to(torch.uint8) & ((1 << limits.bits) - 1), (0, units * per_unit - flat.shape[1])
    ).view(-1, units, per_unit)
    # Bytes of its own, also where the word is a byte.
    words = codes.new_empty(codes.shape[:2], dtype=word).copy_(codes[..., 0])
    for i in range(1, per_unit):
        words |= codes[..., i].to(word) << (i * limits.bits)
    if unit_bytes == 1:
        return words.reshape(shape)
    stream = codes.new_empty(flat.shape[0], units, unit_bytes)
    for j in range(unit_bytes):
        stream[..., j] = (words >> (8 * j)) & 255
    return _cut(stream.view(-1, units * unit_bytes), shape[-1]).view(shape)


def unpack(packed: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The integers that `pack` put into bytes, one per element.

    Args:
        packed: uint8, of `packed_shape`; for 8 bits and more, in the storage dtype and of `shape`.
        dtype: what was given to `pack`.
        shape: the shape of the result.

    Returns:
        int8 or uint8 of `shape`; a new tensor, on the device of packed.

    Raises:
        ConfigError: packed differs in dtype or shape from what `pack` gives.
    """
    limits = info(dtype)
    check_packed(packed, limits, shape)
    if not limits.is_sub_byte:
        return packed.clone()
    if math.prod(shape) == 0:
        return packed.new_zeros(tuple(shape), dtype=limits.storage)
    per_unit, unit_bytes, word = _unit(limits.bits)
    rows = math.prod(packed.shape[:-1])
    units = -(-packed.shape[-1] // unit_bytes)
    stream = packed.reshape(rows, -1)
    if units * unit_bytes != stream.shape[1]:
        stream = torch.nn.functional.pad(stream, (0, units * unit_bytes - stream.shape[1]))
    stream = stream.reshape(rows, units, unit_bytes)
    words = stream[..., 0].to(word)
    for j in range(1, unit_bytes):
        words |= stream[..., j].to(word) << (8 * j)
    codes = packed.new_empty(rows, units, per_unit)
    for i in range(per_unit):
        codes[..., i] = (words >> (i * limits.bits)) & ((1 << limits.bits) - 1)
    if limits.signed:
        # Up to the sign bit of a byte, and back with the sign.
        codes = (codes << (8 - limits.bits)).view(torch.int8) >> (8 - limits.bits)
    length = math.prod(shape) // rows
    return _cut(codes.view(rows, -1), length).view(tuple(shape))


def check_packed(packed: Tensor, limits: DTypeInfo, shape: Sequence[int]) -> None:
    """Check the dtype and shape of a packed tensor.

    Raises:
        ConfigError: they are not what `pack` gives for this dtype and shape.
    """
    expected = packed_shape(shape, limits.bits) if limits.is_sub_byte else tuple(shape)
    storage = torch.uint8 if limits.is_sub_byte else limits.storage
    if packed.dtype != storage or tuple(packed.shape) != expected:
        raise ConfigError(
            f"{limits.dtype} values of shape {tuple(shape)} are packed in {storage} {expected}, "
            f"found {packed.dtype} {tuple(packed.shape)}",
            fix="give the tensor as core.packing.pack made it, with the shape it was made from",
        )


def _unit(bits: int) -> tuple[int, int, torch.dtype]:
    """The least run of whole values in whole bytes: values, bytes, and a dtype that holds it."""
    common = math.gcd(bits, 8)
    size = bits // common
    return 8 // common, size, {1: torch.uint8, 3: torch.int32}.get(size, torch.int64)


def _cut(rows: Tensor, length: int) -> Tensor:
    """The first elements of each row, in memory of their own."""
    if rows.shape[1] == length:
        return rows
    return rows[:, :length].clone(memory_format=torch.contiguous_format)


def _check_values(values: Tensor, limits: DTypeInfo) -> None:
    if values.is_floating_point() or values.is_complex():
        raise ConfigError(
            f"only integers are packed, found {values.dtype}", fix="quantize the tensor first"
        )
    # A tensor of the storage dtype of 8 bits and more can hold nothing else (and torch has no
    # aminmax for uint16).
    if values.numel() == 0 or (values.dtype == limits.storage and not limits.is_sub_byte):
        return
    if values.dtype == torch.uint16:
        values = values.to(torch.int32)
    low, high = (int(v) for v in values.aminmax())
    if not limits.holds(low, high):
        raise ConfigError(
            f"values from {low} to {high} do not fit {limits.dtype} "
            f"({limits.quant_min} to {limits.quant_max})",
            fix="quantize with the quant_min and quant_max of this dtype, or pack a wider one",
        )
