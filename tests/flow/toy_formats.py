"""A toy table of linears and embeddings, and a model of normal weights, for the format schemes."""

import math
from dataclasses import replace

import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.granularity import PerGroup
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Role, Scheme
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OpRow, OpTable, Slot
from pt2e_quant.graph.pattern import Op, Var
from pt2e_quant.observers.weights.weight_search import WeightSearch

# SQNR in dB of a million normal values under each kind of code; of tables of 2 to 16 values it is
# what Max ("Quantizing for Minimum Distortion", 1960) gives for their optimum.
ONE_TENSOR = {
    "fp8": 31.5,
    "fp8_e5m2": 25.5,
    "fp6": 30.9,
    "fp6_e3m2": 25.6,
    "fp4": 18.5,
    "mxfp8": 30.65,
    "mxfp8_e5m2": 25.4,
    "mxfp6": 30.9,
    "mxfp6_e3m2": 25.4,
    "mxfp4": 18.8,
    "nvfp4": 20.4,
    "nf4": 20.7,
    "w1": 4.4,
    "w1.58": 7.1,
    "lut1": 4.4,
    "lut2": 9.3,
    "lut3": 14.6,
    "lut4": 20.2,
    "lut5": 26.0,
    "lut6": 31.9,
    "lut7": 38.0,
    "lut8": 43.7,
}


def one_tensor(name):
    return ONE_TENSOR[max((key for key in ONE_TENSOR if name.startswith(key)), key=len)]


def floor_of(name, tensors=4):
    """What is left where so many quantized tensors add their noise, less 1.5 dB."""
    count = tensors if scheme_named(name).input is not None else max(1, tensors // 2)
    return one_tensor(name) - 10 * math.log10(count) - 1.5


def row_of(scheme: Scheme, name, find, axis=None) -> OpRow:
    weight = scheme.weight
    if axis is not None and isinstance(weight.granularity, PerGroup):
        weight = replace(weight, granularity=PerGroup(weight.granularity.group_size, axis))
    slots = (
        Slot(at="x", role=Role.INPUT, accepts=(scheme.input,) if scheme.input else ()),
        Slot(at="w", role=Role.WEIGHT, accepts=(weight,)),
    )
    return OpRow(name=name, find=(find,), slots=slots, lowers_to="toy")


def quantizer_of(scheme, search=WeightSearch.MIN_MAX) -> TableQuantizer:
    only_weight = replace(scheme, input=None)
    rows = (
        row_of(scheme, "linear", Op(ops.LINEAR, Var("x"), Var("w"))),
        row_of(only_weight, "embedding", Op(ops.EMBEDDING, Var("w"), Var("i"))),
    )
    table = OpTable(
        backend="Toy",
        rows=(rows[0], replace(rows[1], slots=rows[1].slots[1:])),
    )
    return TableQuantizer(table, scheme, observers=ObserverChoice(search=search))


def model_and_input():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, std=0.1)
    return model, (torch.randn(3, 5, 128),)


def converted(scheme, search=WeightSearch.MIN_MAX, *, model=None, inputs=None, **options):
    scheme = scheme_named(scheme) if isinstance(scheme, str) else scheme
    if model is None:
        model, inputs = model_and_input()
    dims = ({0: torch.export.Dim("n", max=64)},)
    program = torch.export.export(model, inputs, dynamic_shapes=dims)
    prepared = pq.prepare_pt2e(program, quantizer_of(scheme, search))
    if scheme.input is not None and not scheme.input.is_dynamic:
        pq.calibrate(prepared, [(torch.randn(8, 5, 128),)])
    return model, pq.convert_pt2e(prepared, **options)


def sqnr(reference, value):
    return 10 * torch.log10(reference.square().sum() / (reference - value).square().sum()).item()


def dequantized(gm, node):
    """What a node of constants comes to."""

    def value(x):
        if not isinstance(x, torch.fx.Node):
            return x
        if x.op == "get_attr":
            return gm.get_buffer(x.target)
        return x.target(*[value(a) for a in x.args], **x.kwargs)

    return value(node)
