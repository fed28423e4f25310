"""What `pq.tune` finds: MiniLM with poor ranges, digits, MobileNetV2 and a small ViT.

    python -m benchmarks.tune minilm digits mobilenet vit --json benchmarks/results/tune.json

MiniLM begins with static int8 of min-max ranges, without SmoothQuant. The front of the others is
held against uniform int8, and against int8 with the first and the last layer in float.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.measure import mean_cosine
from benchmarks.models import VisionTransformer, mobilenet_v2
from benchmarks.text_models import minilm, sentence_batches
from examples.digits_cnn import load_images, train_cnn
from pt2e_quant.analysis.menu import constants_size, is_product
from pt2e_quant.backends.target.recipe_file import FLOAT, NodeScheme, RecipeFile

BACKEND = "onnx"
MIN_MAX = RecipeFile(backend=BACKEND, recipe="int8", ranges="min_max", without=("smooth_quant",))
CASES = ("minilm", "digits", "mobilenet", "vit")


@dataclass(frozen=True)
class Case:
    """A model with calibration data and other data to measure on."""

    model: nn.Module
    calibration: Sequence[Any]
    held_out: Sequence[Any]


def case_named(name: str) -> Case:
    """One of `CASES`."""
    if name == "minilm":
        return Case(minilm(), sentence_batches(16, 64, 11), sentence_batches(40, 64, 12)[16:])
    torch.manual_seed(0)
    if name == "digits":
        digits = load_images()
        model: nn.Module = train_cnn(digits.train_images, digits.train_labels, epochs=3)
        drawn = torch.cat([digits.train_images[:64], digits.test_images[:64]]).unflatten(0, (8, 16))
    elif name == "mobilenet":
        model = mobilenet_v2(image=64, classes=100)
        drawn = torch.randn(8, 4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    else:
        vit = VisionTransformer(32, patch=8, width=64, depth=4, heads=4, classes=10)
        nn.init.normal_(vit.class_token)
        nn.init.normal_(vit.positions)
        model = vit
        drawn = torch.randn(8, 16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return Case(model.eval(), [(x,) for x in drawn[:4]], [(x,) for x in drawn[4:]])


def outputs(run: Any, batches: Sequence[Any]) -> list[Tensor]:
    """The result of each batch."""
    with torch.no_grad():
        return [run(*batch) for batch in batches]


def baseline(case: Case, recipe: RecipeFile) -> dict[str, float]:
    """Size and cosine of a recipe."""
    program = torch.export.export(case.model, case.calibration[0])
    prepared = pq.prepare(program, recipe.quantizer(pq.backends.get(BACKEND)))
    gm = pq.convert(pq.calibrate(prepared, case.calibration, progress=False))
    found = mean_cosine(outputs(case.model, case.held_out), outputs(gm, case.held_out))
    return {"cosine": found, "bytes": constants_size(gm)}


def first_and_last_float(case: Case) -> RecipeFile:
    """Static int8 but for the first and the last product with weights."""
    program = torch.export.export(case.model, case.calibration[0])
    products = [node.name for node in program.graph.nodes if is_product(node)]
    rules = tuple(NodeScheme(node=products[at], scheme=FLOAT) for at in (0, -1))
    return RecipeFile(backend=BACKEND, rules=rules)


def run_case(name: str) -> dict[str, Any]:
    """The search of one case, with what it is held against."""
    case = case_named(name)
    begin, used = time.perf_counter(), time.process_time()
    is_text = name == "minilm"
    found = pq.tune(
        case.model,
        case.calibration[0],
        calibration_data=case.calibration,
        evaluation_data=case.calibration,
        backend=BACKEND,
        recipe=MIN_MAX if is_text else "int8",
        target=0.9992 if is_text else None,
        budget=None if is_text else {"bits": 16},
        menu=None if is_text else ("w8",),
        points=0 if is_text else 8,
        progress=False,
    )
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - used
    expected = outputs(case.model, case.held_out)
    held_out = mean_cosine(expected, outputs(found.artifact.run, case.held_out))
    recipes = {"int8": MIN_MAX if is_text else RecipeFile(backend=BACKEND)}
    if not is_text:
        recipes["first and last float"] = first_and_last_float(case)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "cosine": found.metric,
        "cosine_held_out": held_out,
        "share_quantized": found.share_quantized,
        "front": [
            {"label": p.label, "bytes": p.size, **baseline(case, p.recipe)}
            for p in found.front
            if p.share_quantized
        ],
        "baselines": {label: baseline(case, recipe) for label, recipe in recipes.items()},
        "recipe": found.recipe.to_toml(),
    }


def main() -> None:
    """Print or write the results of the cases as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, choices=(*CASES, []))
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    results = {name: run_case(name) for name in parsed.cases or CASES}
    text = json.dumps(results, indent=1)
    if parsed.json is None:
        print(text)
    else:
        known = json.loads(parsed.json.read_text()) if parsed.json.exists() else {}
        parsed.json.write_text(json.dumps(known | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
