"""An artifact as digests: of the program that it holds, and of its results."""

from collections.abc import Iterator, Mapping
from typing import Any

import onnx
from executorch.exir._serialize._program import deserialize_pte_binary
from executorch.exir.schema import Tensor as TensorOfPte
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, ValueInfoProto
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.cpu.artifact import CpuArtifact
from pt2e_quant.backends.module_artifact import ModuleArtifact
from pt2e_quant.backends.onnx.artifact import OnnxArtifact
from pt2e_quant.backends.xnnpack.artifact import XnnpackArtifact
from pt2e_quant.backends.xnnpack.metadata import CHECKSUM_METHOD, METADATA_METHODS
from tests.digests.digest_graph import digest_graph, digest_tensor, digest_texts

__all__ = ["digest_program", "digest_results"]


def digest_program(artifact: Artifact) -> str:
    """The digest of what runs, without the records that the file carries beside it."""
    if isinstance(artifact, OnnxArtifact):
        return _digest_onnx(artifact.model)
    if isinstance(artifact, XnnpackArtifact):
        return _digest_pte(artifact.pte)
    if isinstance(artifact, CpuArtifact):
        return digest_graph(artifact.program)  # `module` is packed for one CPU
    assert isinstance(artifact, ModuleArtifact)
    return digest_graph(artifact.module)


def digest_results(results: Any) -> str:
    """The digest of structure and leaves, to the last bit."""
    leaves, spec = pytree.tree_flatten(results)
    texts = (digest_tensor(v) if isinstance(v, Tensor) else repr(v) for v in leaves)
    return digest_texts([str(spec.num_leaves), *texts])


def _digest_pte(pte: bytes) -> str:
    file = deserialize_pte_binary(pte)
    # The checksum is of the whole file, with the record.
    others = (*METADATA_METHODS, CHECKSUM_METHOD)
    plans = [p for p in file.program.execution_plan if p.name not in others]
    named = [] if file.named_data is None else file.named_data.pte_data
    buffers = [] if file.named_data is None else file.named_data.buffers
    # Records are stored under a name of this package's; XNNPACK's keys are hashes of the data.
    constants = sorted(
        f"{key} {digest_texts([bytes(buffers[entry.buffer_index]).hex()])}"
        for key, entry in dict(named).items()
        if len(key) == 64
    )
    blobs = [bytes(d.data).hex() for d in file.program.backend_delegate_data]
    values = (v.val for plan in plans for v in plan.values if isinstance(v.val, TensorOfPte))
    held = sorted({v.data_buffer_idx for v in values})
    own = [bytes(file.program.constant_buffer[at].storage).hex() for at in held]
    return digest_texts([*map(repr, plans), *constants, *blobs, *own])


def _digest_onnx(data: bytes) -> str:
    model = onnx.load_from_string(data)
    opsets = sorted(f"{o.domain} {o.version}" for o in model.opset_import)
    functions = sorted(f"{f.domain} {f.name} {_digest_function(f)}" for f in model.functions)
    return digest_texts([*opsets, *functions, _digest_onnx_graph(model.graph, {})])


def _digest_function(function: FunctionProto) -> str:
    values = {name: f"input {at}" for at, name in enumerate(function.input)}
    nodes = [_digest_node(n, values) for n in function.node]
    return digest_texts([*sorted(nodes), *(values[name] for name in function.output)])


def _digest_onnx_graph(graph: GraphProto, outer: Mapping[str, str]) -> str:
    values = dict(outer)
    values |= {t.name: _digest_constant(t) for t in graph.initializer}
    values |= {v.name: f"input {at} {_shown(v)}" for at, v in enumerate(graph.input)}
    nodes = [_digest_node(n, values) for n in graph.node]
    return digest_texts([*sorted(nodes), *(values[v.name] for v in graph.output)])


def _digest_node(node: NodeProto, values: dict[str, str]) -> str:
    texts = [node.domain, node.op_type, *(values[name] if name else "" for name in node.input)]
    attributes = sorted(node.attribute, key=lambda a: a.name)
    texts += [f"{a.name}={text}" for a in attributes for text in _attribute(a, values)]
    found = digest_texts(texts)
    values |= {name: f"{found} {at}" for at, name in enumerate(node.output)}
    return found


def _attribute(attribute: AttributeProto, values: Mapping[str, str]) -> Iterator[str]:
    if attribute.type == AttributeProto.GRAPH:
        yield _digest_onnx_graph(attribute.g, values)
    elif attribute.type == AttributeProto.TENSOR:
        yield _digest_constant(attribute.t)
    else:
        yield attribute.SerializeToString(deterministic=True).hex()


def _digest_constant(tensor: TensorProto) -> str:
    plain = TensorProto()
    plain.CopyFrom(tensor)
    plain.ClearField("name")
    plain.ClearField("doc_string")
    plain.ClearField("metadata_props")
    return digest_texts([plain.SerializeToString(deterministic=True).hex()])


def _shown(value: ValueInfoProto) -> str:
    kind = value.type.tensor_type
    return f"{kind.elem_type} {[d.dim_value for d in kind.shape.dim]}"
