"""`auto_quantize`: measure each linear's candidates on its own inputs, and keep the fastest."""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pt2e_quant.core.arguments import (
    check_filter,
    check_module,
    check_number,
    check_type,
    found_text,
)
from pt2e_quant.core.errors import ArtifactError, ConfigError, InputError, Pt2eQuantError
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.tensors.kernels.choose_layout import layouts_with_kernels
from pt2e_quant.tensors.plan import Filter, Place, as_scheme, is_linear, places_of, upright
from pt2e_quant.tensors.quantize import holders_of, put_in_place, search_of
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.run_batches import run_call, watch_input

CANDIDATES = ("w8", "int8_dynamic")
"""Schemes that are tried unless others are named; float is always one."""
_ROUNDS, _LEAST_S = 7, 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate on one shape.

    Args:
        scheme: its name, "float" for the weight as it is.
        layout: of its weight.
        time_us: median of one call.
        sqnr_db: of its result against float; infinite for float.
        bytes: of its weight.
    """

    scheme: str
    layout: str
    time_us: float
    sqnr_db: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The result for one weight.

    Args:
        name: of the weight.
        shape: rows of its input, input features, output features.
        chosen: the trial that won.
        why: in words.
        trials: all of them, the fastest first.
        is_cached: whether an earlier run measured them.
    """

    name: str
    shape: tuple[int, int, int]
    chosen: Trial
    why: str
    trials: tuple[Trial, ...]
    is_cached: bool


@dataclass(slots=True)
class AutoReport:
    """One choice for each linear, in the order of modules."""

    choices: list[Choice] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        for choice in self.choices:
            rows, features, columns = choice.shape
            shape = f"{rows} x {features} -> {columns}"
            won = f"{choice.chosen.scheme} {choice.chosen.layout}".strip()
            lines.append(f"{choice.name:<40} {shape:<22} {won:<24} {choice.why}")
        return "\n".join(lines)


def auto_quantize(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    *,
    candidates: Sequence[str] = CANDIDATES,
    filter: Filter | None = None,
    least_db: float = 30.0,
    cache: str | Path | None = None,
    verbose: bool = True,
) -> AutoReport:
    """Quantize the linears of a model in place, each to the fastest candidate there is here.

    Each distinct product (rows of the input, features, bias or none) is timed once, on the
    inputs that the example gives it; a cache file keeps the times for other runs on this machine.

    Args:
        model: any module.
        example_inputs: of one forward: a tuple, keyword arguments, or one tensor.
        candidates: scheme names; float is always tried.
        filter: of (module, path), which linears; all by default.
        least_db: candidates whose result is further from float are not chosen.
        cache: a JSON file of times; None keeps none.
        verbose: print what was chosen and why.

    Returns:
        Choices with their trials.

    Raises:
        InputError: the example inputs reach no linear.
        ConfigError: a candidate is no scheme that needs no data, or an argument is of another kind.
        ArtifactError: the cache is no file of such times, or cannot be written.
    """
    check_module("model", model)
    check_filter(filter)
    check_number("least_db", least_db, least=-math.inf)
    if isinstance(candidates, str) or not isinstance(candidates, Sequence) or not candidates:
        raise ConfigError(
            f"candidates is a list of schemes' names, found {found_text(candidates)}",
            fix=f"candidates={list(CANDIDATES)}",
        )
    known = _Cache(cache)
    schemes = {name: as_scheme(name) for name in candidates}
    for name, scheme in schemes.items():
        if scheme.input is not None and not scheme.input.is_dynamic:
            raise ConfigError(f'"{name}" needs calibration data', fix="name dynamic schemes")
    places = places_of(model, next(iter(schemes.values())), filter)
    places = [p for p in places if is_linear(p.module, p.path)]
    inputs = _inputs_of(model, places, example_inputs)
    if not inputs:
        raise InputError("the example inputs reach no linear", fix="give inputs of a forward")
    report = AutoReport()
    for place in places:
        if place.path in inputs:
            report.choices.append(
                _choose(model, place, inputs[place.path], known, candidates, least_db)
            )
    known.write()
    if verbose:
        print(report)
    return report


def _inputs_of(
    model: nn.Module, places: Sequence[Place], example: Sequence[Any] | Mapping[str, Any] | Tensor
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def watch(path: str) -> Any:
        return lambda x: found.setdefault(path, x)

    args, kwargs = _as_call(example)
    hooks = [watch_input(p.module, p.path, watch(p.path)) for p in places]
    try:
        run_call(model, args, kwargs, "the example inputs")
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _as_call(example: object) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(example, Mapping):
        return (), example
    if isinstance(example, Tensor):
        return (example,), {}
    what = "a tuple of inputs, keyword arguments in a dict, or one tensor"
    check_type("example_inputs", example, (tuple, list), what, fix="auto_quantize(model, (x,))")
    assert isinstance(example, (tuple, list))
    return example, {}


class _Cache:
    """Trials by the product, the machine and torch's version, in a JSON file."""

    def __init__(self, path: str | Path | None) -> None:
        if path is not None:
            check_type("cache", path, (str, Path), "the path of a file")
        self.path = None if path is None else Path(path)
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.is_new = False
        if self.path is not None and self.path.exists():
            self.rows = _read_rows(self.path)
        elif self.path is not None and not self.path.parent.is_dir():
            raise ArtifactError(f"there is no folder {self.path.parent} for the cache")

    def get(self, key: str) -> tuple[Trial, ...] | None:
        """The trials of a product, if they are known."""
        found = self.rows.get(key)
        return None if found is None else tuple(Trial(**row) for row in found)

    def put(self, key: str, trials: tuple[Trial, ...]) -> None:
        """Keep the trials of a product."""
        self.rows[key] = [asdict(trial) for trial in trials]
        self.is_new = True

    def write(self) -> None:
        """Write the file, whole or not at all."""
        if self.path is None or not self.is_new:
            return
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(self.rows, indent=1))
        draft.replace(self.path)


