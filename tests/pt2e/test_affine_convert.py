"""Affine observers through prepare and convert: q/dq in torchao's operators, as torchao does it."""

import pytest
import torch
from torch import nn

from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.errors import InvariantError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.pt2e import MappingType, PerGroup, PerTensor, PerToken, get_block_size
from pt2e_quant.pt2e.observers.affine import (
    AffineQuantizedMinMaxObserver,
    AffineQuantizedPlaceholderObserver,
)
from pt2e_quant.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from pt2e_quant.pt2e.quantizer import (
    QuantizationSpec,
    Quantizer,
    annotate_input_qspec_map,
)

primitives = pytest.importorskip("torchao.quantization.quant_primitives")

WEIGHT = AffineQuantizedMinMaxObserver.with_args(
    mapping_type=MappingType.SYMMETRIC, target_dtype=torch.int8, granularity=PerGroup(4)
)
INPUT = {
    "static": AffineQuantizedMinMaxObserver.with_args(
        mapping_type=MappingType.ASYMMETRIC, target_dtype=torch.uint8, granularity=PerTensor()
    ),
    "dynamic": AffineQuantizedPlaceholderObserver.with_args(
        mapping_type=MappingType.ASYMMETRIC,
        target_dtype=torch.uint8,
        granularity=PerToken(),
        is_dynamic=True,
        eps=2**-12,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.int32,
    ),
}


class Linears(Quantizer):
    def __init__(self, kind):
        self.kind = kind

    def annotate(self, model):
        specs = [
            QuantizationSpec(torch.uint8, INPUT[self.kind], is_dynamic=self.kind == "dynamic"),
            QuantizationSpec(torch.int8, WEIGHT),
        ]
        for node in model.graph.nodes:
            if node.target == torch.ops.aten.linear.default:
                for source, spec in zip(node.args, specs, strict=False):
                    annotate_input_qspec_map(node, source, spec)
        return model

    def validate(self, model):
        pass


@pytest.mark.parametrize("kind", INPUT)
def test_linear_when_converted_then_blocks_are_quantized_by_torchao_s_operators(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, generator=generator)
    model = nn.Linear(8, 2)
    prepared = prepare_pt2e(torch.export.export(model, (x,)), Linears(kind))
    prepared(x)
    converted = convert_pt2e(prepared)
    names = [str(n.target) for n in converted.graph.nodes if n.op == "call_function"]
    assert sum("quantize_affine" in n and "dequantize" not in n for n in names) >= 1
    assert sum("dequantize_affine" in n for n in names) == 2
    observer = WEIGHT()
    observer(model.weight)
    scale, zero_point = observer.calculate_qparams()
    arguments = ((1, 4), scale, zero_point, torch.int8)
    weight = primitives.dequantize_affine(
        primitives.quantize_affine(model.weight, *arguments), *arguments
    )
    inputs = _fake_quantized(x, kind)
    expected = nn.functional.linear(inputs, weight, model.bias)
    torch.testing.assert_close(converted(x), expected, rtol=0, atol=0)


def _fake_quantized(x, kind):
    block = (3, 8) if kind == "static" else (1, 8)
    scale, zero_point = primitives.choose_qparams_affine(
        x,
        primitives.MappingType.ASYMMETRIC,
        block,
        torch.uint8,
        eps=None if kind == "static" else 2**-12,
    )
    q = primitives.quantize_affine(x, block, scale, zero_point, torch.uint8)
    return primitives.dequantize_affine(q, block, scale, zero_point, torch.uint8)


class OnlyWeights(Linears):
    """The weights of linears and embeddings, in blocks."""

    def __init__(self, spec):
        self.spec = spec

    def annotate(self, model):
        aten = torch.ops.aten
        for node in model.graph.nodes:
            if node.target in (aten.linear.default, aten.embedding.default):
                source = node.args[1 if node.target == aten.linear.default else 0]
                annotate_input_qspec_map(node, source, self.spec)
        return model


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6, bias=False))
        self.block[1].weight = self.table.weight

    def forward(self, ids):
        return self.block(self.table(ids))


@pytest.mark.parametrize(
    ("dtype", "low", "high", "granularity"),
    [
        (torch.int8, None, None, PerGroup(4)),
        (torch.int8, -8, 7, PerGroup(2)),
        (torch.uint8, 0, 15, PerGroup(8)),
        (torch.int8, -128, 127, PerTensor()),
    ],
)
@pytest.mark.parametrize("mapping", [MappingType.SYMMETRIC, MappingType.ASYMMETRIC])
def test_weights_when_quantized_in_blocks_then_stored_as_integers_once(
    dtype, low, high, granularity, mapping
):
    torch.manual_seed(0)
    model, ids = Tied().eval(), torch.arange(6)
    observer = AffineQuantizedMinMaxObserver.with_args(
        mapping_type=mapping, target_dtype=dtype, granularity=granularity
    )
    spec = QuantizationSpec(dtype, observer, low, high)
    converted, unfolded = (_convert(model, ids, spec, fold_quantize=fold) for fold in (True, False))
    assert torch.equal(converted(ids), unfolded(ids))
    record = provenance_of(converted).tensor("block.0.weight")
    assert (record.dtype, record.size_before) == (str(dtype).removeprefix("torch."), 8 * 8 * 4)
    block = get_block_size((8, 8), granularity)
    assert record.block == list(block)
    # a float32 scale and zero_point for each block
    assert record.size_after == 64 + 64 // (block[0] * block[1]) * 8
    with pytest.raises(InvariantError, match="a constant is stored in float with a quantize"):
        verify_canonical(unfolded)
    state = converted.state_dict()
    stored = {name: v for name, v in state.items() if v.dtype == dtype}
    # torch.export names a tied weight after the last module that has it
    assert {n for n in stored if n.endswith("_q")} == {"block.1.weight_q", "block.0.weight_q"}
    assert not {"table.weight", "block.0.weight", "block.1.weight"} & set(state)
    if low is not None:
        assert all(low <= v.min() and v.max() <= high for v in stored.values())
    assert all("val" in n.meta for n in converted.graph.nodes if n.op == "call_function")
    assert all(n.meta.get("nn_module_stack") for n in converted.graph.nodes if "affine" in n.name)


def _convert(model, ids, spec, *, fold_quantize):
    prepared = prepare_pt2e(torch.export.export(model, (ids,)), OnlyWeights(spec))
    prepared(ids)
    return convert_pt2e(prepared, fold_quantize=fold_quantize)
