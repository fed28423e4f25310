"""A weight's rows in blocks: the same errors as the matrices written out."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.graph.ops import CONV, LINEAR
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph
from pt2e_quant.passes.algorithms.gathered import Gathered
from pt2e_quant.passes.algorithms.gptq import Gptq
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.low_rank import LowRank
from pt2e_quant.passes.algorithms.weight_blocks import WeightBlocks, output_errors, row_qparams


def weight_of(layer: nn.Module, x: torch.Tensor, recipe: str):
    """The weight of a prepared model of one layer."""
    program = torch.export.export(nn.Sequential(layer).eval(), (x,))
    quantizer = pq.backends.get("onnx").quantizer(recipe)
    prepared = pq.prepare_pt2e(program, quantizer, algorithms=[Gptq()])
    graph = AlgorithmGraph(prepared, Gathered())
    call = next(graph.calls((*LINEAR, *CONV)))
    return graph.constant(call, "weight", keeps_qparams=True)


def hessians(groups: int, length: int) -> torch.Tensor:
    rows = torch.randn(groups, 200, length, generator=torch.Generator().manual_seed(1))
    return rows.transpose(1, 2) @ rows


CASES = {
    "rows": (nn.Linear(64, 12), torch.randn(2, 64), "w4", 1, 64),
    "groups": (nn.Linear(64, 12), torch.randn(2, 64), "w4_g32", 1, 64),
    "convolution": (nn.Conv2d(4, 6, 3, groups=2), torch.randn(1, 4, 5, 5), "w4", 2, 18),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_when_put_together_then_the_errors_of_the_whole_rows(name):
    layer, x, recipe, groups, length = CASES[name]
    found = WeightBlocks.of(weight_of(layer, x, recipe), hessians(groups, length))
    scale = found.by_block(found.qparams.scale)
    assert torch.equal(found.by_row(scale), found.qparams.scale)
    rows = layer.weight.detach().reshape(groups, -1, length)
    wrong = found.weight.grid().nearest(layer.weight.detach()).reshape(rows.shape) - rows
    expected = torch.einsum("gnk,gkl,gnl->gn", wrong, found.hessians, wrong)
    zero = found.by_block(found.qparams.zero_point)
    torch.testing.assert_close(found._row_errors(scale, zero), expected, rtol=1e-4, atol=1e-4)
    # a block's Hessian is a block on the diagonal
    size = found.qparams.group_size or length
    last = found.hessians[-1, -size:, -size:]
    assert torch.equal(found.block_hessians[-1], last)


def test_take_when_scales_are_worse_in_some_rows_then_those_keep_theirs():
    layer, x, recipe, groups, length = CASES["groups"]
    weight = weight_of(layer, x, recipe)
    found = WeightBlocks.of(weight, hessians(groups, length))
    before = found.qparams.scale.clone()
    scale = found.by_block(before).clone()
    scale[:, ::2] *= 5
    scale[:, 1::2] *= 1.0
    errors = found.take(scale, found.by_block(found.qparams.zero_point))
    assert errors[1] == errors[0]
    assert torch.equal(row_qparams(weight).scale, before)


def test_row_qparams_when_there_is_one_scale_for_all_then_declined():
    layer, x, _, _, _ = CASES["rows"]
    weight = weight_of(layer, x, "w4")
    weight.graph.put_observer(weight.observed, MinMaxObserver(torch.int8, torch.per_tensor_affine))
    with pytest.raises(Declined, match="has no scale for each row"):
        row_qparams(weight)


def test_output_errors_when_one_row_differs_then_only_its_error():
    wrong = torch.zeros(3, 4)
    wrong[1, 2] = 2.0
    hessian = torch.diag(torch.tensor([1.0, 1.0, 5.0, 1.0]))
    assert output_errors(wrong, hessian).tolist() == [0.0, 20.0, 0.0]


@pytest.mark.parametrize("algorithm", ["awq", "gptq", "lwc", LowRank(rank=4)], ids=str)
def test_hessians_when_inputs_are_too_large_to_be_squared_then_declined(algorithm, quantized):
    torch.manual_seed(0)
    data = [1e25 * torch.randn(4, 32) for _ in range(2)]
    gm = quantized(nn.Sequential(nn.Linear(32, 32)), data, "w4", algorithm)
    assert any("too large to be squared" in note for note in provenance_of(gm).notes)
