"""Quantization-aware training of a digits CNN with ternary weights, and a `.pte` of the result.

Run `python examples/qat.py`. Rounding trained weights to -1, 0 and 1 steps costs accuracy (with
three seeds 0.98 falls to 0.93, 0.96, 0.93); training with fake-quantizes gives 0.97, 0.98, 0.97.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from digits_cnn import Digits, load_images
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import pt2e_quant as pq
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer

console = Console()


def ternary(weight: TensorScheme) -> TensorScheme:
    """The same weights with three of their 255 values."""
    return replace(weight, quant_min=-1, quant_max=1)


def quantizer() -> TableQuantizer:
    """The XNNPACK backend's int8 quantizer with ternary weights."""
    made = pq.backends.get("xnnpack").quantizer("int8")
    made.set_global(replace(made.scheme, name="a8w2", weight=ternary(made.scheme.weight)))
    return made


def accuracy(model: nn.Module, data: Digits) -> float:
    """The share of test images that the model names."""
    with torch.no_grad():
        found = model(data.test_images).argmax(1)
    return float((found == data.test_labels).float().mean())


def small_cnn() -> nn.Module:
    """A CNN from images float[N, 1, 8, 8] to logits."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def export(model: nn.Module, data: Digits) -> torch.export.ExportedProgram:
    """The model's graph, for batches of up to 1024."""
    shapes = {"input": {0: torch.export.Dim("batch", max=1024)}}
    return torch.export.export(model, (data.train_images[:64],), dynamic_shapes=shapes)


def calibrated(model: nn.Module, data: Digits) -> nn.Module:
    """Quantized after training, by calibration alone."""
    prepared = pq.prepare_pt2e(export(model.eval(), data), quantizer())
    pq.calibrate(prepared, data.train_images[:256].split(64), progress=False)
    return pq.convert_pt2e(prepared)


def fit(
    model: nn.Module, data: Digits, epochs: int, rate: float, after: Callable[[], None]
) -> None:
    """Train in batches of 64; call `after` behind each step."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.train_images)).split(64):
            loss = F.cross_entropy(model(data.train_images[batch]), data.train_labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            after()


def trained(model: nn.Module, data: Digits, epochs: int) -> nn.Module:
    """Trained with fake-quantizes; ranges freeze halfway, batch norms after three quarters."""
    prepared = pq.prepare_qat_pt2e(export(model.train(), data), quantizer())
    steps = epochs * -(-len(data.train_images) // 64)
    half, late = steps // 2, 3 * steps // 4
    schedule = pq.QatSchedule(prepared, freeze_observers_after=half, freeze_bn_after=late)
    fit(prepared, data, epochs, 2e-3, schedule.step)
    return prepared.eval()


def main() -> None:
    """Print a line for float and for each way of quantizing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8, help="of float training, and of QAT")
    parser.add_argument("--keep", type=Path, help="folder for the .pte file")
    options = parser.parse_args()
    data = load_images()
    model = small_cnn()
    fit(model, data, options.epochs, 1e-2, lambda: None)
    model.eval()
    console.print(f"float                    {accuracy(model, data):.3f}")
    console.print(f"ternary weights, rounded {accuracy(calibrated(model, data), data):.3f}")
    prepared = trained(model, data, options.epochs)
    evaluated = prepared(data.test_images[:64])
    quantized = pq.convert_pt2e(prepared)
    assert torch.equal(quantized(data.test_images[:64]), evaluated)
    artifact = pq.backends.get("xnnpack").lower(quantized)
    with tempfile.TemporaryDirectory() as scratch:
        path = (options.keep or Path(scratch)) / "digits_ternary.pte"
        artifact.save(path)
        found = pq.backends.get("xnnpack").load(path).run(data.test_images).argmax(1)
        correct = float((found == data.test_labels).float().mean())
        console.print(f"ternary weights, trained {correct:.3f}   {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
