"""What several ranks make of stored parameters is in `test_ranks`; here is what one rank does."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.granularity import PerTensor
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.tensors import QuantizedTensor
from pt2e_quant.training import quantize_parameters
from pt2e_quant.training.stored_parameters import StoredParameter
from pt2e_quant.training.stored_shards import FlatView, blank, bytes_to_gather, join_bytes

SCHEMES = ("w8", "w4_g32", "fp8_weight_only", "mxfp4_weight_only", "lut4")


def stored(scheme, rows=7, **named):
    torch.manual_seed(0)
    return quantize_parameters(nn.Linear(64, rows), scheme, **named).weight


def shards(weight, count):
    """What FSDP2 makes: blank rows, into which a rank's own are copied."""
    pieces = weight.detach().chunk(count)
    size = pieces[0].shape
    made = []
    for rank in range(count):
        rows = len(pieces[rank]) if rank < len(pieces) else 0
        padded = weight.detach().new_zeros(size)
        if rows:
            padded.narrow(0, 0, rows).copy_(pieces[rank])
        made.append(padded.narrow(0, 0, rows))
    return made


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [7, 8])
def test_stored_shards_when_their_bytes_are_gathered_then_they_are_the_whole(scheme, rows):
    weight = stored(scheme, rows)
    own = shards(weight, 4)
    assert all(isinstance(shard, StoredParameter) for shard in own)
    assert {shard.form.layout for shard in own} == {weight.form.layout}
    sent = [bytes_to_gather(shard, 4, weight.shape)[0] for shard in own]
    if rows == 7:  # the shape that FSDP2 takes alone where shards differ in size
        assert {piece.shape for pieces in sent for piece in pieces} == {(2, 64)}
    gathered = tuple(torch.cat(pieces) for pieces in zip(*sent, strict=True))
    for rank in (0, 3):
        whole, _ = join_bytes(own[rank], gathered, weight.shape, torch.bfloat16)
        assert whole.dtype == torch.bfloat16
        assert torch.equal(whole.float().dequantize(), weight.dequantize())


def test_stored_shards_when_evenly_cut_then_no_more_than_their_bytes_are_sent():
    weight = stored("w4_g32", 8)
    (sent,), _ = bytes_to_gather(shards(weight, 4)[0], 4, weight.shape)
    assert 4 * sent.nbytes == weight.nbytes == 8 * (32 + 8)


def test_stored_shards_when_viewed_flat_then_nothing_is_held_and_values_are_right():
    weight = stored("w8").detach()
    flat = weight.view(-1)
    assert isinstance(flat, FlatView)
    assert flat.detach().source is weight
    assert torch.equal(flat + 0, weight.dequantize().flatten())
    with pytest.raises(UnsupportedError, match="is not written"):
        flat.zero_()


def test_stored_shards_when_padded_then_rows_of_zeros_follow():
    weight = stored("w4_g32").detach()
    padded = nn.functional.pad(weight, (0, 0, 0, 2))
    assert isinstance(padded, StoredParameter)
    assert torch.equal(padded[:7].dequantize(), weight.dequantize())
    assert torch.equal(padded[7:].dequantize(), torch.zeros(2, 64))
    assert not isinstance(nn.functional.pad(weight, (0, 0, 1, 0)), QuantizedTensor)


def test_stored_shards_when_of_no_rows_then_a_step_leaves_them():
    shard = blank(stored("w8"), (0, 64))
    shard.take_step(torch.empty(0, 64))
    assert shard.shape == (0, 64)


def test_stored_shards_when_scales_are_shared_by_rows_then_refused():
    weight = stored(replace(scheme_named("w8").weight, granularity=PerTensor()))
    with pytest.raises(UnsupportedError, match="rows share scales"):
        weight.new_zeros(2, 64)
    with pytest.raises(UnsupportedError, match="a unit of the whole tensor"):
        stored("nvfp4_weight_only").new_zeros(2, 64)
    with pytest.raises(UnsupportedError, match="only rows are cut"):
        stored("w8").new_zeros(7, 32)
    with pytest.raises(UnsupportedError, match="cut its blocks of scales"):
        stored("w4_g32").detach().split(16, 1)


def test_stored_shards_when_gradients_have_a_dtype_of_their_own_then_refused():
    weight = stored("w8", grad_dtype=torch.bfloat16)
    for make in (lambda: weight.new_zeros(2, 64), lambda: torch.empty_like(weight.detach())):
        with pytest.raises(UnsupportedError, match="has the parameter's dtype"):
            make()
    assert type(weight.new_zeros(2, 64, dtype=torch.bfloat16)) is torch.Tensor
