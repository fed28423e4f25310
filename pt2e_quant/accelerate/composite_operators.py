"""`run_decompositions` without the search for composite operators that were found before.

torch 2.13 looks up all of its 800 composite operators in C++ once for each namespace of operators,
and gives each of some 500 a kernel for 14 keys by a function whose types are evaluated in every
call. Inside `quick_decompositions` operators are looked up once, and again where more were
registered since, and the types are not evaluated. The program that comes out is the same.

torch takes these kernels away at the end, but not if an interrupt (Ctrl-C) comes while it still
gives them: graphs of `torch.compile` would have no gradients from then on, without a word. Inside
`quick_decompositions` they are taken away then too.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch._export.utils as export_utils
import torch.export.exported_program as program_module
from torch._C import DispatchKey
from torch._ops import OperatorBase
from torch._subclasses.fake_impls import _deregister_op_impl, op_implementations_dict

from pt2e_quant.accelerate.patch import Patch, Replacement, replaced

PATCH = Patch(
    name="composite_operators",
    saves="a fifth to a third of the time of lowering a small network to a .pte or to ONNX",
    versions={"torch": "2.13"},
)

_looked_up: set[str] = set()
"""Operators that torch's namespaces have."""


def quick_decompositions() -> AbstractContextManager[None]:
    """Replace these while the block runs; a second thread waits."""
    return replaced(PATCH, _replacements)


def _replacements() -> list[Replacement]:
    look_up, py_impl = export_utils._materialize_cpp_cia_ops, OperatorBase.py_impl
    override = program_module._override_composite_implicit_decomp

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

    @contextmanager
    def override_until_left(kernels: dict[Any, Any]) -> Iterator[None]:
        before = {operator: dict(operator.py_kernels) for operator in kernels}
        rules = kernels.keys() & op_implementations_dict
        try:
            with override(kernels):
                yield
        finally:
            _restore(before, rules)

    return [
        (program_module, "_override_composite_implicit_decomp", override_until_left),
        (export_utils, "_materialize_cpp_cia_ops", look_up_new),
        (OperatorBase, "py_impl", quick_py_impl),
    ]


def _restore(before: dict[Any, dict[Any, Any]], rules: set[Any]) -> None:
    """Give operators what they had; torch has done so unless it was interrupted.

    Args:
        before: the kernels of each.
        rules: those that had a rule for fake tensors.
    """
    for operator, kernels in before.items():
        if operator.py_kernels != kernels:
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()
            if operator not in rules:
                _deregister_op_impl(operator)
