"""The same models through torchao's own PT2E and through ours: equal but for what is named here.

Every difference that is excused is in docs/migration.md.
"""

import warnings
from collections import Counter

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")
xnnpack = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")

from pt2e_flows import both  # noqa: E402
from pt2e_models import MODELS  # noqa: E402

from pt2e_quant.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # noqa: E402
from pt2e_quant.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("cached_patterns")

CONFIGS = {
    "static": {},
    "static_per_channel": {"is_per_channel": True},
    "dynamic": {"is_per_channel": True, "is_dynamic": True},
}
STATIC_PAIR = (
    "quantized_decomposed.quantize_per_tensor.default",
    "quantized_decomposed.dequantize_per_tensor.default",
)
# Dropout of a model in inference is gone before annotation: nothing is quantized around it.
DROPPED = {"dropout"}
# Batch norm is folded in another order of operations, and a transposed weight is read in place.
ROUNDED = {"conv_bn", "conv_bn_relu", "functional_linear"}
# Of every kind of sharing and fusion one; the others are slow, for upstream's sake.
QUICK = [
    ("linear", "static"),
    ("residual_relu", "static_per_channel"),
    ("cat_of_cat", "static_per_channel"),
    ("conv_bn_relu", "static_per_channel"),
    ("residual_inplace", "static_per_channel"),
    ("dropout", "static_per_channel"),
    ("linear_read_twice", "dynamic"),
    ("unsupported_between", "dynamic"),
]
CASES = [
    case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
    for case in ((name, config) for config in CONFIGS for name in MODELS)
]


def quantizer(config):
    return lambda: xnnpack.XNNPACKQuantizer().set_global(
        xnnpack.get_symmetric_quantization_config(**CONFIGS[config])
    )


def counts(outcome):
    """Operators without torch's input check (ours is a hook) and with in-place ones as others."""
    found = Counter()
    for name, count in outcome.counts.items():
        if name != "_guards_fn":
            found[name.replace("_.", ".")] += count
    return found


def close(a, b, tolerance):
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(close(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= tolerance * abs(b)
    if isinstance(a, str) and isinstance(b, str):
        return a.replace("_.", ".") == b.replace("_.", ".")
    return a == b


@pytest.mark.parametrize(("name", "config"), CASES)
def test_model_when_converted_then_as_torchao_converts_it(name, config):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    theirs, ours = both(model, inputs, quantizer(config))
    expected, found = counts(theirs), counts(ours)
    if name in DROPPED:
        gone = {"aten.dropout.default": 1}
        if config != "dynamic":
            gone |= dict.fromkeys(STATIC_PAIR, 1)
        assert expected - found == Counter(gone)
    else:
        assert +found == +expected
        if config != "dynamic":
            tolerance = 1e-6 if name in ROUNDED else 0.0
            assert close(ours.qparams, theirs.qparams, tolerance)
    for a, b in zip(ours.outputs, theirs.outputs, strict=True):
        if name in ROUNDED:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        elif name not in DROPPED:
            assert torch.equal(a, b)


def test_shapes_when_dynamic_then_as_torchao_converts_them():
    model, inputs = MODELS["two_linears"]()
    shapes = {"input": {0: torch.export.Dim("batch", max=64)}}
    theirs, ours = both(
        model,
        inputs,
        quantizer("static_per_channel"),
        calibration=[(torch.randn(9, 8),)],
        dynamic_shapes=shapes,
    )
    assert counts(ours) == counts(theirs)
    assert ours.qparams == theirs.qparams
    x = torch.randn(5, 8)
    assert torch.equal(ours.gm(x), theirs.gm(x))


@pytest.mark.parametrize("library", ["ours", "theirs"])
def test_embedding_when_quantized_then_as_torchao_does(library):
    embedding_quantizer = pytest.importorskip(
        "torchao.quantization.pt2e.quantizer.embedding_quantizer"
    )
    torch.manual_seed(0)
    model, inputs = nn.Embedding(5, 8), (torch.tensor([[1, 2, 4]]),)
    theirs, ours = both(model, inputs, embedding_quantizer.EmbeddingQuantizer)
    assert ours.qparams == theirs.qparams
    gm = ours.gm
    if library == "ours":
        gm = convert_pt2e(prepare_pt2e(torch.export.export(model, inputs), EmbeddingQuantizer()))
    assert torch.equal(gm(*inputs), theirs.outputs[0])
    assert {n.target for n in gm.graph.nodes if n.op == "get_attr"} >= {"weight_q"}


class Nothing(EmbeddingQuantizer):
    """Annotates nothing in a model without embeddings."""


def test_prepare_when_nothing_is_annotated_then_a_warning_or_an_error_if_strict():
    program = torch.export.export(nn.ReLU(), (torch.ones(1),))
    with pytest.warns(UserWarning, match="no tensor of this graph is to be quantized"):
        prepared = prepare_pt2e(program, Nothing())
    assert torch.equal(convert_pt2e(prepared)(torch.ones(1)), torch.ones(1))
    with pytest.raises(Exception, match="no tensor of this graph is to be quantized"):
        prepare_pt2e(program, Nothing(), strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_convert_when_no_data_was_seen_then_a_warning_or_an_error_if_strict(strict):
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    with warnings.catch_warnings():
        # torchao's observers warn of their own arguments.
        warnings.simplefilter("ignore")
        prepared = prepare_pt2e(program, quantizer("static")())
    if strict:
        with pytest.raises(Exception, match="observers saw no data"):
            convert_pt2e(prepared, strict=True)
    else:
        with pytest.warns(UserWarning, match="observers saw no data") as caught:
            converted = convert_pt2e(prepared)
        assert len(caught) == 1
        assert converted(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_convert_when_the_flag_is_no_bool_then_refused(wrong):
    with pytest.raises(Exception, match="use_reference_representation must be a bool"):
        convert_pt2e(None, use_reference_representation=wrong)


def test_results_when_switched_to_train_then_they_run():
    program = torch.export.export(nn.Linear(2, 2).eval(), (torch.ones(1, 2),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_pt2e(program, quantizer("static")())
    prepared.train()
    prepared(torch.ones(1, 2))
    converted = convert_pt2e(prepared.eval())
    assert converted.train().training
    assert not converted.eval().training
