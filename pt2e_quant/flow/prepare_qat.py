"""prepare for training: fake-quantizes, and batch norms that fold while they train."""

import copy
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2e_quant.flow.prepare import captured, prepare_captured
from pt2e_quant.flow.train_mode import has_training_operators, move_exported_model_to_eval

__all__ = ["prepare_qat_pt2e"]


def prepare_qat_pt2e(
    model: ExportedProgram | GraphModule, quantizer: Any, *, strict: bool = True
) -> GraphModule:
    """Annotate a captured graph and insert fake-quantizes, for training.

    The quantizer sees the graph as it will be deployed: batch norms behind convs and linears are
    folded, dropouts gone. Both are in the result, which trains after `train()` and infers after
    `eval()`; it starts in the mode that the model was exported in.

    Args:
        model: of torch.export.export, or its `.module()`, which is edited in place. The result
            has tensors of its own: make the optimizer of its parameters.
        quantizer: as for `prepare_pt2e`. One with a method `for_qat` is asked for the quantizer
            to use; any other makes fake-quantizes itself, where its specs say so.
        strict: refuse when nothing was annotated; otherwise warn, here and in convert.

    Returns:
        A graph module to train, with the model's own call signature.

    Raises:
        ConfigError: the model or the quantizer is something else.
        AnnotationError: an annotation cannot be carried out, or there is none.
    """
    gm = captured(model)
    trains = has_training_operators(gm)
    own_tensors(gm)
    move_exported_model_to_eval(gm)
    for_qat = getattr(quantizer, "for_qat", None)
    chosen = quantizer if for_qat is None else for_qat()
    prepared = prepare_captured(gm, chosen, strict=strict, is_qat=True)
    prepared.train(trains)
    return prepared


def own_tensors(gm: GraphModule) -> None:
    """Give a graph module copies of its parameters and buffers; what was one stays one."""
    memo: dict[int, Any] = {}
    for module in gm.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = copy.deepcopy(parameter, memo)
        for name, buffer in module._buffers.items():
            module._buffers[name] = copy.deepcopy(buffer, memo)
