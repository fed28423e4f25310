"""The operator `pt2e_quant::round_trip`: what quantization in any format leaves of a tensor.

Compiled training calls it: the search for scales looks at values, which a compiler does not know.
"""

import json
from functools import lru_cache

import torch
from torch import Tensor

from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.tensors.form import scheme_from_json, scheme_to_json
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_LIBRARY.define("round_trip(Tensor x, str scheme) -> Tensor")  # type: ignore[no-untyped-call]


def scheme_text(scheme: TensorScheme) -> str:
    """A scheme as the operator takes it."""
    return json.dumps(scheme_to_json(scheme))


@lru_cache(maxsize=64)
def _scheme_of(text: str) -> TensorScheme:
    return scheme_from_json(json.loads(text))


def _run(x: Tensor, scheme: str) -> Tensor:
    return QuantizedTensor.from_float(x, _scheme_of(scheme)).dequantize()


def _fake(x: Tensor, scheme: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


torch.library.impl(_LIBRARY, "round_trip", "CompositeExplicitAutograd")(_run)
torch.library.register_fake("pt2e_quant::round_trip", lib=_LIBRARY)(_fake)

RoundTrip = torch.ops.pt2e_quant.round_trip.default
"""Quantize a tensor under a scheme's text, and dequantize it."""
