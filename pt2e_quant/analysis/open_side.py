"""One side of a comparison from any form of a model: program, graph, artifact or file."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2e_quant.analysis.graph_side import GraphSide
from pt2e_quant.backends.registry import get, name_for_suffix, suffixes
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.core.read_capture import CAPTURE_KEY, rebuild_capture
from pt2e_quant.flow.calibrate.pick_inputs import as_call, call_with
from pt2e_quant.flow.prepare.prepare_pt2e import PREPARE_PASSES, captured
from pt2e_quant.flow.prepare.prepared import PREPARED_KEY
from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.graph.subgraphs import copy_graph
from pt2e_quant.one_call import capture_model
from pt2e_quant.tensors.graphs.graph import quantized_weights, to_graph


def open_graph(model: object, batch: Any, like: GraphModule | None = None) -> GraphSide | None:
    """A side that is a graph; None for what is none.

    A float model goes through what prepare does with every graph (batch norms are folded, for
    example), so that it has the nodes and the weights that a quantized one was made of.

    Args:
        model: a module, a program of torch.export, or a float, prepared or converted graph.
        batch: a call that a module is captured with, as `calibrate` takes it.
        like: the other side's graph: a module is captured with its dynamic dimensions.
    """
    if isinstance(model, GraphModule) and is_quantized(model):
        words = "the prepared graph" if PREPARED_KEY in model.meta else "the quantized graph"
        return GraphSide(model, words)
    if isinstance(model, GraphModule):
        return GraphSide(_as_prepared(copy_graph(model)), "the float graph")
    if isinstance(model, ExportedProgram):
        return GraphSide(_as_prepared(captured(model)), "the float program")
    if isinstance(model, nn.Module):
        shapes = rebuild_capture(like).dynamic_shapes() if like is not None else None
        if quantized_weights(model):
            gm = call_with(
                lambda taken: to_graph(model, *as_call(taken), dynamic_shapes=shapes), batch
            )
            return GraphSide(gm, f"the quantized module {type(model).__name__}")
        program = call_with(lambda taken: capture_model(model, *as_call(taken), shapes), batch)
        return GraphSide(_as_prepared(captured(program)), f"the module {type(model).__name__}")
    return None


def is_quantized(gm: GraphModule) -> bool:
    """Whether a graph is prepared, or has quantize or dequantize operators."""
    return PREPARED_KEY in gm.meta or any(is_qdq(node) for node in gm.graph.nodes)


def _as_prepared(gm: GraphModule) -> GraphModule:
    """A float graph as prepare makes it; edited in place, its tensors are not written."""
    capture = rebuild_capture(gm, mutated_buffers(gm))
    run_passes(gm, PREPARE_PASSES)
    gm.meta[CAPTURE_KEY] = capture
    return gm


def open_file(model: object) -> object:
    """The artifact of a file whose path is given; anything else as it is.

    Raises:
        ConfigError: no backend writes such files.
    """
    if not isinstance(model, (str, Path)):
        return model
    name = name_for_suffix(Path(model).suffix)
    if name is None:
        raise ConfigError(
            f'no backend writes files that end in "{Path(model).suffix}": {model}',
            fix=f"give a file that ends in one of {', '.join(suffixes())}, or what is loaded",
        )
    return get(name).load(model)
