"""Passes, and the driver that runs them and can verify the graph between them."""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map_only

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.core.errors import InvariantError
from pt2e_quant.core.provenance import Provenance
from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.editor import DEFER_RECOMPILE
from pt2e_quant.graph.meta import attribute

VERIFY = "PT2E_QUANT_VERIFY"
"""Set to 1 in the environment, it makes every pipeline verify the graph after each pass."""

Sample: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments of a trial run."""


class Validation(Protocol):
    """Checks a graph between passes; see `backends.validate_passes`."""

    def start(self, gm: GraphModule) -> None:
        """Look at the graph before the first pass."""

    def after(self, name: str, gm: GraphModule) -> None:
        """Look at the graph after a pass that changed it; raise to stop."""


@dataclass(frozen=True, slots=True)
class Note:
    """The effect of a pass at a node, or the reason for none.

    Attributes:
        node: the node's name when the pass saw it.
        text: what was done, or the reason it was not.
        skipped: whether the pass declined.
    """

    node: str
    text: str
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of a pass: True if the graph changed, and notes on what was done."""

    changed: bool
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Invariant:
    """A property of a graph: `check` returns None if it holds, else what breaks it."""

    name: str
    check: Callable[[GraphModule], str | None]


@dataclass(frozen=True, slots=True)
class GraphPass:
    """A pass: a function over a graph, and the properties it needs, gives and ends.

    `needs` and `gives` are always written out, also if empty. `needs` has `HAS_VALUES` if the pass
    reads `meta["val"]`. `gives` lists what holds for every graph afterwards, whatever the pass
    declined. `ends` lists properties given by earlier passes that later ones cannot rely on.
    """

    name: str
    edit: Callable[[GraphModule], PassResult]
    needs: tuple[Invariant, ...]
    gives: tuple[Invariant, ...]
    ends: tuple[Invariant, ...] = ()

    def __call__(self, gm: GraphModule) -> PassResult:
        """Run the pass alone; the graph module can be called afterwards."""
        return self.edit(gm)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by module and name where that name is this pass, else by its parts."""
        if getattr(sys.modules.get(self.edit.__module__), self.name, None) is self:
            return _load_pass, (self.edit.__module__, self.name)
        return GraphPass, (self.name, self.edit, self.needs, self.gives, self.ends)


def _load_pass(module: str, name: str) -> GraphPass:
    found: GraphPass = getattr(importlib.import_module(module), name)
    return found


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One entry of a finished run."""

    name: str
    changed: bool
    notes: tuple[Note, ...]
    time_s: float


def graph_pass(
    *,
    needs: tuple[Invariant, ...],
    gives: tuple[Invariant, ...],
    ends: tuple[Invariant, ...] = (),
) -> Callable[[Callable[[GraphModule], PassResult]], GraphPass]:
    """Make a pass of a function; see `GraphPass` for the properties."""

    def made(edit: Callable[[GraphModule], PassResult]) -> GraphPass:
        return GraphPass(edit.__name__, edit, needs, gives, ends)

    return made


def _lint(gm: GraphModule) -> str | None:
    try:
        gm.graph.lint()
    except RuntimeError as error:
        return str(error)
    return None


def _values(gm: GraphModule) -> str | None:
    missing = [n.name for n in gm.graph.nodes if n.op == "call_function" and "val" not in n.meta]
    return f'{", ".join(missing[:3])}: no meta["val"]' if missing else None


WELL_FORMED = Invariant("the graph is well formed", _lint)
HAS_VALUES = Invariant('every call carries meta["val"]', _values)


def run_passes(
    gm: GraphModule,
    passes: Sequence[GraphPass],
    *,
    verify: bool | None = None,
    sample: Sample | None = None,
    validation: Validation | None = None,
) -> tuple[PassRecord, ...]:
    """Run passes in order on one graph, with one recompile at the end.

    Args:
        gm: edited in place.
        passes: the pipeline.
        verify: check after each pass that the graph is well formed and that everything
            promised so far holds, and compare outputs on `sample`; None: if PT2E_QUANT_VERIFY=1
            is in the environment.
        sample: inputs of the trial runs; what they write is restored.
        validation: is shown the graph before the first pass and after each that changed it.

    Raises:
        InvariantError: a pass broke a property or changed the outputs; it and the passes
            before it are named.
    """
    records: list[PassRecord] = []
    if verify is None:
        verify = os.environ.get(VERIFY) == "1"
    watch = _Watch(gm, sample) if verify else None
    if validation is not None:
        validation.start(gm)
    with one_recompile(gm) as changes:
        place = len(changes)
        changes.append(True)  # until every pass has said that it changed nothing
        for entry in passes:
            if watch is not None:
                watch.before(entry, records)
            start = time.perf_counter()
            result = entry.edit(gm)
            elapsed = time.perf_counter() - start
            if watch is not None:
                watch.after(entry, records)
            if validation is not None and result.changed:
                validation.after(entry.name, gm)
            records.append(PassRecord(entry.name, result.changed, result.notes, elapsed))
        changes[place] = any(record.changed for record in records)
    return tuple(records)


