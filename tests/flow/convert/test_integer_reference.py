"""Converted graphs in integers, against their q/dq and against torchao's reference form."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from pt2e_quant.core.canonical import Form, verify_canonical
from pt2e_quant.core.errors import ConfigError, InvariantError, UnsupportedError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.convert.integer_reference import integer_reference
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.graph.subgraphs import bodies
from pt2e_quant.pt2e import quantize_pt2e as ours


def products(gm):
    """How many layers' products there are; factors of sums are products too."""
    found = [n.args[0] for n in gm.graph.nodes if str(n.target) == "out_dtype"]
    return sum(target is not torch.ops.aten.mul.Tensor for target in found)


def converted(net, quantizer, images, **options):
    prepared = prepare_pt2e(export(net, (images[0],), **options), quantizer())
    return convert_pt2e(calibrate(prepared, images, progress=False))


def test_reference_when_a_net_is_converted_then_within_a_step_of_its_qdq(
    net, quantizer, images, batch_dim
):
    quantized = converted(net, quantizer, images, dynamic_shapes=batch_dim)
    reference = integer_reference(quantized)
    assert products(reference) == 3
    assert not [n for n in reference.graph.nodes if is_qdq(n)]
    step = provenance_of(quantized).tensor("linear").scale[0]
    for batch in (*images, torch.randn(7, 3, 8, 8)):
        expected, found = quantized(batch), reference(batch)
        assert float((found["logits"] - expected["logits"]).abs().max()) <= 1.01 * step
        assert torch.equal(found["calls"], expected["calls"])


def test_reference_when_made_then_its_form_is_verified_and_weights_integers(net, quantizer, images):
    quantized = converted(net, quantizer, images)
    with pytest.raises(InvariantError, match="not in reference form: a q/dq that integer"):
        verify_canonical(quantized, form=Form.REFERENCE)
    reference = integer_reference(quantized)
    verify_canonical(reference, form=Form.REFERENCE)
    state = reference.state_dict()
    stored = {n for n, v in state.items() if v.dtype is torch.int8 and not n.endswith("_table")}
    assert stored == {"stem.weight_q", "body.weight_q", "head.weight_q"}
    for node in reference.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta, node
            assert node.meta.get("nn_module_stack"), node


def test_reference_when_made_then_the_graph_stays_and_shares_all_but_what_runs_write(
    net, quantizer, images
):
    quantized = converted(net, quantizer, images)
    code, notes = quantized.code, list(provenance_of(quantized).notes)
    references = [integer_reference(quantized, name) for name in ("xnnpack", "tosa")]
    assert (quantized.code, provenance_of(quantized).notes) == (code, notes)
    verify_canonical(quantized)
    weights = {v.data_ptr() for n, v in quantized.state_dict().items() if n.endswith("weight_q")}
    assert len(weights) == 3
    for reference in references:
        assert weights <= {v.data_ptr() for v in reference.state_dict().values()}
        calls = [reference(images[0])["calls"].item() for _ in range(2)]
        assert calls[1] == calls[0] + 1
        with pytest.raises(ConfigError, match="an integer reference already"):
            integer_reference(reference, "tflite")
    assert quantized(images[0])["calls"].item() == calls[0]


def test_reference_when_asked_for_a_gradient_then_it_says_that_it_has_none(net, quantizer, images):
    reference = integer_reference(converted(net, quantizer, images))
    for gm in (reference, copy.deepcopy(reference)):
        plain = gm(images[0])["logits"]
        assert not plain.requires_grad
        x = images[0].clone().requires_grad_()
        found = gm(x)["logits"]
        assert torch.equal(found, plain)
        with pytest.raises(UnsupportedError, match=r"no gradient[\s\S]*numerics=\"integer\""):
            found.sum().backward()
        gm.train()
        with pytest.raises(UnsupportedError, match="no gradient"):
            gm(images[0])["logits"].sum().backward()
        with torch.no_grad():
            assert not gm(x)["logits"].requires_grad


def test_reference_when_the_graph_is_not_converted_then_refused(net, quantizer, images):
    prepared = prepare_pt2e(export(net, (images[0],)), quantizer())
    with pytest.raises(InvariantError, match="canonical form"):
        integer_reference(prepared)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.a(y), lambda y: self.b(y).relu(), (x,)) + 1


