"""A few ONNX nodes as a call of ONNX Runtime, to time forms of one function beside each other."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnxruntime
from onnx import NodeProto, helper, numpy_helper

from benchmarks.runtimes import session_options

Array = np.ndarray[Any, Any]

_OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]


def bind_nodes(
    nodes: Sequence[NodeProto], feeds: Mapping[str, Array], constants: Mapping[str, Array]
) -> Callable[[], list[Array]]:
    """A call of a model of some nodes on one thread, whose result is `y`, of the type of `x`.

    Args:
        nodes: in order.
        feeds: the inputs by name; those that no node reads are left out.
        constants: initializers by name; likewise.
    """
    read = {name for node in nodes for name in node.input}
    given = {name: array for name, array in feeds.items() if name in read}
    inputs = [_info(name, array.dtype, array.shape) for name, array in given.items()]
    held = [numpy_helper.from_array(v, name) for name, v in constants.items() if name in read]
    output = _info("y", feeds["x"].dtype, None)
    graph = helper.make_graph(nodes, "g", inputs, [output], held)
    model = helper.make_model(graph, opset_imports=_OPSETS, ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), session_options(), ["CPUExecutionProvider"]
    )
    return partial(session.run, None, given)


def _info(name: str, dtype: Any, shape: Sequence[int] | None) -> Any:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)
