import pytest
import torch

from pt2e_quant.training.optimizers.states import (
    StateFormat,
    block_for,
    decode_state,
    dynamic_book,
    encode_state,
    linear_book,
    positive_format,
    signed_format,
)


@pytest.mark.parametrize("bits", [4, 8])
def test_books_when_made_then_they_fill_their_bits_and_reach_1(bits):
    for book in (
        dynamic_book(bits, is_signed=True),
        dynamic_book(bits, is_signed=False),
        linear_book(bits),
    ):
        assert len(book.values) == 1 << bits
        assert book.values[-1] == 1.0
    assert 0.0 in dynamic_book(bits, is_signed=True).values
    assert min(linear_book(bits).values) > 0


@pytest.mark.parametrize("shape", [(70, 100), (5, 3, 7, 9), (3, 257)])
@pytest.mark.parametrize("bits", [4, 8])
def test_encode_state_when_decoded_then_each_value_is_the_nearest_of_its_block(bits, shape):
    torch.manual_seed(0)
    values = torch.randn(shape) * torch.rand(shape[0], *(1,) * (len(shape) - 1))
    form = signed_format(bits)
    codes, scale = encode_state(values, form, 64)
    assert codes.dtype == torch.uint8
    found = decode_state(codes, scale, values.shape, form, 64)
    table = form.book.table()
    rows = values.reshape(shape[0], -1)
    for start in range(0, rows.shape[1], 64):
        block = rows[:, start : start + 64]
        steps = table * block.abs().amax(1, keepdim=True)
        nearest = (block.unsqueeze(2) - steps.unsqueeze(1)).abs().amin(2)
        own = (found.reshape(rows.shape)[:, start : start + 64] - block).abs()
        torch.testing.assert_close(own, nearest, rtol=1e-5, atol=1e-6)


def test_encode_state_when_rows_are_split_then_parts_are_rows_of_the_whole():
    torch.manual_seed(0)
    values = torch.rand(10, 300)
    form = positive_format(4)
    whole = encode_state(values, form, 128)
    parts = [encode_state(part, form, 128) for part in values.split(3)]
    for at in (0, 1):
        assert torch.equal(torch.cat([part[at] for part in parts]), whole[at])
    codes, scale = encode_state(values[:0], form, 128)
    assert decode_state(codes, scale, torch.Size((0, 300)), form, 128).shape == (0, 300)


def test_block_for_when_a_parameter_is_small_or_flat_then_it_stays_float():
    form = StateFormat(linear_book(8), 256)
    assert block_for(torch.zeros(64, 64), form) == 256
    assert block_for(torch.zeros(63, 64), form) is None
    assert block_for(torch.zeros(10000), form) is None
