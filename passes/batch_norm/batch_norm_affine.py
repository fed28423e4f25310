"""A batch norm in inference as the per-channel affine that it is."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import CONV_TRANSPOSE, argument, arguments, aten, is_call
from pt2e_quant.graph.rewrite import Skip


@dataclass(frozen=True, slots=True)
class Affine:
    """What a batch norm computes per channel: y = x * scale + shift, both float64[C]."""

    scale: Tensor
    shift: Tensor


def is_training(norm: Node) -> bool:
    """Whether a batch norm uses the batch's own statistics."""
    if is_call(norm, (aten._batch_norm_with_update.default,)):
        return True
    return bool(arguments(norm).get("training", False))


def affine_of(gm: GraphModule, norm: Node) -> Affine | Skip:
    """A batch norm as a per-channel affine, in float64.

    scale = weight / sqrt(running_var + eps), shift = bias - running_mean * scale
    (Ioffe and Szegedy 2015, section 3.1).
    """
    if is_training(norm):
        return Skip("batch_norm is in training mode: export the model after eval()")
    given = arguments(norm)
    found: dict[str, Tensor] = {}
    for name in ("running_mean", "running_var", "weight", "bias"):
        value = given[name]
        if value is None and name in ("running_mean", "running_var"):
            return Skip("batch_norm has no running statistics")
        if value is None:
            continue
        tensor = constant_of(gm, value)
        if tensor is None:
            return Skip(f"{name} of batch_norm is computed at run time")
        found[name] = tensor.double()
    eps = given["eps"] if "eps" in given else given["epsilon"]
    scale = torch.rsqrt(found["running_var"] + eps)
    if "weight" in found:
        scale = scale * found["weight"]
    shift = -found["running_mean"] * scale
    if "bias" in found:
        shift = shift + found["bias"]
    return Affine(scale, shift)


def scaled_weight(conv: Node, weight: Tensor, scale: Tensor) -> Tensor:
    """A conv's or linear's weight with each output channel multiplied by its scale."""
    scale = scale.to(torch.promote_types(weight.dtype, torch.float32))
    trailing = [1] * (weight.dim() - 2)
    if is_call(conv, CONV_TRANSPOSE):
        # weight[in, out / groups, ...]: the inputs of a group come together
        groups = int(argument(conv, "groups"))
        inputs, outputs = weight.shape[0] // groups, weight.shape[1]
        scale = scale.view(groups, 1, outputs).expand(groups, inputs, outputs)
        factor = scale.reshape(groups * inputs, outputs, *trailing)
    else:
        factor = scale.view(-1, 1, *trailing)
    return torch.mul(weight, factor).to(weight.dtype)
