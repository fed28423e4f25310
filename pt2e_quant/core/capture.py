"""The captured call of an exported program: inputs, pytrees, dynamic dims, mutated buffers.

A `Capture` is frozen and lives in `gm.meta["pt2e_quant"]` from prepare to the artifact, so that
every later step can rebuild inputs and dynamic shapes without the user's help.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2e_quant.core.errors import InputError
from pt2e_quant.core.export_dims import AUTO, DimRange, derived_dim, dim_of
from pt2e_quant.core.input_info import InputInfo, InputKind
from pt2e_quant.core.size_expression import evaluate_size
from pt2e_quant.core.tree_specs import (
    dump_spec,
    load_result_spec,
    load_spec,
    plain_spec,
    shapes_of,
)

_TRACED_FROM_2 = (
    "export the model again with torch.export.Dim(…, min=1) there; if it was, a slice such as "
    "x[:2] has a fixed size in the program, as torch.export traces sizes from 2 on: pad the input"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The call a graph was captured with.

    Args:
        arg_names: the forward's parameter names, in order; `in_spec` has the kwargs last.
        in_spec: pytree of (args, kwargs), serialized.
        out_spec: pytree of the result, serialized.
        inputs: the leaves of the call, in order.
        dims: symbol to its range.
        mutated_buffers: names of the buffers that a call writes.
        state_shapes: shapes of these buffers, by the names that the model gives them.
    """

    arg_names: tuple[str, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    inputs: tuple[InputInfo, ...]
    dims: Mapping[str, DimRange]
    mutated_buffers: tuple[str, ...] = ()
    state_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """The leaves of a call in placeholder order, checked.

        Positional and keyword arguments may be given either way, whatever way was exported.

        Raises:
            InputError: an argument is missing, unknown, or does not fit the captured graph.
        """
        leaves = self.arrange(args, kwargs or {})
        self._check_leaves(leaves)
        self.check_indices(leaves)
        return leaves

    def check_indices(self, leaves: Sequence[Any]) -> None:
        """Refuse values with which an operator would read outside a tensor.

        Raises:
            InputError: naming the input, its values and those that it may have.
        """
        for info, leaf in zip(self.inputs, leaves, strict=True):
            info.check_indices(leaf)

    def arrange(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call in placeholder order; the leaves are not checked.

        Raises:
            InputError: an argument is missing or unknown, or its containers are not the captured.
        """
        named = self._by_name(args, kwargs)
        leaves, spec = pytree.tree_flatten(self._as_exported(named))
        if spec != self.in_spec and plain_spec(spec) != plain_spec(self.in_spec):
            raise InputError(
                f"the inputs' structure differs from the captured one: "
                f"expected {self._structure()}, found {spec}",
                fix="pass containers with the keys and lengths used in torch.export.export",
            )
        return leaves

    def positional(self, leaves: Sequence[Any]) -> list[Any]:
        """Checked leaves as the graph's forward takes them: one value per parameter name."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.in_spec)
        named = self._named(args, kwargs)
        return [named[name] for name in self.arg_names]

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        expected = f"expected ({', '.join(self.arg_names)})"
        if len(args) > len(self.arg_names):
            raise InputError(
                f"{len(args)} positional inputs for a graph of {len(self.arg_names)}: {expected}",
                fix="a tuple or list is one call's arguments: leave labels out, "
                "for example ((x,) for x, label in loader)",
            )
        named = dict(zip(self.arg_names, args, strict=False))
        if twice := named.keys() & kwargs.keys():
            raise InputError(f"input {sorted(twice)} is given twice: {expected}")
        if unknown := kwargs.keys() - set(self.arg_names):
            raise InputError(
                f"unknown input {sorted(unknown)}: {expected}",
                fix="drop it, or export the model with it",
            )
        named |= kwargs
        literals = {i.path: i.value for i in self.inputs if i.kind is InputKind.LITERAL}
        for name in self.arg_names:
            if name not in named and name in literals:
                named[name] = literals[name]
        if missing := [name for name in self.arg_names if name not in named]:
            raise InputError(
                f"missing input {missing}: {expected}, found {sorted(named)}",
                fix="a dict batch is keyword arguments, a tuple batch is positional ones",
            )
        return named

    def _as_exported(self, named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs_spec = self.in_spec.child(1)
        keywords = list(kwargs_spec.context) if kwargs_spec.num_children else []
        positional = [n for n in self.arg_names if n not in keywords]
        return tuple(named[n] for n in positional), {n: named[n] for n in keywords}

    def _structure(self) -> str:
        return ", ".join(i.path for i in self.inputs)

    def _check_leaves(self, leaves: Sequence[Any]) -> None:
        sizes: dict[str, int] = {}
        for at, (info, leaf) in enumerate(zip(self.inputs, leaves, strict=True)):
            if info.kind is InputKind.TENSOR:
                self._check_tensor(at, info, leaf, sizes)
            elif info.kind is InputKind.LITERAL and leaf != info.value:
                raise InputError(
                    f'input "{info.path}" is {leaf!r}, the graph was captured with {info.value!r}',
                    fix="export the model again with this value",
                )

    def _check_tensor(self, at: int, info: InputInfo, leaf: object, sizes: dict[str, int]) -> None:
        where = f'input "{info.path}"'
        if not isinstance(leaf, Tensor):
            raise InputError(
                f"{where} must be a tensor, found {type(leaf).__name__}",
                fix=f"torch.as_tensor({info.path})",
            )
        if leaf.layout is not torch.strided:
            layout = str(leaf.layout).removeprefix("torch.")
            raise InputError(
                f"{where} is a {layout} tensor, expected a dense one",
                fix=f"{info.path}.to_dense()",
            )
        dtype = str(leaf.dtype).removeprefix("torch.")
        if dtype != info.dtype:
            raise InputError(
                f"{where} has dtype {dtype}, the graph was captured with {info.dtype}",
                fix=f"{info.path}.to(torch.{info.dtype})",
            )
        if leaf.dim() != len(info.shape):
            raise InputError(
                f"{where} has shape {tuple(leaf.shape)}, expected {len(info.shape)} dimensions: "
                f"{_shown(info.shape)}",
                fix="give one call's inputs per batch, with the batch dimension"
                + (f": {info.path}[None]" if _has_no_batch(leaf.shape, info.shape) else ""),
            )
        turned = _channels_elsewhere(tuple(leaf.shape), info.shape)
        if turned:
            raise InputError(
                f"{where} has shape {tuple(leaf.shape)}, the graph was captured for "
                f"{_shown(info.shape)}: its channels are in another dimension",
                fix=f"{info.path}.movedim({', '.join(map(str, turned))})",
            )
        for dim, (found, expected) in enumerate(zip(leaf.shape, info.shape, strict=True)):
            self._check_size(at, info, dim, int(found), expected, sizes)

    def _check_size(
        self,
        at: int,
        info: InputInfo,
        dim: int,
        found: int,
        expected: int | str,
        sizes: dict[str, int],
    ) -> None:
        where = f'input "{info.path}" has size {found} in dimension {dim}'
        if isinstance(expected, int):
            if found != expected:
                raise InputError(
                    f"{where}, the graph was captured for exactly {expected}",
                    fix=f"torch.export.export(..., {self._dynamic_line(at, dim)})"
                    + (" with an example of size 2 or more there" if expected == 1 else ""),
                )
            return
        if expected in self.dims:
            limits = self.dims[expected]
            top = limits.maximum
            if found < limits.minimum or (top is not None and found > top):
                raise InputError(
                    f"{where}, the graph was captured for {limits.minimum} to {top or 'any'}",
                    fix=_TRACED_FROM_2
                    if found == 1 and limits.minimum == 2
                    else "export the model again with a wider torch.export.Dim range there",
                )
            if found % limits.multiple:
                raise InputError(
                    f"{where}, which is not a multiple of {limits.multiple}",
                    fix="torch.export took only such sizes for a Dim.AUTO: pad the input, or "
                    "export the model with operators that take every size",
                )
            if sizes.setdefault(expected, found) != found:
                raise InputError(
                    f"{where}, but another input has {sizes[expected]} in the dimension "
                    f"that must be equal ({expected})",
                )
            return
        wanted = evaluate_size(expected, sizes)
        if wanted is not None and wanted != found:
            raise InputError(f"{where}, expected {expected} = {wanted}")

    def _dynamic_line(self, at: int, dim: int) -> str:
        """The `dynamic_shapes=` argument that makes one more dimension dynamic."""
        specs: list[Any] = []
        for i, info in enumerate(self.inputs):
            dims = {d: AUTO for d, s in enumerate(info.shape) if isinstance(s, str)}
            if i == at:
                dims[dim] = AUTO
            specs.append(dims or None)
        args, kwargs = pytree.tree_unflatten(specs, self.in_spec)
        named = self._named(args, kwargs)
        return f"dynamic_shapes={named!r}"

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        positional = [n for n in self.arg_names if n not in kwargs]
        return dict(zip(positional, args, strict=True)) | dict(kwargs)

    def example_inputs(self, *, larger: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of zeros at the sample's sizes, or at about four times these."""
        hints = {symbol: limits.hint for symbol, limits in self.dims.items()}
        if larger:
            hints = {n: self.dims[n].up_to(4 * hint + 3) for n, hint in hints.items()}
        leaves: list[Any] = []
        for info in self.inputs:
            if info.kind is InputKind.TENSOR:
                shape = [
                    s if isinstance(s, int) else evaluate_size(s, hints) or 1 for s in info.shape
                ]
                dtype = getattr(torch, info.dtype)
                leaves.append(torch.zeros(shape, dtype=dtype, device=info.device))
            elif info.kind is InputKind.SYMBOL:
                leaves.append(evaluate_size(str(info.value), hints) or 1)
            else:
                leaves.append(info.value)
        args, kwargs = pytree.tree_unflatten(leaves, self.in_spec)
        return args, kwargs

    def dynamic_shapes(self, *, is_loose: bool = False) -> dict[str, Any] | None:
        """The `dynamic_shapes=` of torch.export.export that keeps every dynamic dim, or None.

        Args:
            is_loose: torch may take a part of a range for the whole, where one operator needs it.
        """
        if not self.dims:
            return None
        dims = {
            # torch has no Dim of one size: that is a fixed one.
            symbol: None if limits.minimum == limits.maximum else dim_of(symbol, limits, is_loose)
            for symbol, limits in self.dims.items()
        }
        specs = (self._dims_of(info, dims) for info in self.inputs)
        args, kwargs = shapes_of(self.in_spec, specs)
        return self._named(args, kwargs)

    def _dims_of(self, info: InputInfo, dims: Mapping[str, Any]) -> Any:
        if info.kind is InputKind.SYMBOL:
            return torch.export.Dim.AUTO
        if info.kind is InputKind.LITERAL:
            return None
        return {
            at: dims[size] if size in dims else derived_dim(size, dims)
            for at, size in enumerate(info.shape)
            if isinstance(size, str)
        } or None

    def unflatten_output(self, leaves: Sequence[Any]) -> Any:
        """The float module's own result structure around flat outputs."""
        return pytree.tree_unflatten(list(leaves), self.out_spec)

    def to_json(self) -> str:
        """The capture as one line of JSON, for keeping inside a file."""
        return json.dumps(
            {
                "arg_names": self.arg_names,
                "in_spec": dump_spec(self.in_spec),
                "out_spec": dump_spec(self.out_spec),
                "inputs": [i.to_json() for i in self.inputs],
                "dims": {symbol: asdict(limits) for symbol, limits in self.dims.items()},
                "mutated_buffers": self.mutated_buffers,
                "state_shapes": self.state_shapes,
            }
        )

    @staticmethod
    def from_json(text: str) -> "Capture":
        """Read what `to_json` wrote.

        Raises:
            InputError: the text is not a capture.
        """
        try:
            data = json.loads(text)
            return Capture(
                arg_names=tuple(data["arg_names"]),
                in_spec=load_spec(data["in_spec"]),
                out_spec=load_result_spec(data["out_spec"]),
                inputs=tuple(map(InputInfo.from_json, data["inputs"])),
                dims={symbol: DimRange(**limits) for symbol, limits in data["dims"].items()},
                mutated_buffers=tuple(data["mutated_buffers"]),
                state_shapes={name: tuple(s) for name, s in data["state_shapes"].items()},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"this is not the description of a captured call: {error}") from error


def _channels_elsewhere(found: Sequence[int], expected: Sequence[int | str]) -> tuple[int, ...]:
    """The `movedim` after which sizes fit that do not: channels last to first, or the other way."""
    moves = ((-1, 1), (1, -1)) if len(found) > 2 else ()
    if _fits(found, expected):
        return ()
    for source, target in moves:
        sizes = list(found)
        sizes.insert(target if target > 0 else len(sizes), sizes.pop(source))
        if _fits(sizes, expected):
            return source, target
    return ()


def _has_no_batch(found: Sequence[int], expected: Sequence[int | str]) -> bool:
    return len(found) + 1 == len(expected) and _fits((1, *found), expected)


def _fits(found: Sequence[int], expected: Sequence[int | str]) -> bool:
    pairs = zip(found[1:], expected[1:], strict=True)  # a batch of another size is said next
    return all(isinstance(size, str) or size == own for own, size in pairs)


def _shown(shape: Sequence[int | str]) -> str:
    return "(" + ", ".join(str(s) for s in shape) + ")"
