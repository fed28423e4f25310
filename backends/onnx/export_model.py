"""Export: an ExportedProgram in canonical form becomes an ONNX model that ONNX Runtime fuses."""

from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnx_ir.passes import common
from torch.export import ExportedProgram

from pt2e_quant.backends.onnx.rewrites.pipeline import apply_rewrites
from pt2e_quant.backends.onnx.translate.translations import translation_table
from pt2e_quant.backends.onnx.validate_rewrites import RewriteValidation
from pt2e_quant.backends.quiet import without_remarks
from pt2e_quant.core.errors import UnsupportedError

OPSET = 21
"""The first with 4- and 16-bit integers in QuantizeLinear and DequantizeLinear."""


def export_model(
    ep: ExportedProgram,
    output_names: Sequence[str],
    *,
    portable: bool = False,
    validation: RewriteValidation | None = None,
) -> tuple[ir.Model, dict[str, str]]:
    """Translate a program, bring it into the form that fuses, and name its outputs.

    Args:
        ep: in canonical form, nothing packed.
        output_names: a name for each of its outputs.
        portable: use operators of the ONNX standard only.
        validation: is shown the model after the translation and after each rewrite.

    Returns:
        The model, and the module path of each value in it.

    Raises:
        UnsupportedError: the exporter has no ONNX for an operator.
    """
    with without_remarks("torch.onnx"):
        try:
            program = torch.onnx.export(
                ep,
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=translation_table(),
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise UnsupportedError(
                f"torch.onnx.export cannot write this graph: {_innermost(error)}",
                fix="leave the operator out of the model, or give it a decomposition",
            ) from error
    assert program is not None
    model = program.model
    if validation is not None:
        assert program.exported_program is not None
        validation.start(program.exported_program.graph, model)
    origins = apply_rewrites(model, portable=portable, validation=validation)
    common.OutputFixPass()(model)
    _name_outputs(model.graph, output_names)
    model.producer_name = "pt2e_quant"
    return model, origins


def name_inputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Give the last inputs these names, where no other value has the name."""
    taken = {v.name for node in graph for v in node.outputs} | set(graph.initializers)
    taken |= {value.name for value in graph.inputs}
    for value, name in zip(graph.inputs[len(graph.inputs) - len(names) :], names, strict=True):
        value.name = _unique(name, taken)


def _name_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Give the outputs their names in the result, where no other value has the name."""
    taken = {v.name for node in graph for v in node.outputs} | set(graph.initializers)
    taken |= {value.name for value in graph.inputs}
    for output, name in zip(graph.outputs, names, strict=True):
        if output.name == name:
            continue
        output.name = _unique(name, taken)


def _unique(name: str, taken: set[str | None]) -> str:
    """The name, or with a number behind it the first that is not taken; it is now."""
    unique, count = name, 0
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    taken.add(unique)
    return unique


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
