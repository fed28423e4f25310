"""Regions of a prepared graph that have an integer form, and what they give on tensors.

A quantize of a real value is a region too: a target may divide where fake-quantize multiplies by
the inverse. A region is plain data, written as text: the operator of its forward pass takes that
text, so that copies, pickles and compiled graphs hold no state of their own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.accelerate.exact_products import exact_product, sums_rows
from pt2e_quant.core.integer_ops.calls import compute, out_dtype
from pt2e_quant.core.integer_ops.profiles import (
    Addition,
    Averaging,
    Bias,
    Functions,
    Profile,
    Quantization,
    Requantization,
    RowQuantization,
)
from pt2e_quant.core.integer_ops.quantize import quantize
from pt2e_quant.core.integer_ops.requantize import output_range
from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.core.qparams import QParams
from pt2e_quant.passes.reference.forms.moves import BOOLEANS, INTEGERS
from pt2e_quant.passes.reference.forms.registry import FORMS, REQUANTIZE
from pt2e_quant.passes.reference.forms.site import (
    DEFAULT_ARITHMETIC,
    Arithmetic,
    Declined,
    IntegerForm,
    Operand,
    Output,
    Overflow,
    Site,
)
from pt2e_quant.passes.reference.read_sites import FoundSite, arguments_of, find_sites
from pt2e_quant.passes.reference.reference_template import ReferenceTemplate, TrainedTensor

_FORMS = {form.name: form for form in (*FORMS, REQUANTIZE, BOOLEANS, INTEGERS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRegion:
    """A region and where it is in the prepared graph; all by names of nodes.

    Args:
        name: of its operator.
        text: the region.
        end: the node of its result in real units.
        inputs: what it reads: fake-quantized tensors first, then others.
        observers: the fake-quantizes of what it reads, then of its result.
        has_form: whether it is an operator with an integer form; else a quantize.
        norms: targets of the batch norms that are folded into it.
        rounded: for each of the others, the target of what convert rounds it by, None if nothing.
        behind_dropout: whether it reads a dropout, which it has integers for in inference only.
        covers: the operators that it computes: its own, a clamp behind, a sum with a mask in front.
    """

    name: str
    text: str
    end: str
    inputs: tuple[str, ...]
    observers: tuple[str, ...]
    has_form: bool
    norms: tuple[str, ...]
    rounded: tuple[str | None, ...]
    behind_dropout: bool
    covers: frozenset[str] = frozenset()


def find_regions(template: ReferenceTemplate) -> list[FoundRegion]:
    """Every operator of a template with an integer form, and other quantizes, in graph order."""
    sites = {site.anchor: site for site in find_sites(template.gm)}
    found = (_region(template, node, sites.get(node)) for node in template.gm.graph.nodes)
    return [region for region in found if region is not None]


def _region(template: ReferenceTemplate, node: Node, site: FoundSite | None) -> FoundRegion | None:
    region = None if site is None else _Writer(template).region(site)
    tensor = template.tensors.get(node)
    if region is None and tensor is not None and is_quantize(node):
        return _Writer(template).written(tensor.observer, _QUANTIZE, tensor.observer, tensor)
    return region


_QUANTIZE: dict[str, Any] = {"form": None, "target": [], "arguments": {}, "bounds": [None, None]}
"""The fields that the region of a quantize has in the place of an operator's."""


