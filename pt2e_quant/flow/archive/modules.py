"""Observers, fake-quantizes and other modules of this package as JSON, and back."""

from typing import Any

import torch
from torch import Tensor, nn

from pt2e_quant.core.errors import ArtifactError, UnsupportedError
from pt2e_quant.flow.archive.allowed import class_of_name, is_identifier, name_of_class
from pt2e_quant.flow.archive.values import ValueReader, ValueWriter

_OF_TORCH = frozenset(vars(nn.Module()))
"""Torch's own attributes of modules: tables, written one by one, and hooks, which are not."""


class ModuleWriter:
    """Numbers modules; each is written once, also where several name it."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._numbers: dict[int, int] = {}
        self._names: dict[int, str] = {}

    def name(self, module: nn.Module, path: str) -> None:
        """Say where a module stands, for the names of its tensors."""
        self._names[id(module)] = path

    def number(self, module: nn.Module, values: ValueWriter) -> int:
        """The number of a module, which is written if it is new.

        Raises:
            UnsupportedError: its class is not of this package, or a file cannot hold its state.
        """
        if id(module) in self._numbers:
            return self._numbers[id(module)]
        path = self._names.get(id(module), type(module).__name__)
        entry: dict[str, Any] = {"class": name_of_class(type(module))}
        self._numbers[id(module)] = len(self.entries)
        self.entries.append(entry)
        entry["training"] = module.training
        entry["parameters"] = {
            n: _parameter(p, values, f"{path}.{n}") for n, p in module._parameters.items()
        }
        entry["buffers"] = {
            n: None if b is None else values.tensors.add(b, f"{path}.{n}")
            for n, b in module._buffers.items()
        }
        entry["transient"] = sorted(module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            if child is not None:
                self.name(child, f"{path}.{name}")
        entry["modules"] = {
            n: None if m is None else self.number(m, values) for n, m in module._modules.items()
        }
        entry["state"] = {
            n: _state(v, values, f"{path}.{n}")
            for n, v in vars(module).items()
            if n not in _OF_TORCH
        }
        return self._numbers[id(module)]


def _parameter(value: Tensor | None, values: ValueWriter, name: str) -> list[Any] | None:
    return None if value is None else [values.tensors.add(value, name), value.requires_grad]


def _state(value: Any, values: ValueWriter, name: str) -> Any:
    try:
        return values.write(value, name)
    except UnsupportedError as error:
        raise UnsupportedError(f'"{name}" cannot be saved: {error.what}', fix=error.fix) from error


class ModuleReader:
    """Makes modules by number, each once."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self._entries = entries
        self._made: dict[int, nn.Module] = {}

    def get(self, number: int, values: ValueReader) -> nn.Module:
        """The module of a number.

        Raises:
            ArtifactError: it is of a class that a file may not name.
        """
        if number in self._made:
            return self._made[number]
        entry = self._entries[number]
        cls = class_of_name(entry["class"])
        if not issubclass(cls, nn.Module):
            raise ArtifactError(f'"{entry["class"]}" is no module')
        # Not through __init__: the state is all that it would make, and what came of it.
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        self._made[number] = module
        module.training = bool(entry["training"])
        for name, held in entry["parameters"].items():
            module._parameters[_checked(name)] = parameter_of(held, values)
        for name, held in entry["buffers"].items():
            # A clone: observers resize their buffers, which a mapped file cannot.
            buffer = None if held is None else values.tensors.get(held).clone()
            module.register_buffer(
                _checked(name), buffer, persistent=name not in entry["transient"]
            )
        for name, held in entry["modules"].items():
            module._modules[_checked(name)] = None if held is None else self.get(held, values)
        for name, held in entry["state"].items():
            if name in _OF_TORCH:
                raise ArtifactError(f'a file may not set "{name}" of a module')
            vars(module)[_checked(name)] = values.read(held)
        return module


def parameter_of(held: list[Any] | None, values: ValueReader) -> nn.Parameter | None:
    """A parameter of its tensor's number and whether it is trained."""
    if held is None:
        return None
    number, requires_grad = held
    with torch.no_grad():
        return nn.Parameter(values.tensors.get(number), requires_grad=bool(requires_grad))


def _checked(name: str) -> str:
    # The children of a Sequential or ModuleList are named by number.
    if not is_identifier(name) and not name.isdecimal():
        raise ArtifactError(f'"{name}" is no name of an attribute')
    return name
