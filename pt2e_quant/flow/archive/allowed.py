"""The names that a file may hold: operators, and classes and passes of this package."""

import importlib
import math
import operator
import re
from collections.abc import Collection, Iterable
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload

from pt2e_quant.core.errors import ArtifactError, UnsupportedError
from pt2e_quant.flow.annotate.observer_choice import derive_bias_qparams
from pt2e_quant.graph.pipeline import GraphPass

NAMESPACES = frozenset({"aten", "prims", "quantized_decomposed", "torchao", "pt2e_quant"})
"""The operator libraries that a file may call without being asked."""

_REFUSED = frozenset({"aten::from_file"})  # opens, and may create, any file of the machine

_HIGHER_ORDER = frozenset(
    {
        "associative_scan",
        "cond",
        "flex_attention",
        "invoke_subgraph",
        "map_impl",
        "out_dtype",
        "scan",
        "while_loop",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)

_PYTHON = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (
            operator,
            "add and_ eq floordiv ge getitem gt le lt mod mul ne neg not_ or_ pow sub truediv",
        ),
        (math, "ceil floor sqrt trunc"),
        (
            torch,
            "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum",
        ),
    )
    for name in names.split()
    if hasattr(module, name)
}
"""The targets that torch.export writes for arithmetic on sizes."""

_FUNCTIONS = {"derive_bias_qparams": derive_bias_qparams}
"""The functions of derived observers; a file can name, and so call, no others."""

_OWN = ("core", "flow", "observers", "passes", "pt2e", "tensors")
_OF_PASSES = (*_OWN, "backends")
"""Backends end convert with passes of their own."""
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)
_PATH = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*\Z", re.ASCII)
_OPERATOR = re.compile(r"(\w+)\.(\w+)\.(\w+)\Z", re.ASCII)
_OBJECT = re.compile(r"pt2e_quant((?:\.\w+)+):(\w+)\Z", re.ASCII)


def is_identifier(name: object) -> bool:
    """True if a name may stand in the code that torch.fx makes of a graph."""
    return isinstance(name, str) and bool(_IDENTIFIER.match(name))


def is_path(name: object) -> bool:
    """True if a name is a dotted path of attributes, "layers.0.weight" for one."""
    return isinstance(name, str) and bool(_PATH.match(name))


def name_of_target(target: Any) -> str:
    """Return a file's name for the target of a call_function.

    Raises:
        UnsupportedError: it is nothing that a file can name.
    """
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
    if isinstance(target, HigherOrderOperator) and target._name in _HIGHER_ORDER:
        return f"higher_order.{target._name}"
    for name, known in _PYTHON.items():
        if target is known:
            return name
    raise UnsupportedError(
        f"a file cannot hold a call of {getattr(target, '__name__', target)}",
        fix="register it as an operator of torch.library",
    )


def target_of_name(name: str, namespaces: Iterable[str] = ()) -> Any:
    """The target of a name that `name_of_target` gave.

    Args:
        name: as in the file.
        namespaces: operator libraries that are allowed besides NAMESPACES.

    Raises:
        ArtifactError: it is not allowed, or not registered.
    """
    if name in _PYTHON:
        return _PYTHON[name]
    head, _, rest = name.partition(".")
    if head == "higher_order" and rest in _HIGHER_ORDER:
        return getattr(torch.ops.higher_order, rest)
    parts = _OPERATOR.match(name)
    if parts is None:
        raise ArtifactError(f'"{name}" is no operator that a file may call')
    library, operator_name, overload = parts.groups()
    if library not in NAMESPACES and library not in set(namespaces):
        raise ArtifactError(
            f'this program calls "{name}", of an operator library that is not allowed by default',
            fix=f'if you trust its operators: load(path, namespaces=("{library}",))',
        )
    if f"{library}::{operator_name}" in _REFUSED:
        raise ArtifactError(f'"{name}" is no operator that a file may call')
    found = getattr(getattr(getattr(torch.ops, library), operator_name, None), overload, None)
    if not isinstance(found, OpOverload):
        raise ArtifactError(
            f'this program calls "{name}", which is not registered',
            fix="import the package that registers it, or the version of torch it was saved with",
        )
    return found


