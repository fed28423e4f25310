"""One model through torchao's own PT2E and through ours, and what to compare of the results."""

import copy
import warnings
from collections import Counter
from dataclasses import dataclass

import torch
from torch.fx import GraphModule
from torchao.quantization.pt2e import quantize_pt2e as theirs

from pt2e_quant.graph.meta import constant_of
from pt2e_quant.pt2e import quantize_pt2e as ours

QDQ = "quantized_decomposed"


@dataclass
class Outcome:
    """A converted graph and what it gives."""

    gm: GraphModule
    outputs: list

    @property
    def counts(self):
        """How often each operator is called."""
        return Counter(
            str(n.target) for n in self.gm.graph.nodes if n.op in ("call_function", "call_module")
        )

    @property
    def qparams(self):
        """Each q/dq with its scale, zero_point and limits, in graph order by kind."""
        found = []
        for node in self.gm.graph.nodes:
            if QDQ in str(node.target):
                arguments = [self._value(a) for a in node.args[1:]]
                found.append((str(node.target), _source_kind(node), arguments))
        return sorted(found, key=repr)

    def _value(self, argument):
        if not isinstance(argument, torch.fx.Node):
            return argument
        value = constant_of(self.gm, argument)
        return "computed" if value is None else value.double().tolist()


def _source_kind(node):
    """What a q/dq reads, and which operators read it: by name, q/dq left out."""
    users = sorted(str(u.target) for u in node.users if QDQ not in str(u.target))
    return node.args[0].op if QDQ not in str(node.args[0].target) else "q/dq", users


def both(model, inputs, quantizer, *, calibration=(), dynamic_shapes=None, strict=False):
    """(theirs, ours) of a model; the quantizer is made anew for each.

    Cadence finds operators by metadata that only a strict export writes. Arm's passes refuse the
    module with torch's input checks, which ours takes out itself.
    """
    found = []
    for flow in (theirs, ours):
        exported = torch.export.export(
            copy.deepcopy(model).eval(), inputs, dynamic_shapes=dynamic_shapes, strict=strict
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = flow.prepare_pt2e(exported.module(check_guards=False), quantizer())
        with torch.no_grad():
            for batch in (inputs, *calibration):
                prepared(*batch)
        converted = flow.convert_pt2e(prepared)
        with torch.no_grad():
            outputs = torch.utils._pytree.tree_leaves(converted(*inputs))
        found.append(Outcome(converted, outputs))
    return found
