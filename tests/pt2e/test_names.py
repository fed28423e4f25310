"""Every public name of torchao's PT2E is here, with the same arguments in the same order."""

import inspect
from enum import Enum
from importlib import import_module

import pytest
import torch

theirs_root = pytest.importorskip("torchao.quantization.pt2e")

MODULES = (
    "",
    ".export_utils",
    ".fake_quantize",
    ".graph_utils",
    ".learnable_fake_quantize",
    ".lowering",
    ".observer",
    ".quantize_pt2e",
    ".quantizer",
    ".quantizer.composable_quantizer",
    ".quantizer.duplicate_dq_pass",
    ".quantizer.embedding_quantizer",
    ".quantizer.port_metadata_pass",
    ".quantizer.quantizer",
    ".quantizer.utils",
    ".utils",
)
# Not in `__all__` there, but what scripts import all the same.
ALSO = {
    ".export_utils": ["WrapperModule"],
    ".learnable_fake_quantize": ["enable_range_learning", "disable_range_learning"],
    ".observer": ["PartialWrapper"],
    ".quantizer.quantizer": ["Q_ANNOTATION_KEY"],
    ".quantizer.utils": [
        "OperatorConfig",
        "QuantizationConfig",
        "annotate_input_qspec_map",
        "annotate_output_qspec",
        "get_module_name_filter",
        "is_valid_annotation",
    ],
    "": ["PartialWrapper"],
}


def names():
    for module in MODULES:
        listed = getattr(import_module(f"torchao.quantization.pt2e{module}"), "__all__", [])
        for name in dict.fromkeys([*listed, *ALSO.get(module, [])]):
            if not name.startswith("_"):
                yield module, name


def pair(module, name):
    return tuple(
        getattr(import_module(f"{root}{module}"), name)
        for root in ("pt2e_quant.pt2e", "torchao.quantization.pt2e")
    )


def described(value):
    """A default as text; objects of the two libraries count as equal by name."""
    if isinstance(value, type) or inspect.isfunction(value):
        # Upstream's name of one scale for each index of an axis is PerAxis.
        return value.__name__.replace("PerChannel", "PerAxis")
    if isinstance(value, Enum):
        return value.name
    return repr(value)


@pytest.mark.parametrize(("module", "name"), list(names()))
def test_name_when_public_there_then_here_with_the_same_arguments(module, name):
    ours, theirs = pair(module, name)
    assert name in import_module(f"pt2e_quant.pt2e{module}").__all__
    if not (inspect.isfunction(theirs) or inspect.isclass(theirs)):
        return  # a key, a union, a constructor with arguments given
    if name == "Granularity" or (inspect.isclass(theirs) and issubclass(theirs, Enum)):
        return  # a base class there, a union here; members are compared with the observers
    expected = [
        p for p in inspect.signature(theirs).parameters.values() if p.name not in ("self", "kwargs")
    ]
    found = [p for p in inspect.signature(ours).parameters.values() if p.name != "kwargs"]
    for i, parameter in enumerate(expected):
        assert found[i].name == parameter.name
        assert found[i].kind == parameter.kind
        if parameter.default is not parameter.empty:
            assert described(found[i].default) == described(parameter.default)
    for extra in found[len(expected) :]:
        assert extra.default is not extra.empty
        assert extra.kind is extra.KEYWORD_ONLY or "granularity" in ours.__module__


@pytest.mark.parametrize(
    "name", [n for m, n in names() if m == ".observer" and n.startswith(("default", "weight"))]
)
def test_default_when_made_then_configured_as_there(name):
    made = [constructor() for constructor in pair(".observer", name)]
    for attribute in ("dtype", "qscheme", "quant_min", "quant_max", "ch_axis", "is_dynamic"):
        values = [getattr(m, attribute, None) for m in made]
        assert values[0] == values[1], attribute


def test_partial_wrapper_when_used_then_as_there():
    for root in ("pt2e_quant.pt2e", "torchao.quantization.pt2e"):
        observer = import_module(root).MinMaxObserver
        made = observer.with_args(quant_min=-8, quant_max=7).with_args(dtype=torch.int8)
        one, two = made(), made(quant_max=3)
        assert (one.quant_min, one.quant_max, two.quant_max) == (-8, 7, 3)
        assert one is not two
        made = observer.with_callable_args(eps=lambda: 0.5)
        assert made().eps.item() == 0.5
