"""Does training through the target's integers end above fake-quantize, and what does a step cost?

Run `python -m benchmarks.qat_integers` (`--only digits target step`). Both arms share everything up
to the last epochs: float training, fake-quantize training, frozen ranges and batch norms. Accuracy
is that of the integer reference by the target's profile. Times are CPU seconds of one thread.
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
from rich.console import Console
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

import pt2e_quant as pq
from benchmarks.qat import accuracy, digits, digits_net, resnet18
from benchmarks.results import write_results
from pt2e_quant.core.integer_ops.profiles import DEFAULT, PROFILES, Profile
from pt2e_quant.pt2e import disable_observer, freeze_bn_stats

console = Console(width=120)
COARSE = replace(PROFILES["tflite"], name="tflite, multipliers of 1 bit", multiplier_bits=1)
SCHEMES = {"a8w8": (8, 8), "a8w4": (8, 4), "a4w4": (4, 4)}
# points of accuracy above fake-quantize; integer step / float step
GOALS = {"digits": 0.0, "target": 1.0, "step": 4.0}


def quantizer_of(activation_bits: int, weight_bits: int) -> object:
    """Return XNNPACK's int8 quantizer, of whose integers fewer are used."""
    made = pq.backends.get("xnnpack").quantizer("int8_minmax")

    def narrowed(scheme: object, bits: int) -> object:
        half = 2 ** (bits - 1)
        return replace(scheme, quant_min=-half, quant_max=half - 1)

    fields = {"input": narrowed(made.scheme.input, activation_bits)} if activation_bits < 8 else {}
    if activation_bits < 8:
        fields["output"] = narrowed(made.scheme.output, activation_bits)
    if weight_bits < 8:
        fields["weight"] = narrowed(made.scheme.weight, weight_bits)
    if fields:
        name = f"a{activation_bits}w{weight_bits}"
        made.set_global(replace(made.scheme, name=name, **fields))
    return made


def fit(
    module: nn.Module, images: Tensor, labels: Tensor, epochs: int, rate: float, seed: int
) -> None:
    """Train a module with Adam in seeded batches of 64, at a rate that falls to a tenth."""
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(module.parameters(), rate)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = rate * 0.1 ** (epoch / max(1, epochs - 1))
        for batch in torch.randperm(len(images), generator=order).split(64):
            optimizer.zero_grad()
            F.cross_entropy(module(images[batch]), labels[batch]).backward()
            optimizer.step()


def trained_float(seed: int, epochs: int) -> nn.Module:
    """Return the digits CNN after float training."""
    images, labels, _, _ = digits()
    model = digits_net()
    torch.manual_seed(seed)
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    fit(model, images, labels, epochs, 5e-3, seed)
    return model


def shared_start(model: nn.Module, quantizer: object, epochs: int, seed: int) -> GraphModule:
    """Return a model prepared and trained by fake-quantize, its ranges and batch norms frozen."""
    images, labels, _, _ = digits()
    shapes = {"input": {0: torch.export.Dim("batch", min=2, max=1200)}}
    ep = torch.export.export(copy.deepcopy(model).train(), (images[:64],), dynamic_shapes=shapes)
    prepared = pq.prepare_qat_pt2e(ep, quantizer).train()
    fit(prepared, images, labels, epochs, 1e-3, seed + 100)
    return prepared.apply(disable_observer).apply(freeze_bn_stats)


def compare_arms(
    bits: tuple[int, int],
    profile: Profile,
    epochs: tuple[int, int, int],
    seeds: int,
    last_rate: float,
    orders: int = 1,
    first_seed: int = 0,
) -> dict[str, object]:
    """Return the accuracy of both arms on the target's integers, for each seed.

    Each arm is trained with so many orders of the data in the last epochs, and its accuracy is the
    mean of theirs: one image of the 597 is 0.17 points, and an order alone moves some of them. What
    fake-quantize loses on the target's integers, of its accuracy in its own arithmetic, is all that
    training in integers could win. `runs` counts the orders in which the integers end above, level
    and below.
    """
    images, labels, test_images, test_labels = digits()
    found: dict[str, list[float]] = {"float": [], "fake_quant": [], "integer": []}
    lost, runs = [], [0, 0, 0]
    for seed in range(first_seed, first_seed + seeds):
        model = trained_float(seed, epochs[0])
        found["float"].append(accuracy(copy.deepcopy(model).eval(), test_images, test_labels))
        start = shared_start(model, quantizer_of(*bits), epochs[1], seed)
        reached: dict[str, list[float]] = {"fake_quant": [], "integer": []}
        for arm, ends in reached.items():
            for order in range(orders):
                prepared = copy.deepcopy(start)
                pq.set_numerics(prepared, arm, profile=profile)
                fit(prepared, images, labels, epochs[2], last_rate, seed + 200 + 1000 * order)
                converted = pq.convert_pt2e(prepared)
                own = accuracy(converted, test_images, test_labels)
                target = pq.integer_reference(converted, profile)
                ends.append(accuracy(target, test_images, test_labels))
                lost += [100 * (own - ends[-1])] if arm == "fake_quant" else []
            found[arm].append(statistics.mean(ends))
        for fake, exact in zip(*reached.values(), strict=True):
            runs[1 + (exact < fake) - (exact > fake)] += 1
    gains = [100 * (a - b) for a, b in zip(found["integer"], found["fake_quant"], strict=True)]
    means = {arm: round(100 * statistics.mean(values), 2) for arm, values in found.items()}
    return {
        "model": f"digits, a{bits[0]}w{bits[1]}, {profile.name}{_more(orders)}",
        "accuracy": {arm: [round(100 * v, 2) for v in values] for arm, values in found.items()},
        "mean": means,
        "orders": orders,
        "runs": runs,
        "lost_on_target": round(statistics.mean(lost), 2),
        "points": round(statistics.mean(gains), 2),
        "standard_error": round(statistics.stdev(gains) / len(gains) ** 0.5, 2),
    }


