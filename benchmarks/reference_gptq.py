"""GPTQ as its paper and its authors' code have it, on a module of transformers, in plain torch.

A peer for `algorithms_llm`: column by column in float64, layer by layer on the quantized layers
before, symmetric scales of each group found when its first column is reached (Frantar et al. 2022,
algorithm 1; the published defaults: damping 0.01, no reordering). Embedding and head stay float.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM


@torch.no_grad()
def reference_gptq(
    model: LlamaForCausalLM, batches: Sequence[Tensor], bits: int, group_size: int | None
) -> LlamaForCausalLM:
    """Return a copy whose linears in layers hold rounded weights.

    Args:
        model: In float; it is not changed.
        batches: Ids int64[rows, T].
        bits: Of a weight.
        group_size: Columns that share a scale; None for a whole row.
    """
    made = copy.deepcopy(model)
    for layer in made.model.layers:
        linears = [m for m in layer.modules() if isinstance(m, nn.Linear)]
        for linear, hessian in zip(linears, _hessians(made, linears, batches), strict=True):
            linear.weight.copy_(_round(linear.weight.double(), hessian, bits, group_size))
    return made


def _hessians(
    model: LlamaForCausalLM, linears: Sequence[nn.Linear], batches: Sequence[Tensor]
) -> list[Tensor]:
    sums = [torch.zeros(m.in_features, m.in_features, dtype=torch.float64) for m in linears]
    rows = sum(batch.numel() for batch in batches)

    def watch(total: Tensor) -> object:
        def take(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].double().reshape(-1, total.shape[0])
            total.add_(x.T @ x, alpha=2 / rows)

        return take

    handles = [m.register_forward_pre_hook(watch(s)) for m, s in zip(linears, sums, strict=True)]
    for batch in batches:
        model(input_ids=batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return sums


def _round(weight: Tensor, hessian: Tensor, bits: int, group_size: int | None) -> Tensor:
    weight, made = weight.clone(), torch.empty_like(weight)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor = torch.linalg.cholesky(inverse, upper=True)
    size, steps = group_size or weight.shape[1], 2**bits - 1
    for k in range(weight.shape[1]):
        if k % size == 0:
            scale = 2 * weight[:, k : k + size].abs().amax(1) / steps
        codes = (weight[:, k] / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        made[:, k] = codes * scale
        error = (weight[:, k] - made[:, k]) / factor[k, k]
        weight[:, k:] -= error[:, None] * factor[k, k:]
    return made.float()