class _Writer:
    """Writes one site as text."""

    def __init__(self, template: ReferenceTemplate) -> None:
        self.template = template
        self.tensors: list[TrainedTensor] = []
        self.others: list[Node] = []

    def region(self, site: FoundSite) -> FoundRegion | None:
        """The region, None if it reads what training cannot hand to it."""
        template = self.template
        given = {"self": site.op} if site.form is REQUANTIZE else arguments_of(site.op)
        try:
            written = {name: self._written(value) for name, value in given.items()}
        except _NoRegionError:
            return None
        output = None if site.quantize is None else template.tensors.get(site.quantize)
        if site.quantize is not None and output is None:
            return None
        end = template.sources[site.op] if output is None else output.observer
        row = {
            "form": site.form.name,
            "target": [] if site.form is REQUANTIZE else _path(site.op.target),
            "arguments": written,
            "bounds": site.bounds,
        }
        norms = tuple(n for node, n in template.norms.items() if node is site.op)
        name = end if site.form is REQUANTIZE else site.op.name
        found = self.written(name, row, end, output, norms)
        nodes = (*site.covered, site.anchor)
        drops = not template.behind_dropout.isdisjoint(nodes)
        covers = frozenset(template.sources[n] for n in nodes if n in template.sources)
        return replace(found, behind_dropout=drops, covers=covers)

    def written(
        self,
        name: str,
        row: dict[str, Any],
        end: str,
        output: TrainedTensor | None,
        norms: tuple[str, ...] = (),
    ) -> FoundRegion:
        """A region of these tensors whose operator is a row."""
        named = [tensor.observer for tensor in self.tensors]
        text = {
            **row,
            "name": name,
            "operands": [_row(tensor) for tensor in self.tensors],
            "output": None if output is None else _row(output),
            "profile": asdict(DEFAULT_ARITHMETIC.profile),
            "accumulator_bits": DEFAULT_ARITHMETIC.accumulator_bits,
        }
        return FoundRegion(
            name=name,
            text=json.dumps(text),
            end=end,
            inputs=(*named, *(self.template.sources[node] for node in self.others)),
            observers=(*named, *([] if output is None else [output.observer])),
            has_form=row["form"] is not None,
            norms=norms,
            rounded=tuple(self.template.rounded.get(node) for node in self.others),
            behind_dropout=False,
        )

    def _written(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._written(v) for v in value]
        if isinstance(value, Node):
            return self._written_node(value)
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise _NoRegionError

    def _written_node(self, node: Node) -> dict[str, int]:
        source = node.args[0] if is_dequantize(node) else None
        if isinstance(source, Node):
            tensor = self.template.tensors.get(source)
            if tensor is None:
                raise _NoRegionError
            if tensor not in self.tensors:
                self.tensors.append(tensor)
            return {"operand": self.tensors.index(tensor)}
        value = node.meta.get("val")
        is_constant = node.op == "get_attr"
        # The integer reference declines float values that are computed at run time.
        if not isinstance(value, Tensor) or (value.is_floating_point() and not is_constant):
            raise _NoRegionError
        if node not in self.others:
            self.others.append(node)
        return {"other": self.others.index(node)}


class _NoRegionError(Exception):
    """A site reads what a region cannot: a symbolic size, float values of run time."""


def _path(target: Any) -> list[str]:
    return [*target._schema.name.split("::"), target._overloadname]


