"""Structures of results whose class is not imported, read as plain dicts and tuples."""

import json
import warnings
from typing import Any

from torch.utils import _pytree as pytree

from pt2e_quant.core.errors import Pt2eQuantWarning

_NAMED_TUPLE = "collections.namedtuple"


def load_result_spec(text: str) -> pytree.TreeSpec:
    """The structure that `pytree.treespec_dumps` wrote; a class that is not imported is a dict.

    Reading a file imports no code, so that the class of a Hugging Face result is known only where
    the caller has imported it. Its fields keep their names where its structure says them (those of
    `ModelOutput` and of registered dataclasses), else they are a tuple. Fields that were None when
    the model was captured are not there.

    Warns:
        Pt2eQuantWarning: naming the class, where one is replaced.
    """
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError:  # torch's word for a class it does not know
        version, tree = json.loads(text)
        missing: set[str] = set()
        spec = pytree.treespec_loads(json.dumps([version, _plain(tree, missing)]))
    named = ", ".join(sorted(missing))
    warnings.warn(
        f"results are given as plain dicts and tuples: the class {named} is not imported; "
        f"import {sorted(missing)[0].rpartition('.')[0]} before the file is loaded to get it",
        Pt2eQuantWarning,
        stacklevel=2,
    )
    return spec


def _plain(tree: dict[str, Any], missing: set[str]) -> dict[str, Any]:
    made = dict(tree)
    made["children_spec"] = [_plain(child, missing) for child in tree["children_spec"]]
    known = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    name = tree["type"]
    if name == _NAMED_TUPLE:
        name = json.loads(tree["context"])
    if name is None or name in known:
        return made
    missing.add(str(name))
    keys = _field_names(tree["context"], len(made["children_spec"]))
    made["type"] = "builtins.tuple" if keys is None else "builtins.dict"
    made["context"] = json.dumps(keys)
    return made


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
