import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.tensors.prune import prune_2_4
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor


def sparse(name, rows=8, columns=64):
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return QuantizedTensor.from_float(prune_2_4(values), scheme_named(name).weight)


@pytest.mark.parametrize("name", ["w8", "w4", "w4_g32"])
@pytest.mark.usefixtures("no_kernels")
def test_sparse_when_pruned_and_quantized_then_packs_without_loss(name):
    tensor = sparse(name)
    packed = tensor.to_layout("sparse_2_4")
    assert torch.equal(packed.plain_parts()["codes"], tensor.codes)
    layer = nn.Linear(64, 8)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), nn.functional.linear(x, tensor, layer.bias))


@pytest.mark.parametrize(
    "shape", [(64, 96), (33, 100), (128, 128), (432, 160), (160, 432), (64, 512)]
)
def test_sparse_when_of_8_bits_then_takes_at_most_0_6_of_dense_bytes(shape):
    tensor = sparse("w8", *shape)
    assert tensor.to_layout("sparse_2_4").nbytes <= 0.6 * tensor.nbytes  # scales are in both


@pytest.mark.parametrize("shape", [(1, 4), (3, 8), (5, 60)])
@pytest.mark.parametrize("name", ["w8", "w4"])
def test_sparse_when_fours_fill_no_byte_then_packs_without_loss(shape, name):
    tensor = sparse(name, *shape)
    packed = tensor.to_layout("sparse_2_4")
    assert torch.equal(packed.plain_parts()["codes"], tensor.codes)
    assert packed.triples.numel() == -(-tensor.numel() // 12)


def test_sparse_when_a_weight_is_dense_then_refused():
    dense = QuantizedTensor.from_float(torch.ones(2, 8), scheme_named("w8").weight)
    with pytest.raises(ConfigError, match="more than two values"):
        dense.to_layout("sparse_2_4")
