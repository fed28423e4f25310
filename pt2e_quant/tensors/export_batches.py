"""Export a module for the graph flow's algorithms, at the sizes of all calibration batches."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from pt2e_quant.core.export import export
from pt2e_quant.flow.calibrate.pick_inputs import as_call
from pt2e_quant.tensors.run_batches import run_call

Call = tuple[Sequence[Any], Mapping[str, Any]]


def export_batches(module: nn.Module, batches: Sequence[Any]) -> ExportedProgram:
    """The exported program of a module in eval mode, whose sizes that batches differ in are free.

    Args:
        module: it; its modes stay as they are.
        batches: at least one.

    Raises:
        InputError: the module fails on a batch; one batch of each kind is tried.
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        calls = _one_of_each_kind(module, batches)
        shapes = _free_sizes(module, calls)
        # A size of 1 would be taken for a constant.
        args, kwargs = calls[0] if shapes is None else max(calls, key=_elements)
        return export(module, tuple(args), dict(kwargs), dynamic_shapes=shapes)
    finally:
        for part, is_training in modes.items():
            part.training = is_training


def _one_of_each_kind(module: nn.Module, batches: Sequence[Any]) -> list[Call]:
    """One call for each combination of shapes and dtypes, which the module runs."""
    found: dict[object, Call] = {}
    for number, batch in enumerate(batches):
        args, kwargs = as_call(batch)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        kind = (str(spec), *((tuple(x.shape), x.dtype) for x in leaves if isinstance(x, Tensor)))
        if kind not in found:
            run_call(module, args, kwargs, f"calibration batch {number}")
            found[kind] = args, kwargs
    return list(found.values())


def _elements(call: Call) -> int:
    return sum(x.numel() for x in pytree.tree_leaves(call) if isinstance(x, Tensor))


def _free_sizes(module: nn.Module, calls: Sequence[Call]) -> dict[str, Any] | None:
    """`dynamic_shapes` of the sizes in which calls differ; None if they differ in none."""
    signature = inspect.signature(module.forward)
    given = [dict(signature.bind(*args, **kwargs).arguments) for args, kwargs in calls]
    flat = [pytree.tree_flatten(arguments) for arguments in given]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        return None
    free = [_free(values) for values in zip(*(leaves for leaves, _ in flat), strict=True)]
    if not any(free):
        return None
    made: dict[str, Any] = pytree.tree_unflatten(free, spec)
    return made


def _free(values: Sequence[Any]) -> dict[int, Any] | None:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) != len(values) or len({tensor.dim() for tensor in tensors}) != 1:
        return None
    sizes = zip(*(tensor.shape for tensor in tensors), strict=True)
    return {axis: Dim.AUTO for axis, own in enumerate(sizes) if len(set(own)) > 1} or None