def test_reference_when_there_is_control_flow_then_bodies_are_written_too(quantizer):
    batches = [(torch.ones(2, 4),), (-torch.ones(2, 4),)]
    prepared = prepare_pt2e(export(Branches().eval(), batches[0]), quantizer())
    quantized = convert_pt2e(calibrate(prepared, batches, progress=False))
    reference = integer_reference(quantized)
    assert not [n for b in bodies(reference) for n in b.gm.graph.nodes if is_qdq(n)]
    for batch in batches:
        torch.testing.assert_close(reference(*batch), quantized(*batch), rtol=0, atol=1e-6)


# Against torchao

theirs = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
xnnpack = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")


class ConvAdd(nn.Module):
    def __init__(self, *, relu: bool) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 3, 3), relu

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y = y + x[:, :, 1:-1, 1:-1]
        return torch.relu(y) if self.relu else y


IMAGE = torch.linspace(-2, 2, 2 * 3 * 8 * 8).sin().reshape(2, 3, 8, 8)
ROW = torch.linspace(-1, 1, 15).reshape(3, 5)
# Their products and sums cut off where ours round: a step for each on the way to the output.
CASES = {
    "linear": (nn.Linear(5, 4), ROW, False, 1),
    "dynamic linear": (nn.Linear(5, 4), ROW, True, 0),
    "conv2d": (nn.Conv2d(3, 4, 3), IMAGE, False, 1),
    "conv2d relu": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), IMAGE, False, 1),
    "add": (ConvAdd(relu=False), IMAGE, False, 3),
    "add relu": (ConvAdd(relu=True), IMAGE, False, 3),
    "max_pool2d": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(1)), IMAGE, False, 1),
    "adaptive_avg_pool2d": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)), IMAGE, False, 2,
    ),
}  # fmt: skip


@pytest.mark.slow  # torchao exports some twenty patterns each time
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.filterwarnings("ignore:.*treespec.children_specs.*:FutureWarning")
def test_reference_when_compared_with_torchao_then_apart_by_its_truncation(name):
    torch.manual_seed(0)
    model, x, is_dynamic, steps = CASES[name]
    config = xnnpack.get_symmetric_quantization_config(is_dynamic=is_dynamic)
    outputs, graphs = [], []
    for flow, is_reference in ((ours, False), (ours, True), (theirs, True)):
        shapes = ({0: Dim("n", min=2, max=9)},)
        program = export(copy.deepcopy(model).eval(), (x,), dynamic_shapes=shapes)
        quantizer = xnnpack.XNNPACKQuantizer().set_global(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = flow.prepare_pt2e(program.module(), quantizer)
            with torch.no_grad():
                prepared(x)
            graphs.append(flow.convert_pt2e(prepared, use_reference_representation=is_reference))
            with torch.no_grad():
                outputs.append(graphs[-1](x))
    assert products(graphs[1]) >= 1
    records = provenance_of(graphs[0]).tensors
    step = max((r.scale[0] for r in records if r.role == "output"), default=0.0)
    quantized, mine, other = outputs
    rounding = 1e-6 * float(quantized.abs().max())
    assert float((mine - quantized).abs().max()) <= step + rounding
    assert float((mine - other).abs().max()) <= steps * step + rounding + (
        # a dynamic bias is cut off to a step of the accumulator there
        float(x.abs().max()) / 127 * 0.005 if is_dynamic else 0.0
    )


def test_reference_when_weights_are_unfolded_then_written_too():
    torch.manual_seed(0)
    x = torch.randn(3, 5)
    config = xnnpack.get_symmetric_quantization_config(is_per_channel=True)
    prepared = ours.prepare_pt2e(
        export(nn.Linear(5, 4), (x,)).module(), xnnpack.XNNPACKQuantizer().set_global(config)
    )
    prepared(x)
    folded = ours.convert_pt2e(copy.deepcopy(prepared), use_reference_representation=True)
    unfolded = ours.convert_pt2e(prepared, True, False)
    assert products(unfolded) == 1
    assert "weight" in dict(unfolded.named_parameters())
    assert torch.equal(folded(x), unfolded(x))


def test_reference_option_when_not_a_boolean_then_refused():
    with pytest.raises(ConfigError, match="must be a bool, found 'yes'"):
        ours.convert_pt2e(None, "yes")
