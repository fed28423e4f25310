"""What `effort` buys: ranges as observed, chosen by evidence, and the peers, on unlike models.

    python -m benchmarks.effort [--half tuned|final] [--models unet vit]
    python -m benchmarks.effort --backends onnx --efforts fast balanced --peers --draws 2

Each figure is the SQNR of a quantized graph's outputs against the float model's over 24 held-out
inputs, in dB; quantize_static's is that of its file in ONNX Runtime. The second command compares
efforts over several draws of calibration and held-out images. Images of one contrast and
images of very different contrast are told apart: the latter hold values beyond any range that
calibration saw.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import product

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks import inputs
from benchmarks.cpu import with_own_relus
from benchmarks.effort_zoo import FINAL, HELD_OUT_COUNT, TUNED, Batches, build
from benchmarks.measure import Stopwatch, sqnr_db
from benchmarks.peers import feed, onnx_float, onnx_static, torchao_quantize
from benchmarks.results import write_results

CONTRASTS = {"even": 0.1, "uneven": 0.5}
EFFORTS = ("fast", "balanced", "best")
CASE = ("model", "contrast", "draw", "held_out")
Run = Callable[..., object]


def ours(
    backend: str, effort: str, model: nn.Module, calibration: Batches, without: Sequence[str] = ()
) -> tuple[Run, float]:
    """Return this package's quantized graph, and the CPU seconds of convert."""
    exported = torch.export.export(model, calibration[0])
    quantizer = pq.backends.get(backend).quantizer("int8")
    for name in {algorithm.name for algorithm in quantizer.algorithms} & set(without):
        quantizer.remove_algorithm(name)
    # An effort by name brings back what was removed; none is "balanced" for these recipes.
    named = None if without and effort == "balanced" else effort
    prepared = pq.prepare_pt2e(exported, quantizer, effort=named)
    pq.calibrate(prepared, calibration, progress=False)
    start = time.process_time()
    made = pq.convert_pt2e(prepared)
    return made, time.process_time() - start


def x86(model: nn.Module, calibration: Batches) -> Run:
    """Return torchao's graph with X86InductorQuantizer."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as found

    config = found.get_default_x86_inductor_quantization_config()
    quantizer = found.X86InductorQuantizer().set_global(config)
    exported = torch.export.export(with_own_relus(model), calibration[0])
    prepared = prepare_pt2e(exported.module(), quantizer)
    feed(prepared, calibration)
    return convert_pt2e(prepared)


PEERS = (
    "XNNPACKQuantizer",
    "X86InductorQuantizer",
    *(f"quantize_static {method}" for method in ("MinMax", "Entropy", "Percentile")),
)


def peers(model: nn.Module, calibration: Batches, wanted: Sequence[str]) -> dict[str, Run]:
    """Return the peers' quantized models by name; one that fails is left out."""
    example = calibration[0]
    makers: dict[str, Callable[[], Run]] = {
        "XNNPACKQuantizer": lambda: torchao_quantize(model, example, calibration, Stopwatch()),
        "X86InductorQuantizer": lambda: x86(model, calibration),
    }
    file = onnx_float(model, example).data if any("static" in name for name in wanted) else b""
    for name in PEERS[2:]:
        method = name.split()[1]
        makers[name] = lambda method=method: onnx_static(file, calibration, method=method).run
    found: dict[str, Run] = {}
    for name in wanted:
        try:
            found[name] = makers[name]()
        except Exception as error:  # a peer's own failure is a result
            print(f"{name} failed: {type(error).__name__}: {str(error)[:100]}")
    return found


def flat(found: object) -> list[Tensor]:
    """Return the tensors of one result."""
    return list(found) if isinstance(found, (tuple, list)) else [found]  # type: ignore[list-item]


def score(run: Run, model: nn.Module, held_out: Batches) -> float:
    """Return the SQNR over all held-out inputs together."""
    with torch.no_grad():
        expected = [value for batch in held_out for value in flat(model(*batch))]
        measured = [value for batch in held_out for value in flat(run(*batch))]
    return round(sqnr_db(expected, measured), 2)


def measure(
    name: str,
    contrast: str,
    draw: int = 0,
    count: int = HELD_OUT_COUNT,
    *,
    backends: Sequence[str],
    efforts: Sequence[str],
    others: Sequence[str],
    without: Sequence[str] = (),
) -> list[dict[str, object]]:
    """Return one row for each way to quantize one model."""
    inputs.CONTRAST_SIGMA = CONTRASTS[contrast]
    model, calibration, held_out = build(name, draw, count)
    start = time.process_time()
    feed(model, calibration)
    float_s = time.process_time() - start
    rows: list[dict[str, object]] = []

    def add(how: str, run: Run, seconds: float | None = None) -> None:
        row = {"model": name, "half": "tuned" if name in TUNED else "final", "contrast": contrast}
        row |= {"draw": draw, "held_out": len(held_out)}
        row |= {"how": how, "sqnr_db": score(run, model, held_out)}
        if seconds is not None:
            row |= {"convert_s": round(seconds, 2), "float_pass_s": round(float_s, 2)}
        rows.append(row)

    for backend in backends:
        for effort in efforts:
            add(f"{backend} {effort}", *ours(backend, effort, model, calibration))
            if without:
                how = f"{backend} {effort} without {'+'.join(without)}"
                add(how, *ours(backend, effort, model, calibration, without))
    for how, run in peers(model, calibration, others).items():
        add(how, run)
    return rows


def show(rows: Sequence[dict[str, object]]) -> None:
    """Print one line a model and contrast."""
    hows = list(dict.fromkeys(str(row["how"]) for row in rows))
    table = Table(title="SQNR on held-out inputs, dB")
    for column in (*CASE, *hows):
        table.add_column(column)
    for key in dict.fromkeys(tuple(row[name] for name in CASE) for row in rows):
        found = {r["how"]: r["sqnr_db"] for r in rows if tuple(r[name] for name in CASE) == key}
        table.add_row(*map(str, key), *(str(found.get(how, "")) for how in hows))
    Console(width=200).print(table)


def main() -> None:
    """Run the models that are asked for and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=("tuned", "final"), default="tuned")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--backends", nargs="*", default=["xnnpack", "onnx"])
    parser.add_argument("--efforts", nargs="*", default=EFFORTS)
    parser.add_argument("--contrasts", nargs="*", choices=CONTRASTS, default=list(CONTRASTS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--without", nargs="*", default=[], help="algorithms left out, beside")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=HELD_OUT_COUNT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = given.models or list(TUNED if given.half == "tuned" else FINAL)
    rows: list[dict[str, object]] = []
    for name, contrast, draw in product(names, given.contrasts, range(given.draws)):
        found = measure(
            name,
            contrast,
            draw,
            given.held_out,
            backends=given.backends,
            efforts=given.efforts,
            others=given.peers,
            without=given.without,
        )
        rows += found
        print(name, contrast, draw, *(f"{r['how']}={r['sqnr_db']}" for r in found), flush=True)
        write_results("effort", found, (*CASE, "how"))
    show(rows)


if __name__ == "__main__":
    main()
