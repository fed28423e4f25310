"""A weight's rows in blocks that share a scale, judged by the error of what they compute."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.formats.block_qparams import BlockQParams
from pt2e_quant.core.qparams import QParams
from pt2e_quant.graph.ops import LINEAR, arguments, each_axis, each_padding, is_call
from pt2e_quant.observers.qschemes import SYMMETRIC
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.input_hessian import InputHessian, Window
from pt2e_quant.passes.algorithms.algorithm_graph import Constant
from pt2e_quant.passes.algorithms.grid import Declined


@dataclass(frozen=True, slots=True)
class WeightBlocks:
    """A weight with integers per row or group, and the Hessian of what its rows multiply.

    P stands for the blocks of a row, times the groups of a convolution; S for a block's length.

    Args:
        weight: of a linear or convolution.
        hessians: float32[groups of the convolution, K, K].
        qparams: what its observer found.
    """

    weight: Constant
    hessians: Tensor
    qparams: QParams

    @classmethod
    def of(cls, weight: Constant, hessians: Tensor) -> "WeightBlocks":
        """The blocks of a weight.

        Raises:
            Declined: its scales are neither those of rows nor of groups.
        """
        return cls(weight, hessians, row_qparams(weight))

    @property
    def rows(self) -> Tensor:
        """The weight, float32[groups, rows, K]."""
        shape = len(self.hessians), -1, self.hessians.shape[-1]
        return self.weight.value.float().reshape(shape)

    @property
    def blocks(self) -> Tensor:
        """The weight, float32[P, rows, S]."""
        groups, rows, length = self.rows.shape
        size = self.qparams.group_size or length
        split = self.rows.reshape(groups, rows, length // size, size)
        return split.transpose(1, 2).reshape(-1, rows, size)

    @property
    def block_hessians(self) -> Tensor:
        """The Hessian of each block's columns, float32[P, S, S]."""
        length = self.hessians.shape[-1]
        size = self.qparams.group_size or length
        split = self.hessians.reshape(-1, length // size, size, length // size, size)
        return split.diagonal(dim1=1, dim2=3).movedim(-1, 1).reshape(-1, size, size)

    def by_block(self, numbers: Tensor) -> Tensor:
        """Numbers in the shape of the scales as [P, rows, 1]."""
        groups, rows, _ = self.rows.shape
        return numbers.reshape(groups, rows, -1).transpose(1, 2).reshape(-1, rows, 1)

    def by_row(self, numbers: Tensor) -> Tensor:
        """The inverse: numbers [P, rows, 1] in the shape of the scales."""
        groups, rows, _ = self.rows.shape
        split = numbers.reshape(groups, -1, rows).transpose(1, 2)
        return split.reshape(self.qparams.scale.shape)

    @property
    def is_symmetric(self) -> bool:
        """True if zero_points stay where they are."""
        return getattr(self.weight.observer, "qscheme", None) in SYMMETRIC

    def clipped(self, part: float) -> tuple[Tensor, Tensor]:
        """Scale and zero_point, [P, rows, 1], where a part of the greatest magnitude is covered."""
        scale, zero = self.by_block(self.qparams.scale), self.by_block(self.qparams.zero_point)
        if self.is_symmetric:
            return scale * part, zero
        low = (self.qparams.quant_min - zero) * scale
        high = (self.qparams.quant_max - zero) * scale
        most = part * torch.maximum(-low, high)
        return self.covering(low.clamp(min=-most), high.clamp(max=most))

    def covering(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero_point of affine ranges; rounding the zero_point passes gradients on."""
        steps = self.qparams.quant_max - self.qparams.quant_min
        scale = ((high - low) / steps).clamp(min=torch.finfo(torch.float32).eps)
        zero = round_through(self.qparams.quant_min - low / scale)
        return scale, zero.clamp(self.qparams.quant_min, self.qparams.quant_max)

    def take(self, scale: Tensor, zero_point: Tensor) -> tuple[float, float]:
        """Take other qparams in each row whose output error they lower.

        Args:
            scale: [P, rows, 1].
            zero_point: likewise.

        Returns:
            The output error before and after.

        Raises:
            Declined: the observer cannot be told qparams.
        """
        own = self.by_block(self.qparams.scale), self.by_block(self.qparams.zero_point)
        errors = [self._row_errors(*own), self._row_errors(scale, zero_point)]
        better = (errors[1] < errors[0]).reshape(-1, 1)

        def chosen(new: Tensor, old: Tensor) -> Tensor:
            own, now = (given.reshape(len(better), -1) for given in (old, self.by_row(new)))
            return torch.where(better, now, own).reshape(old.shape)

        zeros = chosen(zero_point, self.qparams.zero_point)
        self.weight.set_scale(chosen(scale, self.qparams.scale), zeros.int())
        return float(errors[0].sum()), float(torch.minimum(*errors).sum())

    def _row_errors(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The output error of each row, [groups, rows]."""
        blocks = self.blocks
        codes = (blocks / scale).round_().add_(zero_point)
        codes = codes.clamp_(self.qparams.quant_min, self.qparams.quant_max)
        wrong = codes.sub_(zero_point).mul_(scale).sub_(blocks)
        groups, rows, length = self.rows.shape
        split = wrong.reshape(groups, -1, rows, wrong.shape[-1]).transpose(1, 2)
        return output_errors(split.reshape(groups, rows, length), self.hessians)


def round_through(x: Tensor) -> Tensor:
    """Rounded, with the gradient of x."""
    return x + (x.round() - x).detach()


def row_qparams(weight: Constant) -> QParams:
    """The integer qparams of a weight's rows or groups.

    Raises:
        Declined: it has others.
    """
    found = weight.qparams()
    if isinstance(found, BlockQParams) or found.zero_point.is_floating_point():
        raise Declined(f"the {weight.node.target} has no plain integers")
    if found.group_size is None and found.axis != 0:
        raise Declined(f"the {weight.node.target} has no scale for each row")
    return found


def output_errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """The squared error of each output channel, [..., rows], of rows [..., rows, K] that differ."""
    return ((difference @ hessian) * difference).sum(-1)


def gathered_hessians(statistics: Statistics | None) -> Tensor:
    """The Hessian of an operator's input from calibration, float32[groups, K, K].

    Raises:
        Declined: no data came, or the input is too large to be squared.
    """
    if not isinstance(statistics, InputHessian):
        raise Declined("no calibration data reached it")
    if not bool(statistics.hessian.isfinite().all()):
        raise Declined("its inputs are too large to be squared")
    return statistics.hessian


def watch_rows(node: Node) -> InputHessian:
    """A module that gathers the Hessian of a linear's input, or of a convolution's windows."""
    return InputHessian(None if is_call(node, LINEAR) else _window(node))


def _window(conv: Node) -> Window:
    given, kernel = arguments(conv), arguments(conv)["weight"].meta["val"].shape[2:]
    moved = (each_axis(given[name], len(kernel)) for name in ("stride", "dilation"))
    stride, dilation = map(tuple, moved)
    pads = tuple(each_padding(given["padding"], kernel, dilation))
    return Window(tuple(kernel), stride, pads, dilation, given["groups"])
