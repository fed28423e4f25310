import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.dtypes import DTYPES, info
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.packing import pack, packed_shape, unpack

SUB_BYTE = [row.dtype for row in DTYPES.values() if row.is_sub_byte]
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple) | st.sampled_from(
    [(1, 0), (0, 5), (7, 1, 3, 3), (2, 127), (1025,), (3, 64)]
)


def integers(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    row = info(dtype)
    generator = torch.Generator().manual_seed(seed)
    low, high = row.quant_min, min(row.quant_max, 2**31 - 2) + 1
    return torch.randint(low, high, shape, generator=generator).to(row.storage)


def stream(row_values: list[int], bits: int) -> list[int]:
    """The oracle: the format's own words, with Python integers of unlimited size."""
    number = sum((v % (1 << bits)) << (i * bits) for i, v in enumerate(row_values))
    return list(number.to_bytes(-(-len(row_values) * bits // 8), "little"))


@settings(max_examples=300)
@given(dtype=st.sampled_from(list(DTYPES)), shape=SHAPES, seed=st.integers(0, 10_000))
def test_unpack_when_packed_then_the_same_integers(dtype, shape, seed):
    values = integers(dtype, shape, seed)
    before = values.clone()
    packed = pack(values, dtype)
    restored = unpack(packed, dtype, shape)
    for made in (packed, restored):
        assert made.is_contiguous()
        assert made.untyped_storage().nbytes() == made.numel() * made.element_size()
    assert restored.dtype == info(dtype).storage
    assert restored.shape == values.shape
    assert torch.equal(restored, values)
    assert torch.equal(values, before)
    if info(dtype).is_sub_byte:
        assert packed.dtype == torch.uint8
        assert tuple(packed.shape) == packed_shape(shape, info(dtype).bits)


@settings(max_examples=200)
@given(
    dtype=st.sampled_from(SUB_BYTE),
    rows=st.integers(1, 4),
    length=st.integers(1, 40),
    seed=st.integers(0, 10_000),
)
def test_pack_when_any_row_then_the_bits_the_format_states(dtype, rows, length, seed):
    values = integers(dtype, (rows, length), seed)
    bits = info(dtype).bits
    packed = pack(values, dtype)
    assert packed.tolist() == [stream(row, bits) for row in values.tolist()]
    # A row has an address of its own.
    for at in range(rows):
        assert torch.equal(pack(values[at], dtype), packed[at])
        assert torch.equal(unpack(packed[at], dtype, (length,)), values[at])


@pytest.mark.parametrize("dtype", SUB_BYTE)
def test_pack_when_every_value_then_every_code_once(dtype):
    row = info(dtype)
    every = torch.arange(row.quant_min, row.quant_max + 1)
    assert torch.equal(unpack(pack(every, dtype), dtype, every.shape), every.to(row.storage))


@settings(max_examples=100)
@given(dtype=st.sampled_from(SUB_BYTE), seed=st.integers(0, 1000), noise=st.integers(0, 255))
def test_unpack_when_padding_is_not_zero_then_not_read(dtype, seed, noise):
    bits = info(dtype).bits
    values = integers(dtype, (3, 5), seed)
    packed = pack(values, dtype)
    spare = packed.shape[-1] * 8 - 5 * bits
    packed[:, -1] |= (noise << (8 - spare)) & 255 if spare else 0
    assert torch.equal(unpack(packed, dtype, (3, 5)), values)


def test_pack_when_strided_then_in_order_of_the_shape():
    values = integers(torch.int4, (6, 10), 0)
    assert torch.equal(pack(values.t(), torch.int4), pack(values.t().contiguous(), torch.int4))
    packed = pack(values, torch.int4)
    apart = torch.empty(6, 10, dtype=torch.uint8)[:, ::2].copy_(packed)
    assert torch.equal(unpack(apart, torch.int4, (6, 10)), values)


def test_pack_when_a_byte_or_wider_then_a_copy():
    values = torch.tensor([-128, 127], dtype=torch.int8)
    packed = pack(values, torch.int8)
    assert packed.data_ptr() != values.data_ptr()
    assert packed.tolist() == [-128, 127]
    assert pack(torch.tensor([40_000]), torch.uint16).dtype == torch.uint16


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.int4, 8), (torch.int4, -9), (torch.uint3, -1), (torch.uint3, 8)]
)
def test_pack_when_a_value_does_not_fit_then_refuses(dtype, value):
    with pytest.raises(ConfigError, match=rf"from {min(0, value)} to {max(0, value)} do not fit"):
        pack(torch.tensor([0, value]), dtype)


def test_pack_when_no_integer_then_refuses():
    with pytest.raises(ConfigError, match="only integers are packed"):
        pack(torch.zeros(3), torch.int4)
    with pytest.raises(UnsupportedError, match="no integer dtype"):
        pack(torch.zeros(3, dtype=torch.int8), torch.float32)


@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize("change", [1, -1])
def test_unpack_when_bytes_are_missing_or_left_over_then_refuses(bits, change):
    shape = packed_shape((4, 9), bits)
    wrong = torch.zeros(shape[0], shape[1] + change, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="are packed in"):
        unpack(wrong, getattr(torch, f"int{bits}"), (4, 9))
    with pytest.raises(ConfigError, match=r"found torch\.int8"):
        unpack(torch.zeros(shape, dtype=torch.int8), getattr(torch, f"int{bits}"), (4, 9))


def test_packed_shape_when_group_of_128_then_half_a_byte_a_value():
    assert packed_shape((4096, 128), 4) == (4096, 64)
    assert math.prod(packed_shape((32, 1, 3, 3), 4)) == 32 * 5
