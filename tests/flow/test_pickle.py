"""Prepared and converted graphs in pickles and deep copies: nothing is lost."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.specs import (
    Q_ANNOTATION_KEY,
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    SharedQuantizationSpec,
)
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.flow.qat.prepare_qat_pt2e import prepare_qat_pt2e
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.graph.meta import TRACE_KEYS
from pt2e_quant.observers.static.minmax import MinMaxObserver

AFFINE = torch.per_tensor_affine
ACTIVATION = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, AFFINE)
KEPT = {*TRACE_KEYS, "val", Q_ANNOTATION_KEY, "pt2e_quant.rule"}


def pickled(gm):
    return pickle.loads(pickle.dumps(gm))


def saved(gm):
    stream = io.BytesIO()
    torch.save(gm, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


WAYS = pytest.mark.parametrize("again", [pickled, saved, copy.deepcopy])


def described(gm):
    """Every node with its arguments and its metadata, as text."""
    rows = []
    for node in gm.graph.nodes:
        meta = {k: _text(v) for k, v in node.meta.items() if k in KEPT}
        rows.append((node.op, node.name, str(node.target), str(node.args), str(node.kwargs), meta))
    return rows


def _text(value):
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    return str(value)


@WAYS
def test_prepared_when_stored_halfway_through_calibration_then_continues_alike(
    net, quantizer, images, batch_dim, again
):
    prepared = prepare_pt2e(export(net, (images[0],), dynamic_shapes=batch_dim), quantizer())
    calibrate(prepared, images[:1], progress=False)
    twin = again(prepared)
    assert isinstance(twin, torch.fx.GraphModule)
    assert described(twin) == described(prepared)
    assert capture_of(twin) == capture_of(prepared)
    assert provenance_of(twin) == provenance_of(prepared)
    converted = []
    for gm in (prepared, twin):
        calibrate(gm, images[1:], progress=False)
        converted.append(convert_pt2e(gm))
    first, second = converted
    assert second.code == first.code
    assert described(second) == described(first)
    assert provenance_of(second) == provenance_of(first)
    states = [gm.state_dict() for gm in converted]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@WAYS
def test_converted_when_stored_then_runs_checks_and_exports_alike(
    net, quantizer, images, batch_dim, again
):
    prepared = prepare_pt2e(export(net, (images[0],), dynamic_shapes=batch_dim), quantizer())
    converted = convert_pt2e(calibrate(prepared, images, progress=False))
    twin = again(converted)
    assert described(twin) == described(converted)
    x = torch.randn(7, 3, 8, 8)
    for _ in range(2):  # the buffer that the model writes counts on in both
        found, expected = twin(x), converted(x)
        assert torch.equal(found["logits"], expected["logits"])
        assert torch.equal(found["calls"], expected["calls"])
    with pytest.raises(InputError, match="size 4 in dimension 1"):
        twin(torch.randn(7, 4, 8, 8))
    program = export_again(twin)
    assert next(iter(program.range_constraints.values())).upper == 64


def trained(gm, images, seed):
    torch.manual_seed(seed)  # of the dropout
    optimizer = torch.optim.SGD(gm.parameters(), lr=0.01)
    for image in images:
        gm(image)["logits"].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@WAYS
def test_training_when_loaded_then_goes_on_alike(net, quantizer, images, again):
    program = export(net.train(), (images[0],))
    prepared = prepare_qat_pt2e(program, quantizer())
    trained(prepared, images, 0)
    twin = again(prepared)
    for gm in (prepared, twin):
        trained(gm, images, 1)
    first, second = convert_pt2e(prepared), convert_pt2e(twin)
    first.calls.zero_(), second.calls.zero_()
    assert described(second) == described(first)
    assert torch.equal(second(images[0])["logits"], first(images[0])["logits"])


def test_prepared_when_stored_twice_then_as_stored_once(net, quantizer, images):
    prepared = prepare_pt2e(export(net, (images[0],)), quantizer())
    calibrate(prepared, images, progress=False)
    twice = pickled(copy.deepcopy(pickled(prepared)))
    assert described(twice) == described(prepared)
    assert torch.equal(
        convert_pt2e(twice)(images[1])["logits"], convert_pt2e(prepared)(images[1])["logits"]
    )


def test_train_and_eval_when_loaded_then_switch_the_mode(net, quantizer, images):
    twin = pickled(prepare_pt2e(export(net, (images[0],)), quantizer()))
    assert twin.train().training
    assert not twin.eval().training


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.a(y), lambda y: self.b(y).relu(), (x,)) + 1


@WAYS
def test_bodies_when_their_graph_is_stored_then_stored_too(quantizer, again):
    batches = [(torch.ones(2, 4),), (-torch.ones(2, 4),)]
    dynamic = {"x": {0: torch.export.Dim("b", min=2, max=8)}}
    program = export(Branches().eval(), batches[0], dynamic_shapes=dynamic)
    prepared = prepare_pt2e(program, quantizer())
    calibrate(prepared, batches[:1], progress=False)
    twin = again(prepared)
    first, second = (
        convert_pt2e(calibrate(gm, batches[1:], progress=False)) for gm in (prepared, twin)
    )
    for batch in batches:
        assert torch.equal(first(*batch), second(*batch))
    again(second)(torch.ones(5, 4))


class Annotate:
    """Shared, derived and observed specs by hand."""

    def __init__(self, derive) -> None:
        self.derive = derive

    def transform_for_annotation(self, gm):
        return gm

    def validate(self, gm):
        pass

    def annotate(self, gm):
        linear = next(n for n in gm.graph.nodes if n.target == torch.ops.aten.linear.default)
        x, weight, bias = linear.args
        derived = DerivedQuantizationSpec(
            [(x, linear), (weight, linear)], self.derive, torch.int32, -(2**31), 2**31 - 1
        )
        linear.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
            {x: ACTIVATION, weight: ACTIVATION, bias: derived},
            SharedQuantizationSpec((x, linear)),
        )
        return gm


def product(observers):
    scale = observers[0].calculate_qparams()[0] * observers[1].calculate_qparams()[0]
    return scale, torch.zeros_like(scale, dtype=torch.int32)


@WAYS
def test_annotations_when_copied_then_name_the_nodes_of_the_copy(again):
    x = torch.randn(3, 4)
    prepared = prepare_pt2e(export(nn.Linear(4, 4), (x,)), Annotate(product))
    prepared(x)
    twin = again(prepared)
    node = next(n for n in twin.graph.nodes if Q_ANNOTATION_KEY in n.meta)
    annotation = node.meta[Q_ANNOTATION_KEY]
    named = [*annotation.input_qspec_map, *annotation.output_qspec.edge_or_node]
    assert all(n.graph is twin.graph for n in named)
    bias = next(n for n in annotation.input_qspec_map if "bias" in n.name)
    for edge in annotation.input_qspec_map[bias].derived_from:
        assert all(n.graph is twin.graph for n in edge)
    assert torch.equal(convert_pt2e(twin)(x), convert_pt2e(prepared)(x))


@pytest.mark.parametrize("again", [pickled, copy.deepcopy])
def test_copy_when_the_original_is_dropped_then_it_is_freed(net, quantizer, images, again):
    prepared = prepare_pt2e(export(net, (images[0],)), quantizer())
    gone = weakref.ref(prepared)
    twin = again(prepared)
    del prepared
    gc.collect()
    assert gone() is None
    converted = convert_pt2e(calibrate(twin, images, progress=False))
    gone = weakref.ref(converted)
    last = again(converted)
    del converted, twin
    gc.collect()
    assert gone() is None
    assert isinstance(last(images[0])["logits"], Tensor)


def test_pickle_when_an_observer_has_a_local_function_then_refused_by_name():
    x = torch.randn(3, 4)
    prepared = prepare_pt2e(export(nn.Linear(4, 4), (x,)), Annotate(lambda o: product(o)))
    with pytest.raises(
        ConfigError, match=r"activation_post_process_\d.*derive_qparams_fn.*lambda"
    ) as e:
        pickle.dumps(prepared)
    assert "top of a module" in e.value.fix


def test_pickle_when_a_spec_constructor_is_local_then_calling_it_is_refused():
    class Local(Annotate):
        def annotate(self, gm):
            super().annotate(gm)
            for node in gm.graph.nodes:
                if annotation := node.meta.get(Q_ANNOTATION_KEY):
                    spec = QuantizationSpec(
                        torch.int8, lambda **kw: MinMaxObserver(**kw), -128, 127, AFFINE
                    )
                    annotation.output_qspec = spec
            return gm

    x = torch.randn(3, 4)
    prepared = prepare_pt2e(export(nn.Linear(4, 4), (x,)), Local(product))
    prepared(x)
    twin = pickled(prepared)
    node = next(n for n in twin.graph.nodes if Q_ANNOTATION_KEY in n.meta)
    with pytest.raises(ConfigError, match="not in this pickle"):
        node.meta[Q_ANNOTATION_KEY].output_qspec.observer_or_fake_quant_ctr()
    assert torch.equal(convert_pt2e(twin)(x), convert_pt2e(prepared)(x))


def test_algorithms_when_loaded_then_the_same_passes(net, images):
    from pt2e_quant.backends.registry import get

    pytest.importorskip("executorch")
    prepared = prepare_pt2e(export(net, (images[0],)), get("xnnpack").quantizer("int8"))
    key = "pt2e_quant.prepared"
    before, after = prepared.meta[key], pickled(prepared).meta[key]
    assert before.algorithms
    assert before.algorithms == after.algorithms
    assert all(a is b for a, b in zip(before.finishing, after.finishing, strict=True))
