"""`run_decompositions` without the search for composite operators that were found before.

torch 2.13 looks up all of its 800 composite operators in C++ once for each namespace of operators,
and gives each of some 500 a kernel for 14 keys by a function whose types are evaluated in every
call. Inside `quick_decompositions` operators are looked up once, and again where more were
registered since, and the types are not evaluated. The program that comes out is the same.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._export.utils as export_utils
from torch._C import DispatchKey
from torch._ops import OperatorBase

from pt2e_quant.accelerate.patch import Patch, Replacement, replaced

PATCH = Patch(
    name="composite_operators",
    saves="a third of the time of lowering a small network to a .pte or to ONNX",
    versions={"torch": "2.13"},
)

_looked_up: set[str] = set()
"""Operators that torch's namespaces have."""


def quick_decompositions() -> AbstractContextManager[None]:
    """Replace both while the block runs; a second thread waits."""
    return replaced(PATCH, _replacements)


def _replacements() -> list[Replacement]:
    look_up, py_impl = export_utils._materialize_cpp_cia_ops, OperatorBase.py_impl

    def look_up_new() -> None:
        known = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if not _looked_up.issuperset(known):
            look_up()
            _looked_up.update(known)

    def quick_py_impl(self: Any, key: Any) -> Callable[[Any], Any]:
        # Without the types that torch's own has here: they are most of its time.
        def inner(fn):  # type: ignore[no-untyped-def]
            is_key = isinstance(key, DispatchKey) and key != DispatchKey.Python
            if not is_key or key in self.py_kernels:
                return py_impl(self, key)(fn)
            self.py_kernels[key] = fn
            self._dispatch_cache.clear()
            return fn

        return inner

    return [
        (export_utils, "_materialize_cpp_cia_ops", look_up_new),
        (OperatorBase, "py_impl", quick_py_impl),
    ]
