"""Names of torchao.quantization.pt2e.quantize_pt2e: prepare and convert as scripts call them.

What the strict forms refuse is warned of with the same text, unless strict=True is given.
"""

import warnings
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2e_quant.core.canonical import Form
from pt2e_quant.core.errors import ArgumentError, Pt2eQuantWarning, UnsupportedError
from pt2e_quant.flow.convert import convert_pt2e as strict_convert
from pt2e_quant.flow.convert.integer_reference import integer_reference
from pt2e_quant.flow.prepare import prepare_pt2e as strict_prepare
from pt2e_quant.flow.prepare.prepared import prepared_graphs, prepared_state
from pt2e_quant.flow.qat import prepare_qat_pt2e as strict_prepare_qat
from pt2e_quant.graph.ops import BATCH_NORM, LINEAR, argument, is_call

__all__ = ["convert_pt2e", "prepare_pt2e", "prepare_qat_pt2e"]


def prepare_pt2e(
    model: ExportedProgram | GraphModule, quantizer: Any, *, strict: bool = False
) -> GraphModule:
    """Annotate a captured graph and insert observers; see `flow.prepare.prepare_pt2e`.

    Weights are observed in the graph, where scripts written for torchao's PT2E look for that.

    Args:
        model: of torch.export.export, or its `.module()`, which is edited in place.
        quantizer: any object with PT2E's `annotate` and `validate`.
        strict: refuse when nothing was annotated, instead of a warning.
    """
    gm = strict_prepare.captured(model)
    _warn_of_linear_norms(gm)
    return strict_prepare.prepare_captured(
        gm,
        quantizer,
        strict=strict,
        observe_constants=True,
        as_torchao=_is_foreign(quantizer),
    )


def _warn_of_linear_norms(gm: GraphModule) -> None:
    """Say which batch norms cannot be folded into the linear before them, as torchao does."""
    for node in gm.graph.nodes:
        linear = argument(node, "input") if is_call(node, BATCH_NORM) else None
        if linear is None or not is_call(linear, LINEAR):
            continue
        rank = linear.meta["val"].dim()
        if rank > 2:
            error = UnsupportedError(
                f"Not fusing linear+bn: of a value of {rank} dimensions {linear.name} computes the "
                f"last, and {node.name} normalises the second",
                node=node,
                fix="nothing need be done: it stays a multiplication and an addition; to fold it, "
                "give both (rows, features)",
            )
            warnings.warn(str(error), Pt2eQuantWarning, stacklevel=3)


def prepare_qat_pt2e(
    model: ExportedProgram | GraphModule, quantizer: Any, *, strict: bool = False
) -> GraphModule:
    """Annotate a captured graph for training; see `flow.prepare_qat.prepare_qat_pt2e`.

    A quantizer that is not of this package sees batch norms, and trains and converts in the form
    of torchao's PT2E, to the last bit.

    Args:
        model: of torch.export.export, or its `.module()`, which is edited in place.
        quantizer: any object with PT2E's `annotate` and `validate`.
        strict: refuse when nothing was annotated, instead of a warning.
    """
    return strict_prepare_qat.prepare_qat_pt2e(
        model, quantizer, strict=strict, as_torchao=_is_foreign(quantizer)
    )


def _is_foreign(quantizer: Any) -> bool:
    """True if a quantizer is written for torchao, and so expects graphs of its form.

    Those of this package have a form for training.
    """
    parts = getattr(quantizer, "quantizers", None)
    if parts:
        return all(_is_foreign(part) for part in parts)
    return not hasattr(quantizer, "for_qat")


def convert_pt2e(
    model: GraphModule,
    use_reference_representation: bool = False,
    fold_quantize: bool = True,
    *,
    strict: bool = False,
) -> GraphModule:
    """Replace the observers of a calibrated graph by q/dq; see `flow.convert.convert_pt2e`.

    Args:
        model: of `prepare_pt2e`, with data run through it.
        use_reference_representation: integer arithmetic in the place of q/dq; see
            `flow.convert.integer_reference`.
        fold_quantize: store weights as integers, one per element also below 8 bits.
        strict: refuse when an observer saw no data, instead of a warning.

    Raises:
        ArgumentError: use_reference_representation is no boolean.
    """
    if not isinstance(use_reference_representation, bool):
        raise ArgumentError(
            f"use_reference_representation must be a bool, found {use_reference_representation!r}"
        )
    for graph in prepared_graphs(model):
        prepared_state(graph).is_strict = strict
    # Not packed: scripts and backends written for torchao's PT2E look for int8 constants.
    converted = strict_convert.convert_pt2e(model, fold_quantize=fold_quantize, pack=False)
    if use_reference_representation:
        form = Form.CANONICAL if fold_quantize else Form.UNFOLDED
        converted = integer_reference(converted, form=form)
    return converted
