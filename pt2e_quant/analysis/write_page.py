"""One page on an artifact: which tensors hurt, where in the graph, where the time goes."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from pt2e_quant.analysis.advice import advise
from pt2e_quant.analysis.compare import Model, compare
from pt2e_quant.analysis.graph_colours import GraphPicture
from pt2e_quant.analysis.open_side import is_quantized
from pt2e_quant.analysis.profile import profile
from pt2e_quant.analysis.tensor_values import tensor_values
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.flow.calibrate.pick_inputs import InputPick
from pt2e_quant.flow.report.page.section import HasSections


def write_page(
    path: str | Path,
    artifact: Artifact,
    batches: Iterable[Any] = (),
    *,
    reference: Model | None = None,
    inputs: InputPick | None = None,
    quantized: GraphModule | None = None,
    parts: Iterable[HasSections] = (),
) -> None:
    """Write one file of HTML on an artifact: `artifact.report.to_html` with all that data shows.

    With batches it adds the loss of each tensor with its histogram, the graph coloured by it, and
    the time of each operator where the runtime tells it.

    Args:
        path: of the .html file.
        artifact: of `quantize` or `lower`, or loaded from a file.
        batches: some data, as `calibrate` takes it; a few batches are enough.
        reference: the float model: tensors are then compared with it (`compare`), instead of each
            with its own values before it is quantized, and `advise` says what to do.
        inputs: what of each batch the model takes, as `calibrate` has it.
        quantized: the graph of `convert` that an artifact was lowered from, where it was loaded
            from a file. Without it the page has no histograms, no advice and no picture of the
            graph, and of a `.pte` no tensors.
        parts: what else to show: of `compare`, `tune`, `profile`.

    Raises:
        InputError: a batch does not fit the program.
        ArtifactError: the path cannot be written.
        MissingExtraError: plotly is not installed.
    """
    found: list[HasSections] = []
    kept = list(batches)
    if kept:
        graph = artifact.quantized if quantized is None else quantized
        found += _seen(artifact, graph, kept, reference, inputs)
        found += _timed(artifact, kept[0], inputs)
    artifact.report.to_html(path, *found, *parts)


def _seen(
    artifact: Artifact,
    gm: GraphModule | None,
    batches: Sequence[Any],
    reference: Model | None,
    inputs: InputPick | None,
) -> list[HasSections]:
    """The losses of tensors, their histograms, and the graph; without one what the file tells."""
    if gm is None:
        if reference is None:
            return []
        told = compare(reference, artifact, batches, inputs=inputs, progress=False)
        return [told] if len(told) else []
    table = tensor_values(gm, batches, inputs=inputs)
    if reference is None:
        decibels = {loss.name: loss.sqnr_db for loss in table.losses}
        text = "Each operator by the SQNR of its result's own rounding; grey: not quantized."
        return [table, GraphPicture(gm=gm, decibels=decibels, text=text)]
    comparison = compare(reference, gm, batches, inputs=inputs, progress=False)
    decibels = {row.node: row.cost_db for row in comparison.worst(len(comparison))}
    text = "Each operator by the error that it and its weight add by themselves."
    picture = GraphPicture(gm=gm, decibels=decibels, text=text)
    advice = [advise(gm, comparison)] if is_quantized(gm) else []
    return [comparison, *advice, table, picture]


def _timed(artifact: Artifact, batch: Any, inputs: InputPick | None) -> list[HasSections]:
    try:
        return [profile(artifact, batch, inputs=inputs)]
    except UnsupportedError:  # the page says nothing of what the runtime does not tell
        return []
