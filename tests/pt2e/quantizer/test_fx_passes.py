import pytest
import torch
from torch.fx.passes.infra.pass_manager import PassManager

from pt2e_quant.core.specs import Q_ANNOTATION_KEY, QuantizationAnnotation, QuantizationSpec
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.pt2e.quantizer import DuplicateDQPass, PortNodeMetaForQDQ

aten = torch.ops.aten
qdq = torch.ops.quantized_decomposed
QPARAMS = (0.1, 0, -128, 127, torch.int8)
SPEC = QuantizationSpec(torch.int8, MinMaxObserver)


@pytest.fixture
def gm():
    """x -> q -> dq -> neg (annotated), abs (annotated), exp (not)."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    sin = graph.call_function(aten.sin.default, (x,))
    q = graph.call_function(qdq.quantize_per_tensor.default, (sin, *QPARAMS))
    dq = graph.call_function(qdq.dequantize_per_tensor.default, (q, *QPARAMS))
    readers = [graph.call_function(op, (dq,)) for op in (aten.neg.default, aten.abs.default)]
    free = graph.call_function(aten.exp.default, (dq,))
    graph.output((*readers, free))
    sin.meta.update({"stack_trace": "sin", Q_ANNOTATION_KEY: QuantizationAnnotation({}, SPEC)})
    for node in readers:
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation({sin: SPEC})
        node.meta.update(stack_trace=node.name, quantization_tag=f"tag {node.name}")
    free.meta["stack_trace"] = "exp"
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def test_duplicate_when_run_then_each_annotated_reader_has_its_own(gm):
    x = torch.randn(4)
    before = gm(x)
    result = DuplicateDQPass()(gm)
    assert result.modified
    sources = [
        n.args[0] for n in gm.graph.nodes if n.target in (aten.neg.default, aten.abs.default)
    ]
    free = next(n for n in gm.graph.nodes if n.target == aten.exp.default)
    assert len({*sources, free.args[0]}) == 3
    assert all(torch.equal(a, b) for a, b in zip(before, gm(x), strict=True))
    assert not DuplicateDQPass()(gm).modified


def test_metadata_when_ported_then_of_the_operator_a_q_or_dq_belongs_to(gm):
    gm = PassManager([DuplicateDQPass(), PortNodeMetaForQDQ()])(gm).graph_module
    for node in gm.graph.nodes:
        if node.target == qdq.quantize_per_tensor.default:
            assert node.meta["stack_trace"] == "sin"
        if node.target == qdq.dequantize_per_tensor.default:
            (reader,) = node.users
            tag = reader.meta.get("quantization_tag")
            assert node.meta.get("quantization_tag") == tag
            assert (node.meta.get("stack_trace") == reader.name) == (tag is not None)
