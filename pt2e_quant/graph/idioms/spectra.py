"""Layers that compute a spectrum whose logarithm is taken: the front end of models of sound."""

from torch.fx import Graph, Node

from pt2e_quant.graph.ops import (
    ACTIVATIONS,
    ADDMM,
    BATCH_NORM,
    BMM,
    CLAMP,
    CONV,
    CONV_TRANSPOSE,
    EMBEDDING,
    GROUP_NORM,
    INSTANCE_NORM,
    LAYER_NORM,
    LINEAR,
    LOG_SOFTMAX,
    MATMUL,
    RECURRENT,
    RECURRENT_CELL,
    SDPA,
    SOFTMAX,
    aten,
    is_call,
)

SPECTRUM_KEY = "pt2e_quant.spectrum"
"""Key of `node.meta`: set for a layer that `spectral_layers` finds."""

_LAYERS = (*CONV, *CONV_TRANSPOSE, *LINEAR, *MATMUL, *BMM, *ADDMM)
_LOGARITHMS = (aten.log.default, aten.log2.default, aten.log10.default, aten.log1p.default)
_OF_NETWORKS = (
    *(*ACTIVATIONS, *SOFTMAX, *LOG_SOFTMAX, *SDPA, *EMBEDDING, *RECURRENT, *RECURRENT_CELL),
    *(*BATCH_NORM, *GROUP_NORM, *INSTANCE_NORM, *LAYER_NORM),
)
"""Operators that no transform of a signal has, but for clamps."""


def spectral_layers(graph: Graph) -> list[Node]:
    """The layers between a graph's inputs and a logarithm, in graph order.

    A spectrogram (filters or a Fourier matrix as weights, squares, sums) has values of all orders
    of magnitude, and the logarithm makes all of them count. A layer that activation functions or
    norms are before is one of a network, and none of these.
    """
    is_signal: dict[Node, bool] = {}
    for node in graph.nodes:
        is_plain = node.op in ("placeholder", "get_attr") or (
            node.op == "call_function" and not _is_of_network(node)
        )
        is_signal[node] = is_plain and all(is_signal[source] for source in node.all_input_nodes)
    found: set[Node] = set()
    waiting = [n for n in graph.nodes if is_call(n, _LOGARITHMS) and is_signal[n]]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return [node for node in graph.nodes if node in found and is_call(node, _LAYERS)]


def _is_of_network(node: Node) -> bool:
    return is_call(node, _OF_NETWORKS) and not is_call(node, CLAMP)
