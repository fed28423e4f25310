"""What does quantization-aware training cost and recover, beside torchao's PT2E?

Run `python -m benchmarks.qat` (`--only prepare step depth digits`). Same program, same data, same
seeds on both sides, in turn; XNNPACKQuantizer for training there, our `xnnpack` quantizer here.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as executorch
from rich.console import Console
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.nn import functional as F
from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train
from torchao.quantization.pt2e import quantize_pt2e as torchao

import pt2e_quant as pq
from benchmarks import models
from benchmarks.results import write_results

console = Console(width=120)
# seconds there / here, microseconds per node deep / shallow, QAT step / float step
GOALS = {"prepare_qat + convert": 10.0, "linearity": 1.3, "training step": 1.5}


def their_quantizer(weight_bits: int = 8) -> object:
    """Return ExecuTorch's XNNPACKQuantizer for training."""
    half = 2 ** (weight_bits - 1)
    low = -127 if weight_bits == 8 else -half
    config = executorch.get_symmetric_quantization_config(
        is_per_channel=True, is_qat=True, weight_qmin=low, weight_qmax=half - 1
    )
    return executorch.XNNPACKQuantizer().set_global(config)


def our_quantizer(weight_bits: int = 8) -> object:
    """Return our XNNPACK quantizer, of whose weights fewer bits may be used."""
    made = pq.backends.get("xnnpack").quantizer("int8_minmax")
    if weight_bits < 8:
        half = 2 ** (weight_bits - 1)
        weight = replace(made.scheme.weight, quant_min=-half, quant_max=half - 1)
        made.set_global(replace(made.scheme, name=f"a8w{weight_bits}", weight=weight))
    return made


def prepared_ours(gm: GraphModule, weight_bits: int = 8) -> GraphModule:
    """Return a program's module as we prepare it for training."""
    return pq.prepare_qat_pt2e(gm, our_quantizer(weight_bits))


def prepared_theirs(gm: GraphModule, weight_bits: int = 8) -> GraphModule:
    """Return a program's module as torchao prepares it for training."""
    return torchao.prepare_qat_pt2e(gm, their_quantizer(weight_bits))


def evaluated(prepared: GraphModule, is_ours: bool) -> GraphModule:
    """Return a prepared graph in inference."""
    return prepared.eval() if is_ours else move_exported_model_to_eval(prepared)


def resnet18(image: int) -> nn.Module:
    """Return ResNet-18 in training, with the momentum that exports: a cumulative one does not."""
    model = models.resnet18(image=image)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    return model.train()


def time_stages(ep: ExportedProgram, inputs: tuple[Tensor, ...], is_ours: bool) -> dict[str, float]:
    """Return seconds of prepare and convert around one training call, which is not counted.

    Nor is `ep.module()`, torch's own and quadratic in nodes (torch 2.13).
    """
    gm = ep.module()
    start = time.perf_counter()
    prepared = prepared_ours(gm) if is_ours else prepared_theirs(gm)
    prepared_at = time.perf_counter()
    prepared(*inputs)
    evaluated(prepared, is_ours)
    trained_at = time.perf_counter()
    if is_ours:
        pq.convert_pt2e(prepared)
    else:
        torchao.convert_pt2e(prepared)
    return {"prepare": prepared_at - start, "convert": time.perf_counter() - trained_at}


def total(runs: list[dict[str, float]]) -> float:
    """Return the median of prepare and convert together."""
    return statistics.median(sum(run.values()) for run in runs)


def compare_stages(repeats: int) -> dict[str, object]:
    """Return prepare and convert of ResNet-18, here and there."""
    inputs = (torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)),)
    ep = torch.export.export(resnet18(64), inputs)
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(time_stages(ep, inputs, True))
        theirs.append(time_stages(ep, inputs, False))
    return {
        "question": "prepare_qat + convert",
        "model": "resnet18",
        "ours_s": ours[0] | {"total": total(ours)},
        "torchao_s": theirs[0] | {"total": total(theirs)},
        "ratio": round(total(theirs) / total(ours), 2),
        "goal": GOALS["prepare_qat + convert"],
    }


