"""Observers and algorithms that a rule brings reach its nodes alone."""

import torch
from torch import nn

from pt2e_quant.backends import get
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.observers.static.mse import MSEObserver
from pt2e_quant.passes.algorithms.algorithm import BARRED_KEY


def annotated(quantizer):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    gm = torch.export.export(model, (torch.randn(2, 8),)).module()
    quantizer.annotate(quantizer.transform_for_annotation(gm))
    return {node.name: node for node in gm.graph.nodes}


def observer_of(node):
    spec = node.meta[Q_ANNOTATION_KEY].output_qspec
    return spec.observer_or_fake_quant_ctr


def test_annotation_writer_when_a_rule_brings_observers_then_other_nodes_keep_theirs():
    quantizer = get("xnnpack").quantizer("int8_minmax")
    quantizer.add_rule(
        QuantRule(
            kind=RuleKind.NODE,
            pattern="linear_1",
            scheme=quantizer.scheme,
            observers=ObserverChoice(activation=MSEObserver),
        )
    )
    found = annotated(quantizer)
    assert observer_of(found["linear_1"]) is MSEObserver
    assert observer_of(found["relu"]) is not MSEObserver


def test_annotation_writer_when_rules_name_algorithms_then_the_others_are_barred():
    quantizer = get("xnnpack").quantizer("int8")
    own = [algorithm.name for algorithm in quantizer.algorithms]
    rule = QuantRule(
        kind=RuleKind.NODE,
        pattern="linear_1",
        scheme=quantizer.scheme,
        algorithms=frozenset({"gptq"}),
    )
    quantizer.add_rule(rule, ["gptq"])
    found = annotated(quantizer)
    assert found["linear_1"].meta[BARRED_KEY] == sorted(own)
    assert found["linear"].meta[BARRED_KEY] == ["gptq"]
    assert annotated(get("xnnpack").quantizer("int8"))["linear"].meta.get(BARRED_KEY) is None


def test_annotation_writer_when_training_then_a_rule_brings_fake_quantizes_and_no_algorithm():
    quantizer = get("xnnpack").quantizer("int8_minmax")
    choice = ObserverChoice(activation=MSEObserver)
    rule = QuantRule(kind=RuleKind.NODE, pattern="linear", scheme=quantizer.scheme)
    quantizer.add_rule(
        QuantRule(
            kind=rule.kind,
            pattern="linear_1",
            scheme=rule.scheme,
            observers=choice,
            algorithms=frozenset({"gptq"}),
        ),
        ["gptq"],
    )
    found = annotated(quantizer.for_qat())
    assert observer_of(found["linear_1"]) is not MSEObserver
    assert found["linear"].meta.get(BARRED_KEY) is None
