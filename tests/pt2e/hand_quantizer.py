"""A quantizer written by hand in a test, and both flows run with it."""

from collections import Counter

import torch
from pt2e_flows import both
from torch import nn
from torch.export import export
from torchao.quantization.pt2e import observer as theirs_observer
from torchao.quantization.pt2e import quantizer as theirs_quantizer

from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from pt2e_quant.pt2e.quantizer import Quantizer

aten = torch.ops.aten
AFFINE, SYMMETRIC = torch.per_tensor_affine, torch.per_tensor_symmetric


class Hand(theirs_quantizer.Quantizer, Quantizer):
    """Annotates with a function of (a node finder, the two libraries' specs)."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def annotate(self, model):
        self.rule(Finder(model))
        return model

    def validate(self, model):
        pass


class Finder:
    """Nodes of a graph by operator, and annotations in torchao's own classes."""

    def __init__(self, gm):
        self.nodes = list(gm.graph.nodes)

    def all(self, target):
        return [n for n in self.nodes if n.target == target]

    def one(self, target):
        (found,) = self.all(target)
        return found

    def note(self, node, inputs=(), output=None, *, sharing=True):
        node.meta["quantization_annotation"] = theirs_quantizer.QuantizationAnnotation(
            input_qspec_map=dict(inputs), output_qspec=output, allow_implicit_sharing=sharing,
            _annotated=True,
        )  # fmt: skip


def spec(dtype=torch.int8, low=-128, high=127, scheme=AFFINE):
    observer = theirs_observer.MinMaxObserver.with_args(eps=2**-12)
    return theirs_quantizer.QuantizationSpec(dtype, observer, low, high, scheme)


def shared(place):
    return theirs_quantizer.SharedQuantizationSpec(place)


INT8, UINT8 = spec(), spec(torch.uint8, 0, 255)
WEIGHT = spec(low=-127, scheme=SYMMETRIC)
X = torch.linspace(-1, 2, 24).reshape(2, 3, 4)


class Run(nn.Module):
    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args):
        return self.function(self, *args)


def equal(model, inputs, rule, *, atol=0.0, **options):
    """Both flows give the same q/dq with the same qparams, and the same outputs."""
    theirs, ours = both(model, inputs, lambda: Hand(rule), **options)
    assert _qdq(ours.counts) == _qdq(theirs.counts)
    assert [q[0] for q in ours.qparams] == [q[0] for q in theirs.qparams]
    assert _numbers(ours) == _numbers(theirs)
    for a, b in zip(theirs.outputs, ours.outputs, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=atol)
    return ours.gm


def _qdq(counts):
    return Counter({k: v for k, v in counts.items() if "quantize" in k})


def _numbers(outcome):
    return sorted(repr(arguments) for _, _, arguments in outcome.qparams)


def ours_only(model, inputs, rule, *, shapes=None, batches=()):
    """A converted graph of this package."""
    program = export(model.eval(), inputs, dynamic_shapes=shapes, strict=False)
    prepared = prepare_pt2e(program, Hand(rule), strict=True)
    with torch.no_grad():
        for batch in (inputs, *batches):
            prepared(*batch)
    return convert_pt2e(prepared, strict=True)


def scales(gm):
    """The scale of each static q/dq in graph order."""
    return [n.args[1] for n in gm.graph.nodes if is_qdq(n)]
