"""The project's errors: what is wrong, where, and the fix.

The facts about a node (module path, source line) are read from the node by the error
itself, so every caller gives the node and nothing else.
"""

import difflib
import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TypeVar

import torch
from torch.fx import Node

Kind = TypeVar("Kind", bound=Enum)

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in \S+\n\s*(?P<code>[^\n]*)')
_TORCH = str(Path(torch.__file__).parent).replace("\\", "/") + "/"
"""The folder of torch's own files, which are not the user's model: `linear.py` of `nn.Linear`."""


def module_path(node: Node) -> str:
    """The dotted path of the module that a node was traced in, "" at the root or if unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return str(path).removeprefix("L['self']").removeprefix(".")


def module_type(node: Node) -> str:
    """The name of the class of the module that a node was traced in, "" if unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    _, kind = list(stack.values())[-1]
    return (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[-1]


def source_line(node: Node) -> str:
    """The user's source line for a node, "file:line  code", "" if the node carries no trace.

    It is the innermost line outside of torch; torch's own where there is no other.
    """
    trace = node.meta.get("stack_trace")
    found = _FRAME.finditer(trace) if isinstance(trace, str) else ()
    # "<eval_with_key>" is code that torch wrote, a line for each body of control flow.
    frames = [f for f in found if not f["file"].startswith("<")]
    if not frames:
        return ""
    frame = next((f for f in reversed(frames) if not _is_of_torch(f["file"])), frames[-1])
    file = frame["file"].replace("\\", "/").rsplit("/", 1)[-1]
    return f"{file}:{frame['line']}  {frame['code'].strip()}"


def _is_of_torch(file: str) -> bool:
    """True if a source file is torch's, of this installation or of the one that captured."""
    path = file.replace("\\", "/")
    return path.startswith(_TORCH) or "-packages/torch/" in path


def near(name: object, known: Iterable[str]) -> str:
    """A phrase that offers the known names nearest to an unknown one.

    What is no text is near to none.

    >>> near("xnpack", ["xnnpack", "onnx"])
    'did you mean "xnnpack"? known: onnx, xnnpack'
    """
    names = sorted({*known} - {""})
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = "did you mean " + " or ".join(f'"{c}"' for c in close) + "? " if close else ""
    shown = names[:20]
    more = f", … ({len(names) - 20} more)" if len(names) > 20 else ""
    return f"{hint}known: {', '.join(shown) or 'none'}{more}"


def member_named(kinds: type[Kind], name: str, what: str) -> Kind:
    """The member of an enum that has a value; a member is returned as it is.

    Args:
        kinds: the enum.
        name: the value.
        what: the word for one of them, for the error.

    Raises:
        ConfigError: there is none; near names are offered.
    """
    try:
        return kinds(name)
    except ValueError as error:
        known = [str(kind.value) for kind in kinds]
        raise ConfigError(f'there is no {what} "{name}": {near(name, known)}') from error


class Pt2eQuantWarning(UserWarning):
    """Something the user can change, said once."""


class Pt2eQuantError(Exception):
    """The base of every error this package raises.

    Args:
        what: what is wrong, in one sentence, with the value expected and the value found.
        node: the graph node it is about; its name, module path and source line are added.
        rule: the rule or op-table entry that was being applied.
        fix: what the user can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        node: Node | None = None,
        rule: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        # Names only: an error must not keep a whole graph alive, and must pickle.
        self.node_name = node.name if node is not None else None
        self.rule = rule
        self.fix = fix
        super().__init__("\n".join([what, *self._facts(node)]))

    def _facts(self, node: Node | None) -> list[str]:
        lines: list[tuple[str, str | None]] = [("rule", self.rule)]
        if node is not None:
            lines += [
                ("node", f"{node.name} ({node.target})"),
                ("module", module_path(node) or None),
                ("source", source_line(node) or None),
            ]
        lines.append(("fix", self.fix))
        return [f"  {label:<7} {text}" for label, text in lines if text]


class UnsupportedError(Pt2eQuantError):
    """A graph, an operator or a scheme that a part cannot take."""


class AnnotationError(Pt2eQuantError):
    """An annotation, or a rule that makes one, that cannot be carried out."""


class CalibrationError(Pt2eQuantError):
    """Calibration data that is missing or unusable (NaN, inf, an observer that saw nothing)."""


class InputError(Pt2eQuantError):
    """An input that the captured graph cannot take."""


class ConfigError(Pt2eQuantError):
    """An unknown or contradictory name, option or file of settings."""


class ArgumentError(ConfigError, ValueError):
    """An argument that torchao's PT2E refuses by a ValueError: scripts catch that."""


class RangeError(ConfigError, AssertionError):
    """A range of integers that torchao's PT2E refuses by an AssertionError."""


class SchemeError(ConfigError, NotImplementedError):
    """A scheme that torchao's PT2E refuses by a NotImplementedError."""


class OverwrittenError(AnnotationError, RuntimeError):
    """An annotation that replaces another, which torchao's PT2E refuses by a RuntimeError."""


class InvariantError(Pt2eQuantError):
    """A graph that breaks a contract between parts."""


class ArtifactError(Pt2eQuantError):
    """A file that cannot be read or written, or an artifact that fails its check."""


class MissingExtraError(Pt2eQuantError):
    """A backend whose optional dependency is not installed.

    Args:
        extra: the extra of this package that brings it.
        package: the import that failed.
    """

    def __init__(self, extra: str, package: str) -> None:
        self.extra = extra
        self.package = package
        super().__init__(
            f'the package "{package}" is not installed',
            fix=f"pip install 'pt2e-quant[{extra}]'",
        )

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Pickle by the two arguments, not by the message."""
        return (type(self), (self.extra, self.package))
