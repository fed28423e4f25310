"""A quantizer of int8 convs and linears for training, and small nets to train."""

import torch
from torch import nn

from pt2e_quant.core.specs import Q_ANNOTATION_KEY, QuantizationAnnotation, QuantizationSpec
from pt2e_quant.flow.annotate.quantizer import Quantizer
from pt2e_quant.graph.ops import (
    CONV,
    CONV_TRANSPOSE,
    HARDSWISH,
    LINEAR,
    RELU,
    RELU6,
    SIGMOID,
    argument,
    is_call,
)
from pt2e_quant.observers.static.moving_average import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from pt2e_quant.observers.training.fused_fake_quantize import FusedMovingAvgObsFakeQuantize

ACTIVATION = FusedMovingAvgObsFakeQuantize.with_args(observer=MovingAverageMinMaxObserver)
WEIGHT = FusedMovingAvgObsFakeQuantize.with_args(observer=MovingAveragePerChannelMinMaxObserver)
ACTS = RELU + RELU6 + HARDSWISH + SIGMOID


class QatQuantizer(Quantizer):
    """uint8 activations around convs and linears, an activation function behind them included."""

    def __init__(self, weight=WEIGHT, activation=ACTIVATION, weight_range=(-128, 127)) -> None:
        self.weight, self.activation, self.weight_range = weight, activation, weight_range

    def annotate(self, model):
        for node in model.graph.nodes:
            if is_call(node, CONV + CONV_TRANSPOSE + LINEAR):
                self._annotate(node)
        return model

    def _annotate(self, node):
        activation = QuantizationSpec(
            torch.uint8, self.activation, 0, 255, qscheme=torch.per_tensor_affine
        )
        low, high = self.weight_range
        weight = QuantizationSpec(
            torch.int8,
            self.weight,
            low,
            high,
            qscheme=torch.per_channel_symmetric,
            ch_axis=1 if is_call(node, CONV_TRANSPOSE) else 0,
        )
        inputs = {argument(node, "input"): activation, argument(node, "weight"): weight}
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs, _annotated=True)
        end = next(iter(node.users))
        if len(node.users) == 1 and is_call(end, ACTS):
            end.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation({}, activation, _annotated=True)
        else:
            node.meta[Q_ANNOTATION_KEY].output_qspec = activation

    def validate(self, model):
        return None


def settled(model, seed=0):
    """The model with batch norms that have seen something."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            c = module.num_features
            module.running_mean.copy_(torch.randn(c, generator=generator) * 0.1)
            module.running_var.copy_(torch.rand(c, generator=generator) + 0.5)
            if module.affine:
                with torch.no_grad():
                    module.weight.copy_(torch.rand(c, generator=generator) + 0.5)
                    module.bias.copy_(torch.randn(c, generator=generator) * 0.1)
    return model
