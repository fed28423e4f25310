"""The ONNX backend: importable without the extra, which only lowering and loading need."""

import torch

from pt2e_quant.backends.onnx.passes.leave_islands import leave_islands
from pt2e_quant.backends.onnx.passes.recurrent import recurrent_form
from pt2e_quant.backends.onnx.policy import POLICY
from pt2e_quant.backends.onnx.recipes import RECIPES
from pt2e_quant.backends.onnx.table import TABLE
from pt2e_quant.backends.target.backend import Backend, Lowers
from pt2e_quant.passes.cleanup.experts_as_linears import experts_as_linears


def _lowering() -> Lowers:
    from pt2e_quant.backends.onnx.lower import LOWERING

    return LOWERING


BACKEND = Backend(
    name="onnx",
    suffix=".onnx",
    extra="onnx",
    packages=("onnx", "onnxscript", "onnxruntime"),
    table=TABLE,
    recipes=RECIPES,
    lowering=_lowering,
    policy=POLICY,
    transforms=(experts_as_linears,),
    placing=(leave_islands,),
    recurrent=recurrent_form,
    computes_in=(torch.float32,),
)