def conv_bn_stack(depth: int) -> nn.Module:
    """Return conv-bn-relu, so many times."""
    torch.manual_seed(0)
    block = [
        m
        for _ in range(depth)
        for m in (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    ]
    return nn.Sequential(*block).train()


def linearity(depths: tuple[int, int], repeats: int) -> dict[str, object]:
    """Return our time per node at two depths of a conv-bn-relu stack."""
    inputs = (torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0)),)
    per_node = {}
    for depth in depths:
        ep = torch.export.export(conv_bn_stack(depth), inputs)
        nodes = sum(node.op == "call_function" for node in ep.graph.nodes)
        count = repeats * (4 if depth == min(depths) else 1)
        runs = [time_stages(ep, inputs, True) for _ in range(count)]
        per_node[depth] = 1e6 * total(runs) / nodes
    shallow, deep = (per_node[depth] for depth in depths)
    return {
        "question": "linearity",
        "model": "conv-bn stack",
        "us_per_node": {str(depth): round(value, 1) for depth, value in per_node.items()},
        "ratio": round(deep / shallow, 2),
        "goal": GOALS["linearity"],
    }


def step_time(model: Callable[..., Tensor], module: nn.Module, x: Tensor, repeats: int) -> float:
    """Return the median seconds of one training step."""
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    found = []
    for number in range(repeats + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if number:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def compare_steps(batch: int, image: int, repeats: int) -> dict[str, object]:
    """Return a training step of ResNet-18 in float, here and there."""
    x = torch.randn(batch, 3, image, image, generator=torch.Generator().manual_seed(0))
    model = resnet18(image)
    ep = torch.export.export(model, (x,))
    ours = prepared_ours(ep.module()).train()
    theirs = move_exported_model_to_train(prepared_theirs(ep.module()))
    arms = {"float": copy.deepcopy(model), "ours": ours, "torchao": theirs}
    seconds = {name: step_time(module, module, x, repeats) for name, module in arms.items()}
    return {
        "question": "training step",
        "model": f"resnet18, batch {batch}, {image} pixels",
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "ratio": round(seconds["ours"] / seconds["float"], 2),
        "torchao_ratio": round(seconds["torchao"] / seconds["float"], 2),
        "goal": GOALS["training step"],
    }


def digits_net() -> nn.Module:
    """Return a small CNN for 8x8 images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scikit-learn's digits, seeded: images and labels to train on and to test on."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(found.images / 16).float()[:, None]
    labels = torch.from_numpy(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]
    return images[train], labels[train], images[test], labels[test]


def fit(module: nn.Module, images: Tensor, labels: Tensor, epochs: int, rate: float) -> None:
    """Train a module with Adam in seeded batches of 64."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(module.parameters(), rate)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(module(images[batch]), labels[batch]).backward()
            optimizer.step()


def accuracy(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that a module names."""
    with torch.no_grad():
        return float((module(images).argmax(1) == labels).float().mean())


def compare_digits(epochs: int, weight_bits: int = 4) -> dict[str, object]:
    """Return accuracies of 4-bit weights trained by the same recipe, here and there."""
    images, labels, test_images, test_labels = digits()
    model = digits_net()
    fit(model, images, labels, epochs, 5e-3)
    shapes = {"input": {0: torch.export.Dim("batch", min=2, max=1200)}}
    ep = torch.export.export(model.train(), (images[:64],), dynamic_shapes=shapes)
    found = {"float": accuracy(copy.deepcopy(model).eval(), test_images, test_labels)}
    for name, prepare in (("ours", prepared_ours), ("torchao", prepared_theirs)):
        prepared = prepare(copy.deepcopy(ep).module(), weight_bits)
        if name == "ours":
            prepared.train()
        else:
            move_exported_model_to_train(prepared)
        fit(prepared, images, labels, epochs, 1e-3)
        prepared = evaluated(prepared, name == "ours")
        convert = pq.convert_pt2e if name == "ours" else torchao.convert_pt2e
        found[name] = accuracy(convert(prepared), test_images, test_labels)
    return {
        "question": "digits accuracy",
        "model": f"{weight_bits}-bit weights, {epochs} epochs",
        "accuracy": {key: round(value, 4) for key, value in found.items()},
        "ratio": round(found["ours"] / found["torchao"], 4),
        "goal": 1.0,
    }


def main() -> None:
    """Run the chosen questions, print and record their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["prepare", "depth", "step", "digits"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--depths", type=int, nargs=2, default=(20, 320))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image", type=int, default=112)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--dry", action="store_true", help="print only, record nothing")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    questions: dict[str, Callable[[], dict[str, object]]] = {
        "prepare": partial(compare_stages, options.repeats),
        "depth": partial(linearity, tuple(options.depths), options.repeats),
        "step": partial(compare_steps, options.batch, options.image, options.repeats),
        "digits": partial(compare_digits, options.epochs),
    }
    rows = []
    for name in options.only:
        rows.append(questions[name]())
        console.print(rows[-1])
    if not options.dry:
        console.print(f"written to {write_results('qat', rows, ('question', 'model'))}")


if __name__ == "__main__":
    main()
