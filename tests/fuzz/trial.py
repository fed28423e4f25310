"""One model through the whole road: quantize, run at several sizes, save, load elsewhere, run.

The answer says what came of it:

| outcome | meaning |
| --- | --- |
| invalid | the model does not run, torch.export refuses it, or it computes noise: no trial |
| ok | everything agrees |
| float | everything agrees, and nothing is quantized: the report says why |
| refused | a Pt2eQuantError with place and fix, also where all is left float |
| unplaced | a refusal without place or fix |
| unneeded | a refusal of what works where the node, or all, is left float |
| wrong | a result, its structure, dtype or state is not the graph's |
| raw | any other exception |

and, of the process that runs this, "crash" and "hang".
"""

import importlib.util
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import pt2e_quant as pq
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.core.errors import AnnotationError, InputError, Pt2eQuantError
from pt2e_quant.core.max_sizes import limit_graph, unbounded_dims
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.calibrate.calibrate import preserve_buffers
from pt2e_quant.flow.calibrate.sample import sqnr_db
from tests.fuzz.judge import Expected, OtherRank, complaint, complaint_of_inputs, expect
from tests.fuzz.processes import Answerer, Died, Hung

__all__ = ["Trial", "run_trial"]

Call = tuple[Sequence[Any], dict[str, Any]]

CALIBRATION = 8
"""Calls, so many that ranges are chosen by what they cost."""
ROUNDING_DB = 20.0
"""Of a float32 result to a float64 one: below it the model computes nothing."""
LARGEST_SIZE = 64
"""Of a dimension without bounds where the backend needs one."""
LOAD_LIMIT_S = 90.0
_SEARCHES = (
    ("pt2e_quant.backends.gate", "first_refused"),
    ("pt2e_quant.backends.judge_results", "find_first_apart"),
    ("pt2e_quant.backends.name_refused", "first_refused"),
)
"""Where the node of a refusal is looked for."""


@dataclass(kw_only=True)
class Trial:
    """What came of a model."""

    outcome: str
    stage: str = ""
    error: str = ""
    detail: str = ""
    float_db: float | None = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


class _Finished(Exception):
    """A trial that ends before its last stage."""

    def __init__(self, outcome: str, stage: str, error: str, detail: str) -> None:
        super().__init__(detail)
        self.trial = Trial(outcome=outcome, stage=stage, error=error, detail=detail)


class Watched:
    """A backend that keeps the graph it lowers, and may leave nodes in float.

    Args:
        bounded: limit dimensions without an upper bound, as `max_sizes=` does.
    """

    def __init__(
        self, target: Backend, leave: Callable[[TableQuantizer], Any] | None, *, bounded: bool
    ) -> None:
        self.target = target
        self.bounded = bounded
        self.leave = leave
        self.gm: GraphModule | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def quantizer(self, recipe: str = "int8") -> TableQuantizer:
        quantizer = self.target.quantizer(recipe)
        if self.leave is not None:
            self.leave(quantizer)
        return quantizer

    def lower(self, gm: GraphModule, *args: Any, **options: Any) -> Artifact:
        self.gm = gm
        if self.bounded:
            unbounded = unbounded_dims(capture_of(gm))
            limit_graph(
                gm, {path: dict.fromkeys(dims, LARGEST_SIZE) for path, dims in unbounded.items()}
            )
        return self.target.lower(gm, *args, **options)


def run_trial(source: str, loader: Answerer, *, recipe: str | None = None) -> Trial:
    """Run the file of a program."""
    torch.set_num_threads(1)
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = _imported(source, Path(folder))
            trial = _run(module, Path(folder), loader, recipe)
        except _Finished as end:
            trial = end.trial
            if trial.error == "ArtifactError" and _is_rounding(module):
                trial.outcome, trial.stage = "invalid", "eager"
        except Exception as error:  # A fault of this search: it must be seen.
            trial = Trial(outcome="raw", stage="search", error=type(error).__name__)
            trial.detail = _traceback(error)
    trial.seconds = time.process_time() - begin
    return trial


def _imported(source: str, folder: Path) -> ModuleType:
    path = folder / "drawn_model.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("drawn_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # torch.cond's tracing imports it.
    spec.loader.exec_module(module)
    return module


