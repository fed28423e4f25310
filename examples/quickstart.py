"""Train a small CNN on scikit-learn's digits, quantize it for both runtimes, compare with float.

Run `python examples/quickstart.py`: about a minute on one core. The exit status is 1 if int8 costs
more than 0.3 points of accuracy on either runtime.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import onnxruntime
import torch
from digits_cnn import load_images, train_cnn
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.extension.pybindings import portable_lib
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.export import ExportedProgram

import pt2e_quant as pq

MAX_DROP_POINTS = 0.3
SUFFIXES = {"xnnpack": ".pte", "onnx": ".onnx"}
Run = Callable[[Tensor], Tensor]
console = Console()
# torch 2.13 warns about its own pytree code at each export
warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)


def save_float(ep: ExportedProgram, folder: Path) -> None:
    """Write the float model for both runtimes: what int8 is compared with."""
    edge = to_edge_transform_and_lower(ep, partitioner=[XnnpackPartitioner()])
    (folder / "float.pte").write_bytes(edge.to_executorch().buffer)
    torch.onnx.export(ep, dynamo=True, verbose=False).save(folder / "float.onnx")


def save_int8(ep: ExportedProgram, batches: Sequence[Tensor], folder: Path) -> None:
    """Quantize for both runtimes and write the files."""
    for name, suffix in SUFFIXES.items():
        console.print(f"quantizing for {name}")
        backend = pq.backends.get(name)
        prepared = pq.prepare_pt2e(ep, backend.quantizer("int8"))
        pq.calibrate(prepared, batches)
        backend.lower(pq.convert_pt2e(prepared)).save(folder / f"int8{suffix}")


def load(path: Path) -> Run:
    """Return a function that runs a file in its runtime on one thread, as a device would."""
    if path.suffix == ".pte":
        portable_lib._unsafe_reset_threadpool(1)
        module = portable_lib._load_for_executorch(str(path))
        return lambda x: module.forward((x,))[0]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def median_us(runs: Sequence[Run], x: Tensor, rounds: int = 300) -> list[float]:
    """Time the runs in turn, so that all see the same machine; return their medians in us."""
    samples: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, times in zip(runs, samples, strict=True):
            begin = time.perf_counter()
            run(x)
            times.append(1e6 * (time.perf_counter() - begin))
    return [statistics.median(times) for times in samples]


def accuracy(run: Run, images: Tensor, labels: Tensor) -> float:
    """Return the share of right answers in percent, one image at a time."""
    predicted = torch.cat([run(image[None]).argmax(1) for image in images])
    return 100 * float((predicted == labels).double().mean())


def main(epochs: int, folder: Path) -> bool:
    """Train, quantize, compare; return whether int8 kept the accuracy."""
    torch.set_num_threads(1)
    digits = load_images()
    model = train_cnn(digits.train_images, digits.train_labels, epochs=epochs)
    sizes = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    ep = torch.export.export(model, (digits.test_images[:2],), dynamic_shapes=sizes)
    console.print("lowering the float model for both runtimes, to compare with")
    save_float(ep, folder)
    save_int8(ep, digits.train_images[:200].split(1), folder)

    console.print("running every file on images never trained on")
    table = Table("runtime", title=f"digits, {len(digits.test_images)} images never trained on")
    for heading in ("accuracy %", "int8", "size KiB", "int8", "latency us", "int8", "speed-up"):
        table.add_column(heading, justify="right")
    held = True
    for backend, suffix in SUFFIXES.items():
        paths = [folder / f"{kind}{suffix}" for kind in ("float", "int8")]
        runs = [load(path) for path in paths]
        scores = [accuracy(run, digits.test_images, digits.test_labels) for run in runs]
        sizes = [path.stat().st_size / 1024 for path in paths]
        times = median_us(runs, digits.test_images[:1])
        held &= scores[0] - scores[1] <= MAX_DROP_POINTS
        cells = [*(f"{v:.2f}" for v in scores), *(f"{v:.0f}" for v in sizes + times)]
        table.add_row(backend, *cells, f"{times[0] / times[1]:.1f}x")
    console.print(table)
    return held


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--keep", type=Path, help="an existing folder to leave the files in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        ok = main(options.epochs, options.keep or Path(temporary))
    sys.exit(0 if ok else f"int8 lost more than {MAX_DROP_POINTS} points of accuracy")