def log_passes(provenance: Provenance, records: Sequence[PassRecord]) -> None:
    """Add to a graph's table which passes changed it, and all that they noted."""
    provenance.passes += [record.name for record in records if record.changed]
    provenance.notes += [f"{n.node}: {n.text}" for record in records for n in record.notes]


@contextmanager
def one_recompile(gm: GraphModule) -> Iterator[list[bool]]:
    """Put off the recompiles of every pass and editor inside to one at the end.

    Yields:
        A list to append to: the graph is recompiled if it holds True. Regions nest; only the
        outermost recompiles.
    """
    outer: list[bool] | None = gm.meta.get(DEFER_RECOMPILE)
    changes = [] if outer is None else outer
    gm.meta[DEFER_RECOMPILE] = changes
    try:
        yield changes
    finally:
        if outer is None:
            del gm.meta[DEFER_RECOMPILE]
            if any(changes):
                recompile(gm)


class _Watch:
    """Checks between passes."""

    def __init__(self, gm: GraphModule, sample: Sample | None) -> None:
        self.gm = gm
        self.sample = sample
        # A property that the graph lacks already is broken by no pass.
        held = [i for i in (WELL_FORMED, HAS_VALUES) if i.check(gm) is None]
        self.promised = {invariant.name: invariant for invariant in held}
        self.expected = None if sample is None else trial_run(gm, sample)

    def before(self, entry: GraphPass, records: Sequence[PassRecord]) -> None:
        for need in entry.needs:
            broken = need.check(self.gm)
            if broken is not None:
                raise _broken(f"{entry.name} needs: {need.name}", broken, records)

    def after(self, entry: GraphPass, records: Sequence[PassRecord]) -> None:
        self.promised |= {invariant.name: invariant for invariant in entry.gives}
        for ended in entry.ends:
            self.promised.pop(ended.name, None)
        for invariant in self.promised.values():
            broken = invariant.check(self.gm)
            if broken is not None:
                raise _broken(f"{entry.name} broke: {invariant.name}", broken, records)
        if self.sample is None or self.expected is None:
            return
        recompile(self.gm)
        found = trial_run(self.gm, self.sample)
        difference = first_difference(self.expected, found)
        if difference is not None:
            raise _broken(f"{entry.name} changed the outputs", difference, records)


def _broken(what: str, how: str, records: Sequence[PassRecord]) -> InvariantError:
    before = ", ".join(r.name for r in records) or "none"
    return InvariantError(f"{what} ({how}); passes before it: {before}")


def trial_run(gm: GraphModule, sample: Sample) -> list[Any]:
    """The outputs and the buffers written, flattened; inputs and buffers stay as they were."""
    args, kwargs = tree_map_only(Tensor, Tensor.clone, (sample[0], dict(sample[1])))
    buffers = {name: attribute(gm, name) for name in mutated_buffers(gm)}
    kept = {name: b.detach().clone() for name, b in buffers.items()}
    try:
        with torch.no_grad():
            outputs = tree_leaves(gm(*args, **kwargs))
            found = [*outputs, *(buffers[name] for name in sorted(buffers))]
            return [v.clone() if isinstance(v, Tensor) else v for v in found]
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                buffers[name].copy_(value)


def first_difference(expected: Sequence[Any], found: Sequence[Any]) -> str | None:
    """The first difference beyond rounding between two flat lists of outputs, None if none.

    Floats may differ by 1024 roundings of their dtype, at most 5 %, of the largest magnitude:
    folding constants reorders sums.
    """
    if len(expected) != len(found):
        return f"{len(expected)} outputs expected, {len(found)} found"
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        text = _difference(a, b)
        if text is not None:
            return f"output {i}: {text}"
    return None


def _difference(a: Any, b: Any) -> str | None:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None if type(a) is type(b) and a == b else f"{a!r} expected, {b!r} found"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} expected, {b.dtype}{list(b.shape)} found"
    if not a.numel():
        return None
    if not a.is_floating_point():
        return None if torch.equal(a, b) else "integers differ"
    bound = min(1024 * torch.finfo(a.dtype).eps, 0.05)
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, torch.zeros_like(a), (a - b).abs()).double().max().item()
    finite = a[a.isfinite()]
    scale = finite.abs().double().max().item() if finite.numel() else 0.0
    return None if error <= bound * scale else f"error {error:.3g}, magnitude {scale:.3g}"
