"""What choices by evidence cost: CPU time of convert at each effort, beside a float pass.

    python -m benchmarks.effort_cost [--models resnet50] [--calls 16 32 128] [--efforts balanced]

One thread, one image a call. `extra_passes` is what an effort takes beyond "fast", in passes of the
float model over the same calibration calls. The choices look at a kept sample of the calls, so that
they take about as long for many calls as for few.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks import models
from benchmarks.cases import CALIBRATION_SEED
from benchmarks.effort import ours
from benchmarks.inputs import image_batches
from benchmarks.peers import feed
from benchmarks.results import write_results

IMAGE = 224
MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": models.resnet18,
    "resnet50": models.resnet50,
    "mobilenet_v2": models.mobilenet_v2,
    "vit_small": models.vit_small,
}


def measure(name: str, count: int, backend: str, efforts: Sequence[str]) -> list[dict[str, object]]:
    """One row for each effort beyond "fast"."""
    model = MODELS[name](image=IMAGE)
    calibration = [*image_batches(count, IMAGE, CALIBRATION_SEED)]
    feed(model, calibration[:1])
    start = time.process_time()
    feed(model, calibration)
    float_s = time.process_time() - start
    fast_s = ours(backend, "fast", model, calibration)[1]
    rows: list[dict[str, object]] = []
    for effort in efforts:
        own_s = ours(backend, effort, model, calibration)[1]
        row: dict[str, object] = {"model": name, "backend": backend, "calls": count}
        row |= {"effort": effort, "float_pass_s": round(float_s, 2), "fast_s": round(fast_s, 2)}
        row |= {"convert_s": round(own_s, 2), "extra_passes": round((own_s - fast_s) / float_s, 2)}
        rows.append(row)
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    return rows


def main() -> None:
    """Measure the models that are asked for and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--calls", nargs="*", type=int, default=[16, 32, 128])
    parser.add_argument("--backends", nargs="*", default=["xnnpack", "onnx"])
    parser.add_argument("--efforts", nargs="*", default=["balanced"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models:
        for backend in given.backends:
            for count in given.calls:
                rows = measure(name, count, backend, given.efforts)
                write_results("effort_cost", rows, ("model", "backend", "calls", "effort"))


if __name__ == "__main__":
    main()
