"""`pq.tune` beside Model-Optimizer's automatic mixed precision, at equal bytes of constants.

    pip install nvidia-modelopt
    python -m benchmarks.tune_peers digits vit mobilenet

`auto_quantize` chooses which layers get int8 weights and inputs. The same layers with int8 weights
are priced in this package's records, and `pq.tune` is given that many bytes. Both mixes are
measured in torch, on data that neither has seen.
"""

import argparse
import copy
import time
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from torch import nn

import pt2e_quant as pq
from benchmarks.measure import mean_cosine
from benchmarks.results import write_results
from benchmarks.tune import BACKEND, Case, case_named, outputs
from pt2e_quant.core.provenance import provenance_of

CASES = ("digits", "vit", "mobilenet")
EFFECTIVE_BITS = (8.0, 9.0, 12.0)


def peer(case: Case, bits: float) -> nn.Module:
    """The model as Model-Optimizer quantizes it under a number of bits."""
    model = copy.deepcopy(case.model)
    found, _ = mtq.auto_quantize(
        model,
        constraints={"effective_bits": bits},
        quantization_formats=[mtq.INT8_DEFAULT_CFG],
        data_loader=list(case.calibration),
        forward_step=lambda module, batch: module(*batch),
        loss_func=lambda result, batch: result.square().mean(),
        num_calib_steps=len(case.calibration),
        num_score_steps=len(case.calibration),
    )
    return found.eval()


def bytes_of(model: nn.Module, case: Case) -> int:
    """Bytes of constants if the layers that are quantized had int8 weights here."""
    program = torch.export.export(case.model, case.calibration[0])
    gm = pq.convert(pq.prepare(program, pq.backends.get(BACKEND).quantizer("w8")))
    chosen = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if (weights := getattr(module, "weight_quantizer", None)) and weights.is_enabled
    }
    return sum(
        r.size_after + r.qparams if r.name in chosen else r.size_before
        for r in provenance_of(gm).sizes
    )


def measure(name: str, bits: float) -> dict[str, Any]:
    """One row: both cosines at the peer's size."""
    case = case_named(name)
    expected = outputs(case.model, case.held_out)
    begin = time.perf_counter()
    model = peer(case, bits)
    peer_seconds = time.perf_counter() - begin
    size = bytes_of(model, case)
    begin = time.perf_counter()
    found = pq.tune(
        case.model,
        case.calibration[0],
        calibration_data=case.calibration,
        backend=BACKEND,
        recipe="w8",
        budget={"bytes": size},
        menu=(),
        points=0,
        progress=False,
    )
    (point,) = (p for p in found.measured if p.recipe == found.recipe)
    return {
        "model": name,
        "effective_bits": bits,
        "bytes": size,
        "our_bytes": point.size,
        "peer_cosine": mean_cosine(expected, outputs(model, case.held_out)),
        "cosine": mean_cosine(expected, outputs(found.artifact.run, case.held_out)),
        "peer_seconds": peer_seconds,
        "seconds": time.perf_counter() - begin,
    }


def main() -> None:
    """Write the rows of the cases into benchmarks/results/tune_peers.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES)
    for name in parser.parse_args().cases:
        rows = [measure(name, bits) for bits in EFFECTIVE_BITS]
        for row in rows:
            print(row)
        write_results("tune_peers", rows, ("model", "effective_bits"))


if __name__ == "__main__":
    main()