def _row(tensor: TrainedTensor) -> dict[str, Any]:
    return {
        "limits": list(tensor.limits),
        "dtype": str(tensor.storage).removeprefix("torch."),
        "axis": tensor.axis,
        "is_constant": tensor.codes.op == "get_attr",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Integers:
    """The qparams and storage of the integers of one tensor."""

    limits: tuple[int, int]
    dtype: torch.dtype
    axis: int | None
    is_constant: bool

    @staticmethod
    def of(row: Mapping[str, Any]) -> "_Integers":
        return _Integers(
            limits=tuple(row["limits"]),
            dtype=getattr(torch, row["dtype"]),
            axis=row["axis"],
            is_constant=row["is_constant"],
        )

    def qparams(self, scale: Tensor, zero_point: Tensor) -> QParams:
        return QParams(
            scale=scale.float().reshape(-1),
            zero_point=zero_point.to(torch.int32).reshape(-1),
            quant_min=self.limits[0],
            quant_max=self.limits[1],
            dtype=self.dtype,
            axis=self.axis,
        )

    def operand(self, value: Tensor, scale: Tensor, zero_point: Tensor) -> Operand[Tensor]:
        """The integers that a fake-quantized value stands for."""
        qparams = self.qparams(scale, zero_point)
        scale, zero = _broadcast(qparams, value.dim())
        # Exact: a multiple of the scale, whose quotient is within rounding of an integer.
        steps = value.float().div(scale).round_().add_(zero).clamp_(*self.limits)
        codes = steps.to(self.dtype)
        return Operand(value=codes, like=codes, qparams=qparams, is_constant=self.is_constant)


def _broadcast(qparams: QParams, dims: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point, shaped to broadcast against a tensor of so many dimensions."""
    shape = [1] * dims
    if qparams.axis is not None:
        shape[qparams.axis] = -1
    return qparams.scale.reshape(shape), qparams.zero_point.reshape(shape)


class Region:
    """A region on tensors.

    Args:
        text: as FoundRegion has it.
    """

    def __init__(self, text: str) -> None:
        row = json.loads(text)
        self.name: str = row["name"]
        self.form = None if row["form"] is None else _FORMS[row["form"]]
        target: Any = torch.ops if row["target"] else None
        for part in row["target"]:
            target = getattr(target, part)
        self.target = target
        self.arguments: dict[str, Any] = row["arguments"]
        self.operands = [_Integers.of(operand) for operand in row["operands"]]
        self.output = None if row["output"] is None else _Integers.of(row["output"])
        self.bounds = tuple(row["bounds"])
        self.arithmetic = Arithmetic(_profile_of(row["profile"]), row["accumulator_bits"])

    def compute(
        self, estimate: Tensor, real: Tensor, values: Sequence[Tensor], qparams: Sequence[Tensor]
    ) -> Tensor | None:
        """The exact result in real units, None where it is the estimate.

        Args:
            estimate: the result of the float operators.
            real: what is quantized to it.
            values: of the region's inputs.
            qparams: scale, zero_point and whether it quantizes, of each of its observers.
        """
        triples = [qparams[i : i + 3] for i in range(0, len(qparams), 3)]
        if not all(bool(enabled.all()) for _, _, enabled in triples):
            return None
        to = None if self.output is None else self.output.qparams(*triples[-1][:2])
        made = None if self.form is None else self._formed(self.form, estimate, values, triples, to)
        if to is None:
            return made
        scale, zero = _broadcast(to, estimate.dim())
        if made is None:
            by = self.arithmetic.profile.quantization
            if by is Quantization.INVERSE:
                return None  # as fake-quantize does
            limits = to.quant_min, to.quant_max
            made = quantize(
                compute, real.float(), scale, zero, limits=limits, storage=to.dtype, by=by
            )
        return made.float().sub_(zero).mul_(scale)

    def _formed(
        self,
        form: IntegerForm,
        estimate: Tensor,
        values: Sequence[Tensor],
        triples: Sequence[Sequence[Tensor]],
        to: QParams | None,
    ) -> Tensor | None:
        """Return the result of a form, None where it declines."""
        operands = [
            kind.operand(value, scale, zero)
            for kind, value, (scale, zero, _) in zip(self.operands, values, triples, strict=False)
        ]
        others = values[len(operands) :]
        output = None
        if to is not None:
            output = Output(qparams=to, range=output_range(to, to.dtype, self.bounds))
        site: Site[Tensor] = Site(
            call=compute_exactly,
            hold=lambda tensor, _: tensor,
            target=self.target,
            arguments={n: _given(v, operands, others) for n, v in self.arguments.items()},
            output=output,
            like=estimate,
            arithmetic=self.arithmetic,
        )
        try:
            made: Tensor = form.write(site)
        except Declined:
            return None
        except Overflow as overflow:
            raise Overflow(
                f"{self.name}: {overflow.what}",
                fix='pq.set_numerics(prepared, "integer", accumulator_bits=64), a scheme of fewer '
                "bits for this node, or fake-quantize: "
                f'pq.set_numerics(prepared, "fake_quant", nodes=["{self.name}"])',
            ) from overflow
        return made


def _given(value: Any, operands: Sequence[Operand[Tensor]], others: Sequence[Tensor]) -> Any:
    if isinstance(value, list):
        return [_given(v, operands, others) for v in value]
    if not isinstance(value, dict):
        return value
    if "operand" in value:
        return operands[value["operand"]]
    return others[value["other"]] if "other" in value else getattr(torch, value["dtype"])


region_of = lru_cache(maxsize=None)(Region)
"""The region of a text, read once."""


def with_arithmetic(
    text: str, profile: Profile | None = None, accumulator_bits: int | None = None
) -> str:
    """A region in the arithmetic of another target; None keeps what the region has."""
    changed: dict[str, Any] = {} if profile is None else {"profile": asdict(profile)}
    if accumulator_bits is not None:
        changed["accumulator_bits"] = accumulator_bits
    return json.dumps(json.loads(text) | changed)


_KINDS = {
    "requantization": Requantization,
    "addition": Addition,
    "averaging": Averaging,
    "bias": Bias,
    "multiplication": Requantization,
    "quantization": Quantization,
    "functions": Functions,
    "rows": RowQuantization,
}


def _profile_of(row: Mapping[str, Any]) -> Profile:
    kinds: dict[str, Any] = {
        name: kind(row[name]) for name, kind in _KINDS.items() if row.get(name) is not None
    }
    return Profile(**{**row, **kinds})


def compute_exactly(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Call on tensors; sums of products by float kernels where these hold every partial sum."""
    if target is not out_dtype or not sums_rows(args[0], *args[2:]):
        return target(*args, **kwargs)
    made = exact_product(*args)
    if made is not None:
        return made
    op, dtype, left, right, *rest = args
    return op(left.double(), right.double(), *rest).to(dtype)
