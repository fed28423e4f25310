"""Paths of the leaves in a result."""

from typing import Any

from torch.utils import _pytree as pytree


def leaf_paths(tree: Any) -> list[pytree.KeyPath] | None:
    """The path of each leaf, in order; None where a class of the tree names no parts.

    A class that was registered with `pytree.register_pytree_node` alone says how many parts it
    has, and not what they are called.
    """
    try:
        return [path for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    except ValueError:
        return None
