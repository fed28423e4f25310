"""Does `compare` name the node that a fault was planted in, first of all?

Run `python -m benchmarks.planted_faults`. Each trial quantizes nothing anew: it edits one copy of
a q/dq graph, in a node, with a fault and of a size that are drawn, and compares it (or what a
backend makes of it) with the float program. Every trial is written as it ends, and one that is in
the results already is not run again: a run that was stopped goes on.
"""

import argparse
import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

import pt2e_quant as pq
from benchmarks.inputs import image_batches
from benchmarks.models import (
    BasicBlock,
    InvertedResidual,
    VisionTransformer,
    conv_bn_relu6,
    init_conv_weights,
    mobilenet_v2,
    resnet18,
    settle_batch_norm,
)
from benchmarks.results import read_rows, write_results
from benchmarks.text_models import minilm, sentence_batches
from pt2e_quant.analysis.graph_side import GraphSide, Site, WeightSite
from pt2e_quant.analysis.open_side import Program
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.graph.meta import origin_name
from pt2e_quant.graph.ops import SIGMOID, SOFTMAX, is_call

IMAGE = 32
TOKENS = 16
GOAL = 0.95
NAME = "planted_faults"
KEYS = ("model", "form", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A float program, its q/dq graph, and data."""

    name: str
    program: ExportedProgram
    gm: GraphModule
    batches: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A graph with one fault."""

    gm: GraphModule
    fault: str
    node: str


def resnet() -> nn.Module:
    """Return residual blocks of 8 to 16 channels."""
    stem = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks = [BasicBlock(8, 8, 1), BasicBlock(8, 16, 2), BasicBlock(16, 16, 1)]
    return _settled(nn.Sequential(*stem, *blocks, *_head(16)))


def mobilenet() -> nn.Module:
    """Return inverted residuals of 8 to 12 channels."""
    blocks = [InvertedResidual(8, 8, 1, 2), InvertedResidual(8, 12, 2, 4)]
    blocks.append(InvertedResidual(12, 12, 1, 4))
    return _settled(nn.Sequential(conv_bn_relu6(3, 8, 3, 2), *blocks, *_head(12)))


def transformer() -> nn.Module:
    """Return a vision transformer of two layers."""
    torch.manual_seed(0)
    model = VisionTransformer(IMAGE, patch=8, width=32, depth=2, heads=2, classes=5)
    nn.init.normal_(model.class_token)
    nn.init.normal_(model.positions)
    return model.eval()


def _head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5)]


