"""Quantized tensors in eager modules: one tensor class, its layouts, and quantize_ in place."""

from pt2e_quant.tensors import functions as _functions  # noqa: F401  (fills the tables)
from pt2e_quant.tensors import shards as _shards  # noqa: F401  (as above)
from pt2e_quant.tensors.files.hugging_face import register_hugging_face
from pt2e_quant.tensors.files.save_files import load_module, save_module
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.graphs.graph import to_graph
from pt2e_quant.tensors.graphs.load_graph import load_graph
from pt2e_quant.tensors.kernels.choose_fastest import AutoReport, auto_quantize
from pt2e_quant.tensors.kernels.dispatch import register_kernel, unregister_kernel
from pt2e_quant.tensors.kernels.fallbacks import fallbacks, forget_fallbacks, strict
from pt2e_quant.tensors.layouts.layout import Layout
from pt2e_quant.tensors.layouts.table import register_layout
from pt2e_quant.tensors.prune import prune_2_4, prune_2_4_
from pt2e_quant.tensors.quantize import pack_, quantize_
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.report import EagerReport

__all__ = [
    "AutoReport",
    "EagerReport",
    "Layout",
    "QuantizedTensor",
    "TensorForm",
    "auto_quantize",
    "fallbacks",
    "forget_fallbacks",
    "load_graph",
    "load_module",
    "pack_",
    "prune_2_4",
    "prune_2_4_",
    "quantize_",
    "register_hugging_face",
    "register_kernel",
    "register_layout",
    "save_module",
    "strict",
    "to_graph",
    "unregister_kernel",
]
