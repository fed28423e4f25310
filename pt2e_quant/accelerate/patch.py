"""The description of a patch of another package, and the switch that turns it off."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

VARIABLE = "PT2E_QUANT_PATCHES_OFF"
"""Environment variable: names of patches that are not to be used, with commas, or `all`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Code that changes what another package does, with the same result up to rounding.

    Args:
        name: as the switch takes it.
        saves: what it saves, and how much; `benchmarks/patches.py` measures it.
        versions: package to the version that it was tested with; it is off with any other.
    """

    name: str
    saves: str
    versions: Mapping[str, str] = field(default_factory=dict)

    def is_known_version(self) -> bool:
        """True if the installed packages are those that the patch was tested with."""
        return all(_installed(name).startswith(f"{v}.") for name, v in self.versions.items())

    def is_on(self) -> bool:
        """True if the patch is to be used: not switched off, and the versions are known."""
        off = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")}
        return not off & {self.name, "all"} and self.is_known_version()


_LOCK = threading.RLock()

Replacement = tuple[Any, str, Any]
"""A class or module, the name of what it holds itself, and what takes its place."""


@contextmanager
def replaced(patch: Patch, replacements: Callable[[], Sequence[Replacement]]) -> Iterator[None]:
    """Replace these while the block runs, if the patch is on; nothing otherwise.

    They are replaced for the whole process, so a second thread waits.
    """
    if not patch.is_on():
        yield
        return
    with _LOCK, _held(replacements()):
        yield


@contextmanager
def _held(replacements: Sequence[Replacement]) -> Iterator[None]:
    kept = [(owner, name, owner.__dict__[name]) for owner, name, _ in replacements]
    try:
        for owner, name, new in replacements:
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in kept:
            setattr(owner, name, old)


@cache
def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