def _settled(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    init_conv_weights(model, generator)
    settle_batch_norm(model, IMAGE, generator)
    return model.eval()


SMALL: dict[str, Callable[[], nn.Module]] = {
    "resnet": resnet,
    "mobilenet": mobilenet,
    "transformer": transformer,
}
"""For tests."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: resnet18(IMAGE),
    "mobilenet_v2": lambda: mobilenet_v2(IMAGE),
    "minilm": minilm,
}


def quantized(name: str, backend: str = "xnnpack") -> Quantized:
    """Return a model quantized to static int8."""
    is_text = name == "minilm"
    batches = sentence_batches(4, TOKENS, 11) if is_text else [*image_batches(4, IMAGE, 11)]
    program = torch.export.export({**SMALL, **MODELS}[name](), batches[0])
    quantizer = pq.backends.get(backend).quantizer("int8")
    # Faults are planted in calibrated ranges.
    quantizer.remove_algorithm("run_time_scales")
    prepared = pq.prepare(program, quantizer)
    gm = pq.convert(pq.calibrate(prepared, batches, progress=False))
    return Quantized(name=name, program=program, gm=gm, batches=batches)


def quantized_for(form: str, names: Iterable[str] = MODELS) -> list[Quantized]:
    """Return models, quantized by the backend that makes the form."""
    return [quantized(name, "xnnpack" if form == "graph" else form) for name in names]


def plant(model: Quantized, fault: str, draw: random.Random) -> Planted:
    """Return a copy of the graph with a fault in a node that is drawn."""
    gm = copy.deepcopy(model.gm)
    side = GraphSide(gm, "")
    if fault in WEIGHT_FAULTS:
        weight = draw.choice([w for w in side.weights.values() if _channels(w) > 1])
        WEIGHT_FAULTS[fault](gm, weight, draw)
        node = origin_name(weight.reader)
    else:
        sites = [s for s in side.sites.values() if s.qparams is not None and not _is_fixed(s.node)]
        site = draw.choice(sites)
        ACTIVATION_FAULTS[fault](model, site, draw)
        node = site.name
    gm.recompile()
    return Planted(gm=gm, fault=fault, node=node)


def _is_fixed(node: Node) -> bool:
    """Whether runtimes take no other range than one for what it makes."""
    return is_call(node, SOFTMAX) or is_call(node, SIGMOID)


def _channels(weight: WeightSite) -> int:
    """How many scales a weight has; 0 for a bias, which some backends quantize too."""
    is_bias = weight.node.meta["val"].dim() < 2
    return 0 if weight.qparams is None or is_bias else weight.qparams.scale.numel()


def bad_range(model: Quantized, site: Site, draw: random.Random) -> None:
    """Make the step of an activation many times too wide or too narrow."""
    _change(site, scale=draw.choice([1 / 16, 1 / 8, 1 / 4, 8, 16, 32]))


def wrong_zero_point(model: Quantized, site: Site, draw: random.Random) -> None:
    """Move the range of an activation by half its width, as int8 read for uint8 does, or more."""
    assert site.qparams is not None
    middle = (site.qparams.quant_min + site.qparams.quant_max) / 2
    is_low = float(site.qparams.zero_point) < middle
    _change(site, zero_point=draw.randint(128, 160) * (1 if is_low else -1))


def clipped_outlier_channel(model: Quantized, site: Site, draw: random.Random) -> None:
    """Choose the range of an activation without the channel with the largest values."""
    row = pq.compare(model.program, model.gm, model.batches, progress=False).node(site.name)
    assert row is not None
    assert row.range_kept is not None
    peaks = sorted(row.channel_peaks)
    limit = min(peaks[len(peaks) // 2], peaks[-1] / 2)
    low, high = row.range_kept
    # The side that the channel's peak is on: of a relu, the upper one.
    _change(
        site, scale=limit / max(-low if -row.range_seen[0] > row.range_seen[1] else high, 1e-12)
    )


def _change(site: Site, *, scale: float = 1.0, zero_point: int = 0) -> None:
    quantize = site.quantize
    assert quantize is not None
    for node in (quantize, *(user for user in quantize.users if is_dequantize(user))):
        old: Any = node.args
        moved = max(int(old[3]), min(int(old[4]), int(old[2]) + zero_point))
        node.update_arg(1, float(old[1]) * scale)
        node.update_arg(2, moved)


def saturated_channel(gm: GraphModule, weight: WeightSite, draw: random.Random) -> None:
    """Give one output channel of a weight a scale that most of its values do not fit."""
    integers, scale, axis = _held(gm, weight)
    at, factor = draw.randrange(scale.numel()), draw.choice([4, 8, 16])
    row = integers.select(axis, at)
    row.copy_((row.int() * factor).clamp(-127, 127).to(row.dtype))
    scale[at] /= factor


def transposed_scale(gm: GraphModule, weight: WeightSite, draw: random.Random) -> None:
    """Give the output channels of a weight each other's scales."""
    _, scale, _ = _held(gm, weight)
    order = sorted(range(scale.numel()), key=lambda at: float(scale[at]))
    scale[order] = scale[order[::-1]].clone()


def _held(gm: GraphModule, weight: WeightSite) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The integers and scales of a weight, in tensors of this graph alone; and the axis."""
    found = []
    args: Any = weight.node.args
    for source in args[:2]:
        owner, _, leaf = str(source.target).rpartition(".")
        module = gm.get_submodule(owner)
        value = getattr(module, leaf).detach().clone()
        setattr(module, leaf, value)
        found.append(value)
    return found[0], found[1], int(args[3])


ACTIVATION_FAULTS: dict[str, Callable[[Quantized, Site, random.Random], None]] = {
    "bad range": bad_range,
    "wrong zero point": wrong_zero_point,
    "clipped outlier channel": clipped_outlier_channel,
}
WEIGHT_FAULTS: dict[str, Callable[[GraphModule, WeightSite, random.Random], None]] = {
    "saturated weight channel": saturated_channel,
    "transposed scale": transposed_scale,
}
FAULTS = (*ACTIVATION_FAULTS, *WEIGHT_FAULTS)


def trial(model: Quantized, seed: int, form: str) -> dict[str, object]:
    """Return one row: what was planted, and what `compare` names first."""
    draw = random.Random(seed)
    planted = plant(model, FAULTS[seed % len(FAULTS)], draw)
    other: Any = planted.gm
    if form == "xnnpack":
        other = lowered_for_its_values(planted.gm, form)
    elif form != "graph":
        other = lowered(planted.gm, form)
    worst = pq.compare(model.program, other, model.batches, progress=False).worst(3)
    names = [row.node for row in worst]
    return {
        "model": model.name,
        "form": form,
        "seed": seed,
        "fault": planted.fault,
        "planted": planted.node,
        "named": names,
        "is_first": bool(names) and names[0] == planted.node,
        "cost_db": round(worst[0].cost_db, 1),
    }


def lowered(gm: GraphModule, form: str) -> pq.Artifact:
    """Return what a backend makes of a graph."""
    return pq.backends.get(form).lower(gm, verify=False, strict=False)


def lowered_for_its_values(gm: GraphModule, form: str) -> Program:
    """Return a program that `compare` lowers with its values as results, and not without them.

    The other lowering, of a file that gives none, takes the same 10 s of CPU time and ranks no
    node.
    """
    return Program(
        words=f"the program of {form}",
        capture=capture_of(gm),
        quantized=gm,
        run=lambda leaves: [],
        lower=lambda tapped: lowered(tapped, form).run_leaves,
    )


def main() -> None:
    """Run seeded trials and write how many nodes were named first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--forms", nargs="+", default=["graph", "onnx", "xnnpack"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = {form: quantized_for(form) for form in arguments.forms}
    known = {tuple(row[key] for key in KEYS) for row in read_rows(NAME)}
    for seed in range(arguments.trials):
        for form, every in models.items():
            model = every[seed % len(every)]
            if (model.name, form, seed) not in known:
                write_results(NAME, [trial(model, seed, form)], keys=KEYS)
    for form in arguments.forms:
        found = [row for row in read_rows(NAME) if row["form"] == form and row["model"] in MODELS]
        named = sum(bool(row["is_first"]) for row in found)
        missed = Counter(f"{row['model']}: {row['fault']}" for row in found if not row["is_first"])
        Console(width=120).print(
            f"{form}: {named} of {len(found)} named first (goal {GOAL:.0%})", missed
        )


if __name__ == "__main__":
    main()
