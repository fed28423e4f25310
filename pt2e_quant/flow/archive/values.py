"""Python values as JSON and back: what the arguments, the metadata and the observers hold.

Numbers, text, None and lists stand for themselves; anything else is {"$": kind, "v": …}.
"""

import math
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from pt2e_quant.core.errors import ArtifactError, UnsupportedError
from pt2e_quant.flow.archive.allowed import (
    class_of_name,
    function_of_name,
    name_of_class,
    name_of_function,
    name_of_pass,
    name_of_target,
    pass_of_name,
    target_of_name,
)
from pt2e_quant.flow.archive.symbols import FakeReader, FakeWriter
from pt2e_quant.flow.archive.tensor_store import TensorReader, TensorWriter
from pt2e_quant.graph.pipeline import GraphPass

_NAMED = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "qscheme": torch.qscheme,
}
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {"$": kind, "v": value}


class ValueWriter:
    """Writes values.

    Args:
        tensors: takes the real tensors.
        fakes: takes the fake ones and the symbols.
        module: writes a module, gives its number.
    """

    def __init__(
        self, tensors: TensorWriter, fakes: FakeWriter, module: Callable[[nn.Module], int]
    ) -> None:
        self.tensors = tensors
        self.fakes = fakes
        self.module = module

    def write(self, value: Any, name: str = "value") -> Any:
        """A JSON value; tensors in it go to the store under a name.

        Raises:
            UnsupportedError: a file cannot hold it.
        """
        if value is None or (isinstance(value, (bool, str)) and not isinstance(value, Enum)):
            return value
        if type(value) is int:
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else _tagged("float", str(value))
        if isinstance(value, list):
            return [self.write(v, name) for v in value]
        for kind, cls in _NAMED.items():
            if isinstance(value, cls):
                return _tagged(kind, str(value).removeprefix("torch."))
        return self._container(value, name) or self._object(value, name)

    def _container(self, value: Any, name: str) -> dict[str, Any] | None:
        if isinstance(value, torch.Size):
            return _tagged("size", [self.write(v, name) for v in value])
        if type(value) is tuple:
            return _tagged("tuple", [self.write(v, name) for v in value])
        if isinstance(value, dict):
            entries = [[self.write(k, name), self.write(v, name)] for k, v in value.items()]
            return _tagged("dict", entries)
        if isinstance(value, (set, frozenset)):
            return _tagged("set", sorted((self.write(v, name) for v in value), key=repr))
        if isinstance(value, slice):
            return _tagged(
                "slice", [self.write(v, name) for v in (value.start, value.stop, value.step)]
            )
        return None

    def _object(self, value: Any, name: str) -> dict[str, Any]:
        if isinstance(value, Node):
            return _tagged("node", value.name)
        if isinstance(value, FakeTensor):
            return _tagged("fake", self.fakes.tensor(value))
        if isinstance(value, Tensor):
            return _tagged("tensor", self.tensors.add(value, name))
        if isinstance(value, _SYMBOLIC):
            return _tagged("symbol", self.fakes.size(value))
        if isinstance(value, torch.device):
            return _tagged("device", str(value))
        if isinstance(value, complex):
            return _tagged("complex", [value.real, value.imag])
        if value is Ellipsis:
            return _tagged("ellipsis", None)
        if isinstance(value, OpOverload):
            return _tagged("operator", name_of_target(value))
        if isinstance(value, nn.Module):
            return _tagged("module", self.module(value))
        return self._of_this_package(value, name)

    def _of_this_package(self, value: Any, name: str) -> dict[str, Any]:
        if isinstance(value, Enum):
            return _tagged("enum", [name_of_class(type(value)), value.name])
        if isinstance(value, GraphPass):
            return _tagged("pass", name_of_pass(value))
        if isinstance(value, FunctionType):
            return _tagged("function", name_of_function(value))
        if is_dataclass(value) and not isinstance(value, type):
            held = {f.name: self.write(getattr(value, f.name), name) for f in fields(value)}
            return _tagged("data", [name_of_class(type(value)), held])
        raise UnsupportedError(
            f"a file cannot hold a {type(value).__module__}.{type(value).__qualname__}"
        )


class ValueReader:
    """Reads what a `ValueWriter` wrote.

    Args:
        tensors: gives the real tensors.
        fakes: makes the fake ones.
        module: gives a module by its number.
        namespaces: operator libraries that are allowed besides the usual ones.
    """

    def __init__(
        self,
        tensors: TensorReader,
        fakes: FakeReader,
        module: Callable[[int], nn.Module],
        namespaces: tuple[str, ...],
    ) -> None:
        self.tensors = tensors
        self.fakes = fakes
        self.namespaces = namespaces
        self.nodes: dict[str, Node] = {}
        self._readers: dict[str, Callable[[Any], Any]] = {
            "float": float,
            "size": lambda v: torch.Size(map(self.read, v)),
            "tuple": lambda v: tuple(map(self.read, v)),
            "dict": lambda v: {self.read(k): self.read(item) for k, item in v},
            "set": lambda v: set(map(self.read, v)),
            "slice": lambda v: slice(*map(self.read, v)),
            "node": lambda v: self.nodes[v],
            "fake": fakes.tensor,
            "tensor": tensors.get,
            "symbol": fakes.size,
            "device": torch.device,
            "complex": lambda v: complex(*v),
            "ellipsis": lambda v: Ellipsis,
            "operator": lambda v: target_of_name(v, namespaces),
            "module": module,
            "enum": _read_enum,
            "pass": pass_of_name,
            "function": function_of_name,
            "data": self._read_data,
            **{kind: partial(_read_named, cls) for kind, cls in _NAMED.items()},
        }

    def read(self, value: Any) -> Any:
        """The value that was written.

        Raises:
            ArtifactError: it names something that a file may not name.
            KeyError, TypeError, ValueError: it is not what `ValueWriter` writes.
        """
        if isinstance(value, list):
            return [self.read(v) for v in value]
        if not isinstance(value, dict):
            return value
        return self._readers[value["$"]](value["v"])

    def _read_data(self, value: Any) -> Any:
        name, held = value
        cls = class_of_name(name)
        if not is_dataclass(cls):
            raise ArtifactError(f'"{name}" is no record')
        made = object.__new__(cls)
        for field in fields(cls):
            if field.name in held:
                value = self.read(held[field.name])
            elif field.default_factory is not MISSING:
                value = field.default_factory()
            else:  # a field that is newer than the file
                value = field.default
            object.__setattr__(made, field.name, value)
        return made


def _read_named(cls: type, name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, cls):
        raise ArtifactError(f'torch has no {cls.__name__} "{name}"')
    return found


def _read_enum(value: Any) -> Any:
    name, member = value
    cls = class_of_name(name)
    if not issubclass(cls, Enum):
        raise ArtifactError(f'"{name}" is no enumeration')
    return cls[member]
