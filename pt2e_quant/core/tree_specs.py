"""Structures of arguments and results as text, for readers that may lack their classes.

A class that has a `serialized_type_name` is written as `pytree.treespec_dumps` does. Any other that
`torch.export` takes (a namedtuple, `torch.return_types.max`, a class of `register_pytree_node`) is
written by its module and name, and found again where its module is imported.
"""

import collections
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any, cast

from torch.utils import _pytree as pytree

from pt2e_quant.core.errors import InputError, Pt2eQuantWarning

_NAMED_TUPLE = "collections.namedtuple"
_KNOWN_TO_TORCH = ("builtins", "collections", "torch")
"""The packages of classes that every process with torch has."""
_FORM = "form"
"""The key beside torch's own of a class without a serialized name."""


def dump_spec(spec: pytree.TreeSpec) -> str:
    """A structure as JSON.

    Raises:
        InputError: what a class says of itself beside its parts is no JSON.
    """
    try:
        return pytree.treespec_dumps(spec)
    except NotImplementedError:  # torch's word for a class without a serialized name
        return json.dumps([1, _written(spec)])


def plain_spec(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """The structure with dicts (of named fields) and tuples for classes that torch has not."""
    if spec.is_leaf():
        return spec
    parts = [plain_spec(child) for child in spec.children()]
    text = _torch_text(spec)
    if text is None:
        return pytree.TreeSpec(tuple, None, parts)
    if spec.type.__module__.partition(".")[0] in _KNOWN_TO_TORCH:
        return pytree.TreeSpec(spec.type, spec.context, parts)
    keys = _field_names(json.loads(text)[1]["context"], len(parts))
    return pytree.TreeSpec(tuple if keys is None else dict, keys, parts)


def _torch_text(spec: pytree.TreeSpec) -> str | None:
    """Torch's text for a structure's outermost class; None if it has no serialized name."""
    try:
        alone = spec if spec.is_leaf() else pytree.TreeSpec(spec.type, spec.context, [])
        return pytree.treespec_dumps(alone)
    except NotImplementedError:
        return None


def _written(spec: pytree.TreeSpec) -> dict[str, Any]:
    parts = [_written(child) for child in spec.children()]
    text = _torch_text(spec)
    if text is not None:
        return {**json.loads(text)[1], "children_spec": parts}
    is_tuple = spec.type is collections.namedtuple
    kind = spec.context if is_tuple else spec.type
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        context = json.dumps(kind._fields if is_tuple else spec.context)
    except TypeError as error:
        raise InputError(
            f"the structure of {name} cannot be written to a file: {error}",
            fix="register the class with serialized_type_name=, to_dumpable_context= and "
            "from_dumpable_context=, or return a dict or a tuple",
        ) from error
    form = "namedtuple" if is_tuple else "node"
    return {"type": name, "context": context, "children_spec": parts, _FORM: form}


def load_spec(text: str) -> pytree.TreeSpec:
    """The structure of a call that `dump_spec` wrote; a class without a name may be a tuple.

    Raises:
        InputError: it holds a class with a serialized name that is not imported.
    """
    spec, missing = _read(text)
    named = sorted(name for name, is_named in missing.items() if is_named)
    if named:
        raise InputError(
            f"the call holds a class that is not imported: {named[0]}",
            fix=f"import {named[0].rpartition('.')[0]} before the file is loaded",
        )
    return spec


def load_result_spec(text: str) -> pytree.TreeSpec:
    """The structure that `dump_spec` wrote; a class that is not imported is a dict or a tuple.

    Reading a file imports no code, so that the class of a Hugging Face result is known only where
    the caller has imported it. Its fields keep their names where its structure says them (those of
    `ModelOutput` and of registered dataclasses; a namedtuple becomes one like it), else they are a
    tuple. Fields that were None when the model was captured are not there.

    Warns:
        Pt2eQuantWarning: naming the class, where one is replaced.
    """
    spec, missing = _read(text)
    if missing:
        names = sorted(missing)
        warnings.warn(
            f"results are given as plain dicts and tuples: the class {', '.join(names)} is not "
            f"imported; import {names[0].rpartition('.')[0]} before the file is loaded to get it",
            Pt2eQuantWarning,
            stacklevel=2,
        )
    return spec


def _read(text: str) -> tuple[pytree.TreeSpec, dict[str, bool]]:
    """A structure, and the classes that are not imported: whether they have serialized names."""
    try:
        return pytree.treespec_loads(text), {}
    except NotImplementedError:  # torch's word for a class it does not know
        version, tree = json.loads(text)
    missing: dict[str, bool] = {}
    plain = pytree.treespec_loads(json.dumps([version, _plain(tree, missing)]))
    return _with_classes(plain, tree), missing


def _plain(tree: dict[str, Any], missing: dict[str, bool]) -> dict[str, Any]:
    """The tree with tuples and dicts in place of classes that torch does not know."""
    made = dict(tree)
    made["children_spec"] = [_plain(child, missing) for child in tree["children_spec"]]
    name = tree["type"]
    if name == _NAMED_TUPLE:
        name = json.loads(tree["context"])
    if name is None or name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        return made
    keys = None
    if _FORM not in tree:
        keys = _field_names(tree["context"], len(made["children_spec"]))
    if _class_of(tree) is None:
        missing[str(name)] = _FORM not in tree
    made["type"] = "builtins.tuple" if keys is None else "builtins.dict"
    made["context"] = json.dumps(keys)
    return made


def _with_classes(plain: pytree.TreeSpec, tree: dict[str, Any]) -> pytree.TreeSpec:
    """The structure with the classes without a serialized name in place of tuples."""
    if plain.is_leaf():
        return plain
    pairs = zip(plain.children(), tree["children_spec"], strict=True)
    parts = [_with_classes(child, written) for child, written in pairs]
    kind = _class_of(tree)
    if kind is None:
        return pytree.TreeSpec(plain.type, plain.context, parts)
    if tree[_FORM] == "namedtuple":
        return pytree.TreeSpec(collections.namedtuple, kind, parts)
    return pytree.TreeSpec(kind, json.loads(tree["context"]), parts)


def _class_of(tree: dict[str, Any]) -> type | None:
    """The imported class that was written without a serialized name; a namedtuple may be made."""
    name = str(tree["type"])
    if tree.get(_FORM) == "node":
        known = {f"{k.__module__}.{k.__qualname__}": k for k in pytree.SUPPORTED_NODES}
        return known.get(name)
    if tree.get(_FORM) != "namedtuple":
        return None
    fields = tuple(json.loads(tree["context"]))
    found = _imported(name)
    if pytree.is_namedtuple_class(found) and found._fields == fields:
        return cast(type, found)
    return collections.namedtuple(name.rpartition(".")[2], fields)


def _imported(name: str) -> Any:
    """The object of a dotted name in the imported modules, None if there is none."""
    path, _, rest = name.partition(".")
    value: Any = sys.modules.get(path)
    while rest and value is not None:
        part, _, rest = rest.partition(".")
        path = f"{path}.{part}"
        value = getattr(value, part, None) or sys.modules.get(path)
    return value


def _field_names(context: str | None, count: int) -> list[str] | None:
    """The names of a class's parts, where its context is a list of them; None if it is not."""
    try:
        found = json.loads(context) if context is not None else None
    except ValueError:
        return None
    if isinstance(found, list) and len(found) == 2 and all(isinstance(f, list) for f in found):
        found = found[0]  # a registered dataclass: names of the fields, names of those at None
    if not isinstance(found, list) or len(found) != count:
        return None
    return [str(key) for key in found] if all(isinstance(key, str) for key in found) else None


def shapes_of(spec: pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
    """The shapes of a call's leaves, in its structure; torch takes a list for a user's class."""
    if spec.is_leaf():
        return next(leaves)
    parts = [shapes_of(child, leaves) for child in spec.children()]
    if spec.type not in pytree.BUILTIN_TYPES:
        return parts
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context)
