"""A batch norm that trains behind a conv or linear and is folded into it otherwise, as modules.

In training the weight carries gamma / sqrt(running_var + eps) when it is quantized, the result is
divided by that again, and the batch's own statistics normalise it (R. Krishnamoorthi, "Quantizing
deep convolutional networks for efficient inference", arXiv:1806.08342, section 3.2.2; B. Jacob and
others, arXiv:1712.05877, section 3.2). Operations and their order are those of torch's
`nn.intrinsic.qat` modules, so that results are equal to the bit. In inference, and with frozen
statistics, the bias takes the rest of the batch norm: what convert stores.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.core.recomputation import is_recomputing
from pt2e_quant.core.snapshot_op import snapshot
from pt2e_quant.graph.ops import argument, arguments, aten, is_call


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """Return the axis of a weight's output channels.

    Args:
        rank: dimensions of the weight.
        groups: of a transposed convolution.
        is_transposed: weight[in, out / groups, …] instead of weight[out, …].
    """

    rank: int
    groups: int = 1
    is_transposed: bool = False

    def factor(self, scale: Tensor) -> Tensor:
        """A factor per output channel, [C], as the weight can be multiplied by it."""
        trailing = [1] * (self.rank - 2)
        if not self.is_transposed:
            return scale.reshape([-1, 1, *trailing])
        if self.groups == 1:
            return scale.reshape([1, -1, *trailing])
        # Each group's inputs stand together; they share the group's output channels.
        return scale.reshape([self.groups, 1, -1, *trailing])

    def scaled(self, weight: Tensor, scale: Tensor) -> Tensor:
        """The weight with each output channel multiplied by its scale."""
        factor = self.factor(scale)
        if not self.is_transposed or self.groups == 1:
            return weight * factor
        inputs = weight.shape[0] // self.groups
        grouped = weight.reshape(self.groups, inputs, *weight.shape[1:])
        return (grouped * factor).reshape(weight.shape)


class _Division(torch.autograd.Function):
    """x / scale; the backward pass reads the quotient, which the batch norm behind it keeps too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        quotient = x / scale
        ctx.save_for_backward(quotient, scale)
        return quotient

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        quotient, scale = ctx.saved_tensors
        # torch's own formula, -grad * ((x / scale) / scale), with one intermediate for four.
        of_scale = (quotient / scale).mul_(grads[0]).neg_().sum_to_size(scale.shape)
        return grads[0] / scale, of_scale


def _divided(x: Tensor, scale: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or x.dtype is not scale.dtype:
        return x / scale
    result: Tensor = _Division.apply(x, scale)  # type: ignore[no-untyped-call]  # torch's
    return result


class _Freezable(nn.Module):
    """A module that trains only while its batch norm's statistics are not frozen."""

    is_frozen = False

    @property
    def is_normalising(self) -> bool:
        """True if the batch's own statistics are used, and the running ones updated."""
        return self.training and not self.is_frozen


class FoldedConstants(_Freezable):
    """The weight and bias of a conv or linear with the batch norm behind it in them.

    Args:
        layout: of the weight.
        eps: of the batch norm.
        is_quantized: the weight is quantized, so it is scaled in training too.
    """

    variance_before: Tensor | None = None

    def __init__(self, layout: WeightLayout, eps: float, is_quantized: bool) -> None:
        super().__init__()
        self.layout = layout
        self.eps = eps
        self.is_quantized = is_quantized

    def forward(
        self,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(weight, bias, scale): what the operator takes, and what to divide its result by."""
        if self.is_normalising and not self.is_quantized:
            return weight, bias, running_var
        if self.is_normalising:
            running_var = self._before(running_var)
        std = torch.sqrt(running_var + self.eps)
        scale = 1.0 / std if gamma is None else gamma / std
        if self.is_normalising:
            if gamma is not None:
                # A gamma of 0 (zero-initialised residual branches) could not be divided by.
                scale = torch.where(gamma == 0, 1.0 / std, scale)
            return self.layout.scaled(weight, scale), torch.zeros_like(running_mean), scale
        shifted = -running_mean if bias is None else bias - running_mean
        folded = shifted * scale if beta is None else shifted * scale + beta
        return self.layout.scaled(weight, scale), folded, scale

    def _before(self, running_var: Tensor) -> Tensor:
        """The variance before the batch norm behind moves it, also in a recomputed forward pass."""
        if torch.compiler.is_compiling():
            taken: Tensor = snapshot(running_var)
            return taken
        if not is_recomputing():
            self.variance_before = running_var.clone()
        return running_var if self.variance_before is None else self.variance_before


class TrainedBatchNorm(_Freezable):
    """A batch norm in training; in inference its input, if it is folded into what makes that.

    Args:
        momentum: of the running statistics.
        eps: of the batch norm.
        channel_dim: the dimension of the input that holds the channels.
        is_folded: FoldedConstants before it hold it in inference.
        is_quantized: the weight before it is scaled in training.
    """

    def __init__(
        self,
        momentum: float,
        eps: float,
        *,
        channel_dim: int = 1,
        is_folded: bool = False,
        is_quantized: bool = False,
    ) -> None:
        super().__init__()
        self.momentum = momentum
        self.eps = eps
        self.channel_dim = channel_dim
        self.is_folded = is_folded
        self.is_quantized = is_quantized

    def forward(
        self,
        x: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
        num_batches_tracked: Tensor | None,
    ) -> Tensor:
        """The normalised x; `scale` and `bias` are those of the conv before it."""
        if self.is_folded and not self.is_normalising:
            return x
        if self.is_normalising and is_recomputing():
            running_mean, running_var = running_mean.clone(), running_var.clone()
        elif self.is_normalising and num_batches_tracked is not None:
            num_batches_tracked.add_(1)
        if self.is_quantized:
            assert scale is not None  # a quantized weight has one
            shape = [1] * x.dim()
            shape[self.channel_dim] = -1
            x = _divided(x, scale.reshape(shape))
            if bias is not None:
                x = x + bias.reshape(shape)
        if self.channel_dim != 1:
            x = x.movedim(self.channel_dim, 1)
        result = torch.batch_norm(
            x,
            gamma,
            beta,
            running_mean,
            running_var,
            self.is_normalising,
            self.momentum,
            self.eps,
            torch.backends.cudnn.enabled,
        )
        return result if self.channel_dim == 1 else result.movedim(1, self.channel_dim)


def freeze_bn_stats(mod: nn.Module) -> None:
    """Let a batch norm keep its running statistics and use them; for `model.apply`."""
    _let_update(mod, False)


def update_bn_stats(mod: nn.Module) -> None:
    """Let a batch norm use each batch's statistics in training again; for `model.apply`."""
    _let_update(mod, True)


def _let_update(mod: nn.Module, updates: bool) -> None:
    if isinstance(mod, (FoldedConstants, TrainedBatchNorm)):
        mod.is_frozen = not updates
    elif isinstance(mod, GraphModule):
        # Batch norms that are operators have a flag; with their own statistics only.
        norms = [node for node in mod.graph.nodes if is_call(node, (aten.batch_norm.default,))]
        for node in (n for n in norms if argument(n, "running_mean") is not None):
            given = arguments(node) | {"training": updates and mod.training}
            node.args, node.kwargs = tuple(given.values()), {}
        if norms:
            recompile(mod)