def _more(orders: int) -> str:
    """Return what sets the row of a longer run apart."""
    return f", {orders} orders" if orders > 4 else ""


def compare_digits(
    schemes: list[str],
    epochs: tuple[int, int, int],
    seeds: int,
    orders: int,
    first_seed: int,
) -> list[dict[str, object]]:
    """Return both arms where fake-quantize and the target agree but for rounding.

    The last epochs go on at the rate at which the ones before ended.
    """
    return [
        {
            "question": "digits",
            **compare_arms(bits, DEFAULT, epochs, seeds, 1e-4, orders, first_seed),
            "goal": GOALS["digits"],
        }
        for name, bits in SCHEMES.items()
        if name in schemes
    ]


def compare_target(epochs: tuple[int, int, int], seeds: int) -> list[dict[str, object]]:
    """Return both arms for a target whose requantization is a shift."""
    row = compare_arms((8, 8), COARSE, epochs, seeds, 1e-3)
    return [{"question": "target", **row, "goal": GOALS["target"]}]


def step_seconds(module: nn.Module, x: Tensor) -> float:
    """Return the CPU seconds of one training step."""
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    start = time.process_time()
    optimizer.zero_grad()
    module(x).square().mean().backward()
    optimizer.step()
    return time.process_time() - start


def compare_steps(repeats: int) -> list[dict[str, object]]:
    """Return a training step in float, by fake-quantize and in integers, in turn."""
    rows = []
    images, *_ = digits()
    cases = {
        "digits, batch 64": (digits_net(), images[:64]),
        "resnet18, batch 8, 64 pixels": (resnet18(64), torch.randn(8, 3, 64, 64)),
    }
    for name, (model, x) in cases.items():
        ep = torch.export.export(copy.deepcopy(model).train(), (x,))
        arms = {"float": copy.deepcopy(model).train()}
        for arm in ("fake_quant", "integer"):
            arms[arm] = pq.prepare_qat_pt2e(copy.deepcopy(ep), quantizer_of(8, 8)).train()
            arms[arm](x)
            arms[arm].apply(disable_observer).apply(freeze_bn_stats)
        pq.set_numerics(arms["integer"], "integer")
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for number in range(repeats + 1):
            for arm, module in arms.items():
                taken = step_seconds(module, x)
                if number:
                    seconds[arm].append(taken)
        medians = {arm: statistics.median(values) for arm, values in seconds.items()}
        rows.append(
            {
                "question": "step",
                "model": name,
                "seconds": {arm: round(value, 4) for arm, value in medians.items()},
                "ratio": round(medians["integer"] / medians["float"], 2),
                "fake_quant_ratio": round(medians["fake_quant"] / medians["float"], 2),
                "goal": GOALS["step"],
            }
        )
    return rows


def main() -> None:
    """Run the chosen questions, print and record their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["digits", "target", "step"])
    parser.add_argument("--schemes", nargs="*", default=[*SCHEMES], help="of digits")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0, help="of digits")
    parser.add_argument("--orders", type=int, default=4, help="of the data, in digits")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, nargs=3, default=(8, 4, 4))
    parser.add_argument("--dry", action="store_true", help="print only, record nothing")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    epochs = tuple(options.epochs)
    questions: dict[str, Callable[[], list[dict[str, object]]]] = {
        "digits": partial(
            compare_digits,
            options.schemes,
            epochs,
            options.seeds,
            options.orders,
            options.first_seed,
        ),
        "target": partial(compare_target, epochs, options.seeds),
        "step": partial(compare_steps, options.repeats),
    }
    rows = []
    for name in options.only:
        rows += questions[name]()
        console.print(rows)
    if not options.dry:
        console.print(f"written to {write_results('qat_integers', rows, ('question', 'model'))}")


if __name__ == "__main__":
    main()