def _run(module: ModuleType, folder: Path, loader: Answerer, recipe: str | None) -> Trial:
    calls = _calls(module)
    floats = _float_results(module, calls)
    model = module.model()
    artifact, gm, outcome = _quantized(module, model, recipe or module.RECIPE)
    expected, calls = _expected(module, gm, calls, floats)
    given = _copied(calls)
    found = _stage("run", lambda: [artifact.run(*a, **k) for a, k in given])
    if _changed(model, module.model()):
        raise _Finished("wrong", "run", "", "the float model's tensors were written")
    _compare("run", expected, found)
    for index, (wanted, call) in enumerate(zip(expected, given, strict=True)):
        if text := complaint_of_inputs(wanted, call):
            raise _Finished("wrong", "run", "", f"call {index}: {text}")
    path = folder / f"artifact{pq.backends.get(module.BACKEND).suffix}"
    _stage("save", lambda: artifact.save(path))
    _compare("run loaded", expected, _loaded(module.BACKEND, path, calls, loader))
    db = min((sqnr_db(e.floats, e.graph) for e in expected), default=0.0)
    return Trial(outcome=outcome, float_db=None if db == float("inf") else db)


def _calls(module: ModuleType) -> list[Call]:
    """Two calls of each size, the example's before and behind the others."""
    sizes = [*module.SIZES, module.SIZES[0]] if len(module.SIZES) > 1 else module.SIZES
    return [module.batch(100 + 2 * at + n, **s) for at, s in enumerate(sizes) for n in (0, 1)]


def _expected(
    module: ModuleType, gm: GraphModule, calls: list[Call], floats: list[Any]
) -> tuple[list[Expected], list[Call]]:
    """What the calls should return, without those of sizes that torch's program does not take.

    The graph's buffers are those of the float model, and are put back.
    """
    expected, taken = [], []
    with preserve_buffers(gm, capture_of(gm)):
        for call, result in zip(calls, floats, strict=True):
            try:
                capture_of(gm).bind(*call)
            except InputError:  # torch narrows a `Dim.AUTO`.
                continue
            try:
                expected.append(expect(gm, result, *_copied(call)))
            except OtherRank:
                continue
            except Exception as error:
                if _is_exported(module, call):
                    name = type(error).__name__
                    raise _Finished("raw", "run graph", name, _traceback(error)) from error
                continue
            taken.append(call)
    return expected, taken


def _is_exported(module: ModuleType, call: Call) -> bool:
    """Whether torch.export's program of the float model runs a call."""
    program = torch.export.export(
        module.model(), *module.batch(0), dynamic_shapes=module.DYNAMIC
    ).module()
    try:
        with torch.no_grad():
            program(*call[0], **call[1])
    except Exception:
        return False
    return True


def _float_results(module: ModuleType, calls: list[Any]) -> list[Any]:
    try:
        model = module.model()
        with torch.no_grad():
            # A model that counts its calls may take fewer than it is calibrated with.
            counted = module.model()
            for n in range(CALIBRATION):
                args, kwargs = module.batch(1 + n)
                counted(*args, **kwargs)
            results = [model(*a, **k) for a, k in _copied(calls)]
    except Exception as error:
        raise _Finished("invalid", "eager", type(error).__name__, str(error)) from error
    for leaf in pytree.tree_leaves(results):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.isfinite().all():
            raise _Finished("invalid", "eager", "", "the float model's result is not finite")
    return _copied(results)


def _is_rounding(module: ModuleType) -> bool:
    """Whether the float model's result is made of rounding errors: float64 gives another one."""
    model, (args, kwargs) = module.model(), module.batch(100)
    wide = pytree.tree_map_only(
        Tensor, lambda v: v.double() if v.is_floating_point() else v.clone(), (args, kwargs)
    )
    try:
        with torch.no_grad():
            found = pytree.tree_leaves(model(*_copied(args), **_copied(kwargs)))
            exact = pytree.tree_leaves(module.model().double()(*wide[0], **wide[1]))
    except Exception:  # It names a dtype itself.
        return False
    return any(
        sqnr_db(e, f) < ROUNDING_DB
        for e, f in zip(exact, found, strict=True)
        if isinstance(e, Tensor) and e.is_floating_point()
    )


def _quantized(
    module: ModuleType, model: nn.Module, recipe: str
) -> tuple[Artifact, GraphModule, str]:
    """The artifact, its graph, and "ok" or "float"."""
    try:
        return (*_attempt(module, model, recipe, module.STRICT, None), "ok")
    except Pt2eQuantError as error:
        if isinstance(error, InputError) and "torch.export cannot capture" in str(error):
            raise _Finished("invalid", "export", "InputError", str(error)) from error
        first = error
    except Exception as error:
        raise _Finished("raw", "quantize", type(error).__name__, _traceback(error)) from error
    if isinstance(first, AnnotationError) and "no tensor of this graph" in str(first):
        try:
            return (*_attempt(module, model, recipe, False, None), "float")
        except Pt2eQuantError as error:
            first = error
        except Exception as error:
            raise _Finished("raw", "quantize", type(error).__name__, _traceback(error)) from error
    raise _refusal(module, model, recipe, first)


