"""Prune weights to two of each four neighbours, by magnitude or by what inputs make of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pt2e_quant.core.arguments import check_filter, check_initialized, check_module, check_tensor
from pt2e_quant.core.errors import CalibrationError, ConfigError
from pt2e_quant.flow.calibrate.pick_inputs import InputPick
from pt2e_quant.passes.algorithms.gptq import inverse_factor
from pt2e_quant.tensors.plan import Filter, is_linear, upright
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.run_batches import run_batches, watch_input

_DAMPING = 0.01


def prune_2_4(values: Tensor, moments: Tensor | None = None) -> Tensor:
    """Values with two of each four neighbours along the last axis at 0.

    Args:
        values: float[..., K]; float[N, K] with moments.
        moments: sums of products of the inputs that K multiplies, float[K, K]. With them the two
            that matter least for the output are pruned, and the columns behind make up for them
            (SparseGPT, Frantar and Alistarh 2023); without, the two least magnitudes.

    >>> import torch
    >>> prune_2_4(torch.tensor([[1.0, -3.0, 2.0, 0.5]])).tolist()
    [[0.0, -3.0, 2.0, 0.0]]

    Raises:
        ConfigError: rows are no multiple of four.
    """
    check_tensor("values", values)
    if not values.dim() or values.shape[-1] % 4:
        raise ConfigError(
            f"rows of a tensor of shape {tuple(values.shape)} are no fours of neighbours",
            fix="give rows whose length is a multiple of 4",
        )
    if moments is not None:
        return _prune_with(values, moments)
    fours = values.reshape(-1, 4)
    least = fours.abs().topk(2, dim=1, largest=False).indices
    return fours.scatter(1, least, 0.0).reshape(values.shape)


def _prune_with(values: Tensor, moments: Tensor) -> Tensor:
    factor = inverse_factor(moments.float(), _DAMPING)
    left = values.float().t().clone(memory_format=torch.contiguous_format)
    for start in range(0, len(left), 4):
        four, own = left[start : start + 4], factor[start : start + 4]
        costs = (four / own[:, start : start + 4].diagonal()[:, None]).square()
        is_lost = torch.zeros_like(four, dtype=torch.bool)
        is_lost.scatter_(0, costs.topk(2, dim=0, largest=False).indices, True)
        errors = torch.empty_like(four)
        for k in range(4):
            errors[k] = four[k] * is_lost[k] / own[k, start + k]
            four[k + 1 :].addr_(own[k, start + k + 1 : start + 4], errors[k], alpha=-1)
        four.masked_fill_(is_lost, 0.0)
        left[start + 4 :].addmm_(own[:, start + 4 :].t(), errors, alpha=-1)
    return left.t().to(values.dtype).contiguous()


@torch.no_grad()
def prune_2_4_(
    module: nn.Module,
    calibration_data: Iterable[Any] | None = None,
    *,
    inputs: InputPick | None = None,
    filter: Filter | None = None,
) -> None:
    """Prune the linears of a module in place, to be quantized to the layout `sparse_2_4`.

    Args:
        module: any, with float weights.
        calibration_data: batches; with them weights make up for what is pruned, see `prune_2_4`.
        inputs: what of each batch the module takes, as in `pq.calibrate`.
        filter: of (module, path), which linears; all by default.

    Raises:
        ConfigError: nothing is chosen, a weight is quantized already or has no fours of neighbours.
        CalibrationError: no batch reaches a linear.
    """
    check_module("module", module)
    check_initialized(module)
    check_filter(filter)
    chosen = filter or is_linear
    linears = {
        path: part
        for path, part in module.named_modules()
        if is_linear(part, path) and chosen(part, path)
    }
    if not linears:
        raise ConfigError("no linear is chosen", fix="give a filter that takes some")
    for path, linear in linears.items():
        if isinstance(linear.weight, QuantizedTensor):
            raise ConfigError(f'"{path}" is quantized already', fix="prune before quantize_")
        if (length := upright(linear).shape[1]) % 4:
            raise ConfigError(
                f'"{path}" has rows of {length}, which are no fours of neighbours',
                fix="leave it out by the filter",
            )
    moments = (
        {} if calibration_data is None else _moments(module, linears, calibration_data, inputs)
    )
    for path, linear in linears.items():
        weight = upright(linear)
        weight.copy_(prune_2_4(weight, moments.get(path)))


def _moments(
    module: nn.Module,
    linears: dict[str, nn.Module],
    batches: Iterable[Any],
    inputs: InputPick | None,
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def watch(path: str) -> Callable[[Tensor], None]:
        def see(x: Tensor) -> None:
            if not x.numel():
                return
            rows = x.float().reshape(-1, x.shape[-1])
            found[path] = rows.t() @ rows + found.get(path, 0)

        return see

    hooks = [watch_input(linear, path, watch(path)) for path, linear in linears.items()]
    try:
        run_batches(module, batches, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if missing := linears.keys() - found.keys():
        raise CalibrationError(
            f'no batch with a row reached "{min(missing)}"',
            fix="give data that runs it, or leave it out",
        )
    return found