def _read_rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        rows = json.loads(path.read_text())
        for trials in rows.values():
            for trial in trials:
                Trial(**trial)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path} holds no times that auto_quantize wrote: {error}",
            fix="give another file, or delete it",
        ) from error
    found: dict[str, list[dict[str, Any]]] = rows
    return found


def _key(x: Tensor, weight: Tensor, candidates: Sequence[str]) -> str:
    rows = x.numel() // max(1, x.shape[-1])
    where = torch.backends.cpu.get_cpu_capability() if x.device.type == "cpu" else (
        torch.cuda.get_device_name(x.device)
    )  # fmt: skip
    sizes = (rows, x.dim(), *weight.shape, x.dtype, torch.get_num_threads())
    return "|".join(map(str, (where, torch.__version__, *sizes, *candidates)))


def _choose(
    model: nn.Module,
    place: Place,
    x: Tensor,
    known: _Cache,
    candidates: Sequence[str],
    least_db: float,
) -> Choice:
    weight = upright(place.module)
    key = _key(x, weight, candidates)
    trials = known.get(key)
    is_cached = trials is not None
    made: dict[tuple[str, str], QuantizedTensor] = {}
    if trials is None:
        made = _candidates(weight, candidates)
        trials = _measure(x, weight, place.module.bias, made)
        known.put(key, trials)
    fit = [trial for trial in trials if trial.sqnr_db >= least_db]
    chosen = min(fit, key=lambda trial: trial.time_us)
    if chosen.scheme != "float":
        if not made:
            made = _candidates(weight, [chosen.scheme])
        tensor = made[chosen.scheme, chosen.layout]
        holders = holders_of(model)[place.weight]
        put_in_place(holders, place, place.weight, tensor, chosen.layout)
    rows = x.numel() // max(1, x.shape[-1])
    return Choice(
        name=place.name,
        shape=(rows, weight.shape[1], weight.shape[0]),
        chosen=chosen,
        why=_why(chosen, trials, least_db, is_cached=is_cached),
        trials=tuple(sorted(trials, key=lambda trial: trial.time_us)),
        is_cached=is_cached,
    )


def _why(chosen: Trial, trials: Sequence[Trial], least_db: float, *, is_cached: bool) -> str:
    real = next(trial for trial in trials if trial.scheme == "float")
    told = f"{chosen.time_us:.0f} us, float {real.time_us:.0f} us"
    if chosen.scheme == "float":
        others = [t for t in trials if t.scheme != "float"]
        least = min(others, key=lambda t: t.time_us, default=None)
        told = f"float is fastest, {real.time_us:.0f} us"
        if least is not None:
            low = "" if least.sqnr_db >= least_db else f" ({least.sqnr_db:.0f} dB)"
            told += f"; {least.scheme} {least.time_us:.0f} us{low}"
    return told + (" (cached)" if is_cached else "")


def _candidates(
    weight: Tensor, candidates: Sequence[str]
) -> dict[tuple[str, str], QuantizedTensor]:
    """Tensors by scheme and layout: each layout that has a kernel here, else the plain one."""
    made: dict[tuple[str, str], QuantizedTensor] = {}
    for name in candidates:
        scheme = as_scheme(name)
        assert scheme.weight is not None  # as_scheme says so
        try:
            plain = QuantizedTensor.from_float(
                weight, scheme.weight, input=scheme.input, search=search_of(None)
            )
        except Pt2eQuantError:
            continue  # its groups do not divide this weight: no candidate here
        for layout in layouts_with_kernels(plain) or ["plain"]:
            made[name, layout] = plain.to_layout(layout)
    return made


def _measure(
    x: Tensor, real: Tensor, bias: Any, made: Mapping[tuple[str, str], QuantizedTensor]
) -> tuple[Trial, ...]:
    """Each candidate and float, in turn, so that a busy moment hits all of them."""
    weights: dict[tuple[str, str], Tensor] = {("float", ""): real, **made}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in weights}
    with torch.no_grad():
        expected = F.linear(x, real, bias)
        errors = {key: F.linear(x, weight, bias) for key, weight in weights.items()}
        for _ in range(_ROUNDS):
            for key, weight in weights.items():
                times[key].append(_time(x, weight, bias))
    return tuple(
        Trial(
            scheme=key[0],
            layout=key[1],
            time_us=median(times[key]) * 1e6,
            sqnr_db=float("inf") if key[0] == "float" else sqnr_db([expected], [errors[key]]),
            bytes=weight.nbytes,
        )
        for key, weight in weights.items()
    )


def _time(x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """Seconds of one call: calls for at least two milliseconds, divided by their number."""
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < _LEAST_S:
        F.linear(x, weight, bias)
        calls += 1
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - start) / calls
