"""`pq.tune` beside other tools' mixed precision, at equal bytes of constants.

    pip install nvidia-modelopt nncf
    python -m benchmarks.tune_peers modelopt --models digits vit mobilenet
    python -m benchmarks.tune_peers nncf --models digits vit mobilenet

Model-Optimizer's `auto_quantize` chooses which layers get int8 weights and inputs, under a number
of bits. The same layers with int8 weights are priced in this package's records. Its mix is measured
in torch. NNCF quantizes an ONNX model to static int8, and puts operators back to float until the
cosine with the float model has fallen by no more than asked. Its mix runs in ONNX Runtime.

`pq.tune` is given as many bytes as the peer's mix has. All are measured on data that none has seen.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx.numpy_helper
import onnxruntime
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.measure import mean_cosine
from benchmarks.results import write_results
from benchmarks.tune import BACKEND, Case, case_named, outputs
from pt2e_quant.analysis.menu import stored_sizes
from pt2e_quant.core.provenance import provenance_of

Results = Callable[[Sequence[Any]], list[Tensor]]
"""Gives the result of each batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another tool.

    Args:
        search: takes a case and what is asked for; returns bytes of constants, and what runs.
        recipe: of this package, what its mix has besides float.
        asked: for each model, what is asked for: effective bits, or a fall of the cosine.
    """

    search: Callable[[Case, float], tuple[int, Results]]
    recipe: str
    asked: Mapping[str, Sequence[float]]


def search_modelopt(case: Case, bits: float) -> tuple[int, Results]:
    """The model as Model-Optimizer quantizes it under a number of bits."""
    import modelopt.torch.quantization as mtq

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
    found.eval()
    return module_bytes(found, case), lambda batches: outputs(found, batches)


def module_bytes(model: nn.Module, case: Case) -> int:
    """Bytes of constants if the layers that are quantized had int8 weights here."""
    program = torch.export.export(case.model, case.calibration[0])
    gm = pq.convert(pq.prepare(program, pq.backends.get(BACKEND).quantizer("w8")))
    chosen = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if (weights := getattr(module, "weight_quantizer", None)) and weights.is_enabled
    }
    stored = stored_sizes(gm)
    return sum(
        stored[r.name] if r.name in chosen else r.size_before for r in provenance_of(gm).sizes
    )


def search_nncf(case: Case, drop: float) -> tuple[int, Results]:
    """The model as NNCF mixes int8 and float in it, for a fall of the cosine."""
    import nncf

    model = float_onnx(case)
    name = model.graph.input[0].name
    expected = outputs(case.model, case.calibration)
    data = nncf.Dataset(list(case.calibration), lambda batch: {name: batch[0].numpy()})

    def validate(model: onnx.ModelProto, _: Any) -> tuple[float, None]:
        return mean_cosine(expected, onnx_results(model, case.calibration)), None

    found = nncf.quantize_with_accuracy_control(model, data, data, validate, max_drop=drop)
    return onnx_bytes(found), lambda batches: onnx_results(found, batches)


def float_onnx(case: Case) -> onnx.ModelProto:
    """The float model as ONNX."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float.onnx"
        torch.onnx.export(case.model, case.calibration[0], str(path), dynamo=True, verbose=False)
        return onnx.load(path)


def onnx_results(model: onnx.ModelProto, batches: Sequence[Any]) -> list[Tensor]:
    """The result of each batch."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    name = session.get_inputs()[0].name
    return [torch.from_numpy(session.run(None, {name: x.numpy()})[0]) for (x,) in batches]


def onnx_bytes(model: onnx.ModelProto) -> int:
    """Bytes of the constants, a weight that is still to be quantized as one byte an element."""
    quantized = {n.input[0] for n in model.graph.node if n.op_type == "QuantizeLinear"}
    return sum(
        torch.Size(tensor.dims).numel()
        if tensor.name in quantized
        else onnx.numpy_helper.to_array(tensor).nbytes
        for tensor in model.graph.initializer
    )


PEERS = {
    "modelopt": Peer(
        search=search_modelopt,
        recipe="w8",
        asked=dict.fromkeys(("digits", "vit", "mobilenet"), (8.0, 9.0, 12.0)),
    ),
    "nncf": Peer(
        search=search_nncf,
        recipe="int8",
        asked={"digits": (1e-5, 3e-6), "vit": (2e-5, 5e-6), "mobilenet": (0.05, 0.02)},
    ),
}


def measure(name: str, model: str, asked: float) -> dict[str, object]:
    """One row: both cosines at the peer's size."""
    peer, case = PEERS[name], case_named(model)
    expected = outputs(case.model, case.held_out)
    begin = time.perf_counter()
    size, results = peer.search(case, asked)
    peer_seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    found = pq.tune(
        case.model,
        case.calibration[0],
        calibration_data=case.calibration,
        backend=BACKEND,
        recipe=peer.recipe,
        budget={"bytes": size},
        menu=(),
        points=0,
        progress=False,
    )
    (point,) = (p for p in found.measured if p.recipe == found.recipe)
    return {
        "peer": name,
        "model": model,
        "asked": asked,
        "bytes": size,
        "our_bytes": point.size,
        "peer_cosine": mean_cosine(expected, results(case.held_out)),
        "cosine": mean_cosine(expected, outputs(found.artifact.run, case.held_out)),
        "peer_seconds": peer_seconds,
        "seconds": time.perf_counter() - begin,
    }


def main() -> None:
    """Write the rows of a peer into benchmarks/results/tune_peers.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=[*PEERS])
    parser.add_argument("--models", nargs="*")
    parsed = parser.parse_args()
    peer = PEERS[parsed.peer]
    for model in parsed.models or peer.asked:
        rows = [measure(parsed.peer, model, asked) for asked in peer.asked[model]]
        for row in rows:
            print(row)
        write_results("tune_peers", rows, ("peer", "model", "asked"))


if __name__ == "__main__":
    main()
