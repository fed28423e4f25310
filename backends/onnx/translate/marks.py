"""Operators that stand for a canonical one between the exporter and the rewrite that takes it out.

The exporter folds constants as it goes, which would write a weight of few bits out in float32. It
does not know the marks, and leaves them and what they read alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from onnx.defs import OpSchema
from onnxscript.values import Op, Opset

MARKS = "pt2e_quant"
"""The domain of the marks."""

_TYPES = [
    f"tensor({name})"
    for name in (
        *("float", "double", "float16", "bfloat16", "float8e4m3fn", "float8e5m2"),
        *("int8", "uint8", "int32", "int64"),
    )
]


def mark(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Mapping[str, OpSchema.AttrType] | None = None,
    domain: str = MARKS,
) -> Any:
    """An onnxscript operator with a schema that is registered nowhere else.

    Args:
        name: of the operator.
        inputs: their names, with a question mark behind those that may be missing.
        outputs: their names.
        attributes: names and types of attributes, all of them needed.
        domain: of the operator; a mark's by default.
    """
    optional = OpSchema.FormalParameterOption.Optional
    single = OpSchema.FormalParameterOption.Single
    named = [(each.rstrip("?"), optional if each.endswith("?") else single) for each in inputs]
    all_names = dict.fromkeys([*(each for each, _ in named), *outputs])
    schema = OpSchema(
        name,
        domain,
        1,
        inputs=[
            OpSchema.FormalParameter(each, f"T_{each}", param_option=kind) for each, kind in named
        ],
        outputs=[OpSchema.FormalParameter(each, f"T_{each}") for each in outputs],
        type_constraints=[(f"T_{each}", _TYPES, "") for each in all_names],
        attributes=[
            OpSchema.Attribute(each, kind, "", required=True)
            for each, kind in (attributes or {}).items()
        ],
    )
    return Op(Opset(domain, 1), name, schema)
