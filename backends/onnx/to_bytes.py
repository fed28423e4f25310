"""The bytes of an .onnx file."""

import onnx_ir as ir

from pt2e_quant.backends.onnx.exact_sums import are_exact_there, write_exactly
from pt2e_quant.core.errors import UnsupportedError

_LIMIT = 2**31 - 1
"""Of protobuf's messages."""


def to_bytes(model: ir.Model) -> bytes:
    """A model's bytes, with products that are exact on the CPU that files are made for.

    Raises:
        UnsupportedError: it is too large for one file.
    """
    size = sum(
        v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None
    )
    if size > _LIMIT:
        raise UnsupportedError(
            f"the model's constants are {size:,} bytes, an .onnx file holds {_LIMIT:,}",
            fix="quantize more of it, or split the model",
        )
    proto = ir.to_proto(model)
    if not are_exact_there():
        write_exactly(proto)
    data: bytes = proto.SerializeToString()
    return data
