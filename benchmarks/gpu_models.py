"""Whole models on a GPU: int8 by the cuda backend beside half precision by torch.compile."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks import models
from benchmarks.gpu_timer import Program, Timer
from benchmarks.inputs import image_batches
from benchmarks.measure import sqnr_db

__all__ = ["MODELS", "ModelCase", "measure_model"]

Row = dict[str, object]
OURS = "pt2e_quant int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """A model at one batch size.

    Args:
        name: of the row.
        make: builds it, with seeded weights.
        batch: images a call.
        targets: peer name to the ratio aimed at.
        size: pixels of an image's side.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: int
    targets: dict[str, float]
    size: int = 224


_FP16 = "torch.compile fp16 channels-last"
MODELS = (
    ModelCase(name="resnet50", make=models.resnet50, batch=64, targets={_FP16: 1.6}),
    ModelCase(name="resnet50", make=models.resnet50, batch=1, targets={}),
    ModelCase(name="resnet18", make=models.resnet18, batch=64, targets={}),
    ModelCase(name="mobilenet_v2", make=models.mobilenet_v2, batch=64, targets={}),
    ModelCase(name="vit_small", make=models.vit_small, batch=64, targets={}),
)


def measure_model(case: ModelCase, device: torch.device, timer: Timer, *, rounds: int) -> list[Row]:
    """One row a program: its time, quality against float32, or why it could not be made."""
    images = [batch[0] for batch in image_batches(2 * case.batch, case.size, seed=0)]
    calibration, example = (
        torch.cat(images[n * case.batch : (n + 1) * case.batch]).to(device) for n in range(2)
    )
    model = case.make().eval().to(device)
    with torch.no_grad():
        wanted = [model(example)]
    makers: dict[str, Callable[[], Callable[[], Tensor]]] = {
        OURS: lambda: _quantized(model, calibration, example),
        _FP16: lambda: _compiled(model, example, torch.float16),
        "torch.compile bf16 channels-last": lambda: _compiled(model, example, torch.bfloat16),
    }
    programs: dict[str, Program] = {}
    rows: list[Row] = []
    same = {"model": case.name, "batch": case.batch}
    quality: dict[str, float] = {}
    for name, make in makers.items():
        try:
            call = torch.no_grad()(make())
            quality[name] = round(sqnr_db(wanted, [call()]), 2)
            programs[name] = timer.capture([call])
        except Exception as error:  # what a device or a build cannot do is a result
            why = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            rows.append({**same, "program": name, "failure": why})
    times = timer.time(programs, rounds=rounds)
    ours = times.get(OURS)
    for name, timing in times.items():
        row: Row = {
            **same,
            "program": name,
            "sqnr_db": quality[name],
            "median_ms": round(1e3 * timing.median_s, 4),
            "min_ms": round(1e3 * timing.min_s, 4),
        }
        if ours is not None and name != OURS:
            ratio = timing.median_s / ours.median_s
            row["ratio"] = round(ratio, 3)
            if name in case.targets:
                row |= {"target": case.targets[name], "met": ratio >= case.targets[name]}
        rows.append(row)
    return rows


def _quantized(model: nn.Module, calibration: Tensor, example: Tensor) -> Callable[[], Tensor]:
    """The fused module; every kernel may be used, as what is slow is to be seen."""
    backend = pq.backends.get("cuda").allowing_unmeasured()  # type: ignore[attr-defined]  # its own
    exported = torch.export.export(copy.deepcopy(model), (example,))
    prepared = pq.prepare_pt2e(exported, backend.quantizer("int8"))
    pq.calibrate(prepared, [(calibration,)], progress=False)
    artifact = backend.lower(pq.convert_pt2e(prepared)).to(example.device)
    return lambda: _first(artifact.run_leaves([example]))


def _first(leaves: Sequence[Tensor]) -> Tensor:
    return leaves[0]


def _compiled(model: nn.Module, example: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    half = copy.deepcopy(model).to(dtype=dtype, memory_format=torch.channels_last)
    x = example.to(dtype=dtype, memory_format=torch.channels_last)
    compiled = torch.compile(half, dynamic=False)

    @torch.no_grad()
    def call() -> Tensor:
        made: Tensor = compiled(x)
        return made

    return call
