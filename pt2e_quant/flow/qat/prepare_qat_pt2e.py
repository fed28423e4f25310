"""prepare for training: fake-quantizes, and batch norms that fold while they train."""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2e_quant.core.errors import AnnotationError, Pt2eQuantWarning
from pt2e_quant.core.integer_ops.profiles import Profile
from pt2e_quant.flow.prepare.prepare_pt2e import captured, prepare_captured
from pt2e_quant.flow.prepare.prepared import observers_of, prepared_graphs
from pt2e_quant.flow.qat.numerics import Numerics, set_numerics
from pt2e_quant.flow.qat.train_mode import has_training_operators, set_training_flags
from pt2e_quant.graph.subgraphs import bodies
from pt2e_quant.observers.qschemes import is_per_channel
from pt2e_quant.observers.training.fake_quantize import FakeQuantize
from pt2e_quant.observers.training.learnable_fake_quantize import LearnableFakeQuantize
from pt2e_quant.observers.training.trained_qparams import is_fake_quantize
from pt2e_quant.passes.batch_norm.detach_batch_norm import drop_counters


def prepare_qat_pt2e(
    model: ExportedProgram | GraphModule,
    quantizer: Any,
    *,
    strict: bool = True,
    as_torchao: bool = False,
    numerics: Numerics | str = Numerics.FAKE_QUANT,
    profile: Profile | str | None = None,
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
        as_torchao: the form of torchao's PT2E instead: the quantizer sees batch norms, those behind
            convs become operators, and convert takes its qparams from the statistics.
        numerics: "integer" lets the forward pass compute in the target's integers wherever an
            operator has an integer form; see `set_numerics`.
        profile: how the target rounds, likewise.

    Returns:
        A graph module to train, with the model's own call signature.

    Raises:
        ConfigError: the model or the quantizer is something else.
        AnnotationError: an annotation cannot be carried out, or there is none.
    """
    gm = captured(model)
    trains = has_training_operators(gm)
    own_tensors(gm)
    if not as_torchao:
        set_training_flags(gm, False)  # prepare ends with a recompile
        for graph in (gm, *(body.gm for body in bodies(gm))):
            drop_counters(graph)
    trained = {name for name, value in gm.named_parameters() if value.requires_grad}
    for_qat = getattr(quantizer, "for_qat", None)
    chosen = quantizer if for_qat is None else for_qat()
    prepared = prepare_captured(gm, chosen, strict=strict, is_qat=True, as_torchao=as_torchao)
    _check_trained(prepared, type(quantizer).__name__, strict)
    _train_written_weights(prepared, trained)
    _start_channels(prepared)
    if numerics != Numerics.FAKE_QUANT or profile is not None:
        set_numerics(prepared, numerics, profile=profile)
    prepared.train(trains)
    return prepared


def _train_written_weights(prepared: GraphModule, trained: set[str]) -> None:
    """Make parameters of what a quantizer's passes wrote in the place of parameters.

    A backend may write an operator as another one, whose weight is a constant named after the
    model's own ("up.weight_shuffled"). That one trains; the model's is read no more.
    """
    read = {str(node.target) for node in prepared.graph.nodes if node.op == "get_attr"}
    replaced = tuple(f"{name}_" for name in trained - read)
    for name, value in list(prepared.named_buffers()):
        if name in read and value.is_floating_point() and name.startswith(replaced):
            owner, _, leaf = name.rpartition(".")
            holder = prepared.get_submodule(owner)
            delattr(holder, leaf)
            holder.register_parameter(leaf, nn.Parameter(value))


def _start_channels(prepared: GraphModule) -> None:
    """Give the statistics and parameters of fake-quantizes of ours their size."""
    for graph in prepared_graphs(prepared):
        for node, module in observers_of(graph):
            value = node.meta.get("val")
            if not isinstance(value, Tensor):
                continue
            if isinstance(module, LearnableFakeQuantize):
                has_channels = is_per_channel(module.qscheme)
                module.start_channels(int(value.shape[module.ch_axis]) if has_channels else 1)
            elif isinstance(module, FakeQuantize) and module.is_per_channel:
                if hasattr(module.activation_post_process, "min_val"):
                    module.start_channels(int(value.shape[module.ch_axis]))


def _check_trained(prepared: GraphModule, quantizer: str, strict: bool) -> None:
    """Refuse observers where fake-quantizes belong: such a graph would train in float."""
    left = [
        (node, observer)
        for graph in prepared_graphs(prepared)
        for node, observer in observers_of(graph)
        if not is_fake_quantize(observer) and not _needs_none(observer)
    ]
    if not left:
        return
    fix = "ask the quantizer for its configuration for training (is_qat=True)"
    if any(getattr(observer, "group_size", None) is not None for _, observer in left):
        fix = "weights in groups do not train: take a scheme with a scale for each channel"
    error = AnnotationError(
        f"{quantizer} asks for {len(left)} observers that quantize nothing in training: "
        f"{', '.join(str(node.target) for node, _ in left[:5])}",
        node=left[0][0].all_input_nodes[0],
        fix=fix,
    )
    if strict:
        raise error
    warnings.warn(str(error), Pt2eQuantWarning, stacklevel=3)


def _needs_none(observer: Any) -> bool:
    """True if an observer has no part in training: float, of run time, derived, or affine."""
    if hasattr(observer, "scheme"):
        return False  # blocks, small floats and code books: nothing trains with them
    is_float = getattr(observer, "dtype", torch.float32).is_floating_point
    is_dynamic = getattr(observer, "is_dynamic", False)
    return is_float or is_dynamic or hasattr(observer, "obs_or_fqs") or hasattr(observer, "convert")


def own_tensors(gm: GraphModule) -> None:
    """Give a graph module copies of its parameters and buffers; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for module in gm.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = copy.deepcopy(parameter, memo)
        for name, buffer in module._buffers.items():
            module._buffers[name] = copy.deepcopy(buffer, memo)
