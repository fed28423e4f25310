"""Names to backends, imported when first asked for; third parties add theirs by entry point."""

from importlib import import_module
from importlib.metadata import entry_points

from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.core.errors import ConfigError, near

_GROUP = "pt2e_quant.backends"
OWN = {
    "xnnpack": "pt2e_quant.backends.xnnpack.backend",
    "onnx": "pt2e_quant.backends.onnx.backend",
    "cpu": "pt2e_quant.backends.cpu.backend",
    "cuda": "pt2e_quant.backends.cuda.backend",
}
"""The backends of this package: name to module."""
_SUFFIXES = {".pte": "xnnpack", ".onnx": "onnx", ".qpt2": "cpu", ".qcuda": "cuda"}
"""Suffixes of files to own backends: opening a file imports one backend alone."""


def names() -> tuple[str, ...]:
    """The backends there are, installed extras or not, sorted."""
    return tuple(sorted({*OWN, *(e.name for e in entry_points(group=_GROUP))}))


def suffixes() -> tuple[str, ...]:
    """The endings of the files that backends write, sorted."""
    return tuple(sorted({*_SUFFIXES, *(get(name).suffix for name in _others())}))


def name_for_suffix(suffix: str) -> str | None:
    """The name of the backend that writes files of an ending, None if there is none."""
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    return next((name for name in _others() if get(name).suffix == suffix), None)


def _others() -> list[str]:
    """The backends whose suffix only they themselves say."""
    return [name for name in names() if name not in _SUFFIXES.values()]


def get(name: str) -> Backend:
    """The backend of a name.

    Raises:
        ConfigError: there is none; near names are offered.
    """
    if name in OWN:
        found = import_module(OWN[name]).BACKEND
    else:
        for entry in entry_points(group=_GROUP, name=name):
            found = entry.load()
            break
        else:
            raise ConfigError(f'there is no backend "{name}": {near(name, names())}')
    if not isinstance(found, Backend):
        raise ConfigError(f'the entry point of backend "{name}" is no Backend: {found!r}')
    return found