def _attempt(
    module: ModuleType,
    model: nn.Module,
    recipe: str,
    strict: bool,
    leave: Callable[[TableQuantizer], Any] | None,
) -> tuple[Artifact, GraphModule]:
    target = pq.backends.get(module.BACKEND)
    if module.BACKEND in ("cpu", "cuda"):
        target = target.allowing_slower()
    watched = Watched(target, leave, bounded=module.BOUNDED)
    args, kwargs = module.batch(0)
    data = [module.batch(1 + n) for n in range(CALIBRATION)]
    artifact = pq.quantize(
        model,
        args,
        kwargs,
        dynamic_shapes=module.DYNAMIC,
        calibration_data=[_batch(args, kwargs) for args, kwargs in data],
        backend=watched,
        recipe=recipe,
        pad_groups="_g" in recipe or recipe.startswith(("mx", "nv")),
        strict=strict,
        progress=False,
    )
    assert watched.gm is not None
    return artifact, watched.gm


def _batch(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Inputs passed by name are the last: a batch of both kinds has all by position."""
    return kwargs if not args else (*args, *kwargs.values())


def _refusal(module: ModuleType, model: nn.Module, recipe: str, first: Pt2eQuantError) -> _Finished:
    """Judge a refusal by trying again with the node, then everything, left in float."""
    node = first.node_name
    remedies: list[tuple[str, Callable[[TableQuantizer], Any] | None]] = [("strict=False", None)]
    if node is not None:
        remedies.append((f'set_node("{node}", None)', lambda q: q.set_node(node, None)))
    remedies.append(("set_global(None)", lambda q: q.set_global(None)))
    name, detail = type(first).__name__, str(first)
    for remedy, leave in remedies:
        try:
            with _unnamed():
                _attempt(module, model, recipe, False, leave)
        except Exception:  # It is no remedy; what was raised first is what is reported.
            continue
        return _Finished("unneeded", "quantize", name, f"{detail}\n  remedy  {remedy}")
    is_placed = first.fix is not None and (node is not None or 'input "' in detail)
    return _Finished("refused" if is_placed else "unplaced", "quantize", name, detail)


@contextmanager
def _unnamed() -> Iterator[None]:
    """Do not lower parts of a graph to name the node of a refusal: nobody reads it."""
    with ExitStack() as stack:
        for module, search in _SEARCHES:
            if module in sys.modules:
                stack.enter_context(mock.patch(f"{module}.{search}", return_value=None))
        yield


def _changed(model: nn.Module, fresh: nn.Module) -> bool:
    before, after = fresh.state_dict(), model.state_dict()
    return before.keys() != after.keys() or any(
        not torch.equal(before[name], after[name]) for name in before
    )


def _compare(stage: str, expected: list[Expected], found: list[Any]) -> None:
    for index, (wanted, result) in enumerate(zip(expected, found, strict=True)):
        text = complaint(wanted, result)
        if text is not None:
            raise _Finished("wrong", stage, "", f"call {index}: {text}")


def _loaded(backend: str, path: Path, calls: list[Any], loader: Answerer) -> list[Any]:
    request = {"backend": backend, "artifact": str(path)}
    request |= {"calls": f"{path}.calls", "results": f"{path}.results"}
    Path(request["calls"]).write_bytes(pickle.dumps(_copied(calls)))
    try:
        answer = loader.ask(request, LOAD_LIMIT_S)
    except Died as error:
        raise _Finished("crash", "run loaded", "", str(error)) from error
    except Hung as error:
        raise _Finished("hang", "run loaded", "", str(error)) from error
    if answer:
        raise _Finished("raw", answer["stage"], answer["error"], answer["detail"])
    results: list[Any] = pickle.loads(Path(request["results"]).read_bytes())
    return results


def _stage(name: str, call: Callable[[], Any]) -> Any:
    try:
        with torch.no_grad():
            return call()
    except Exception as error:
        raise _Finished("raw", name, type(error).__name__, _traceback(error)) from error


def _copied(tree: Any) -> Any:
    """The same with copies of tensors, which keep their strides."""
    return pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, tree)


def _traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error, limit=-6, chain=False))[-3000:]