def name_of_class(cls: type) -> str:
    """Return a file's name for a class of this package: a module, a record or an enumeration.

    Raises:
        UnsupportedError: it is none, or made at run time.
    """
    text = f"{cls.__module__}:{cls.__qualname__}"
    if not _is_own(text) or not _is_data(cls) or _find(text) is not cls:
        raise UnsupportedError(
            f"a file cannot hold a {cls.__module__}.{cls.__qualname__}, which is not of this "
            "package",
            fix="use observers and passes of pt2e_quant, or convert before you save",
        )
    return text


def class_of_name(text: str) -> type:
    """The class that a name of `name_of_class` stands for.

    Raises:
        ArtifactError: it is not of this package, or missing from it.
    """
    found = _find(text) if _is_own(text) else None
    if found is None:
        raise _missing(text)
    if not isinstance(found, type) or not _is_data(found) or found.__module__ != _module_of(text):
        raise ArtifactError(f'a file may not name "{text}"')
    return found


def name_of_pass(entry: GraphPass) -> str:
    """Return a file's name for a pass of this package.

    Raises:
        UnsupportedError: it is none, or made at run time.
    """
    text = f"{entry.edit.__module__}:{entry.name}"
    if not _is_own(text, _OF_PASSES) or _find(text) is not entry:
        raise UnsupportedError(
            f"a file cannot hold the pass {entry.name}: it is none of pt2e_quant.passes",
            fix="convert before you save",
        )
    return text


def pass_of_name(text: str) -> GraphPass:
    """The pass that a name of `name_of_pass` stands for.

    Raises:
        ArtifactError: it is not of this package, or missing from it.
    """
    found = _find(text) if _is_own(text, _OF_PASSES) else None
    if not isinstance(found, GraphPass):
        raise _missing(text)
    return found


def name_of_function(function: Any) -> str:
    """Return a file's name for a function that derives qparams.

    Raises:
        UnsupportedError: it is none of this package's.
    """
    for name, known in _FUNCTIONS.items():
        if function is known:
            return name
    raise UnsupportedError(
        f"a file cannot hold the function {getattr(function, '__qualname__', function)}",
        fix="convert before you save",
    )


def function_of_name(name: str) -> Any:
    """The function that a name of `name_of_function` stands for.

    Raises:
        ArtifactError: there is none.
    """
    if name not in _FUNCTIONS:
        raise _missing(name)
    return _FUNCTIONS[name]


def refuse_imports(text: str) -> None:
    """Refuse the JSON of a pytree that torch would import modules for, whatever they are.

    Raises:
        ArtifactError: it holds an enum or a defaultdict.
    """
    for marker in ("__enum__", "default_factory"):
        if marker in text:
            raise ArtifactError(
                "the arguments or results of this program hold an enum or a defaultdict, whose "
                "classes a file would have to name",
                fix="use plain dicts, lists and tuples there",
            )


def _is_own(text: str, rooms: Collection[str] = _OWN) -> bool:
    parts = _OBJECT.match(text)
    return parts is not None and parts[1].split(".")[1] in rooms


def _is_data(cls: type) -> bool:
    return issubclass(cls, (nn.Module, Enum)) or is_dataclass(cls)


def _module_of(text: str) -> str:
    return text.partition(":")[0]


def _find(text: str) -> Any:
    try:
        return getattr(importlib.import_module(_module_of(text)), text.partition(":")[2], None)
    except ImportError:
        return None


def _missing(text: str) -> ArtifactError:
    return ArtifactError(
        f'this program holds a "{text}", which this version of pt2e-quant does not have',
        fix="pip install -U pt2e-quant, or the version it was saved with",
    )
