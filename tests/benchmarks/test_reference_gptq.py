"""The reference that algorithms are measured against."""

import torch

from benchmarks.llama_model import LlamaShape, random_llama
from benchmarks.reference_gptq import _round, reference_gptq
from pt2e_quant.passes.algorithms.gptq import Gptq
from pt2e_quant.passes.algorithms.grid import Grid


def test_round_when_rows_have_one_scale_then_as_gptq_rounds_without_reordering():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 32, generator=generator)
    x = torch.randn(200, 32, generator=generator) @ torch.randn(32, 32, generator=generator)
    hessian = 2 * x.T @ x / len(x)
    scale = (2 * weight.abs().amax(1, keepdim=True) / 7).expand_as(weight)
    grid = Grid(scale, torch.zeros_like(scale), -4, 3)
    ours = Gptq(act_order=False)._round(weight, grid, hessian)
    theirs = _round(weight.double(), hessian.double(), 3, None)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_reference_when_run_then_a_copy_with_few_values_a_group():
    shape = LlamaShape(layers=1, width=32, heads=2, kv_heads=1, intermediate=64, vocabulary=16)
    model = random_llama(shape)
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    ids = [torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(0))]
    made = reference_gptq(model, ids, 3, 16)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)
    rounded = made.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(rounded, before)
    assert all(len(group.unique()) <= 8 for group in rounded.reshape(-1, 16))
