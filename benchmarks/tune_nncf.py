"""`pq.tune` beside NNCF's quantization with accuracy control, at equal bytes of constants.

    pip install nncf
    python -m benchmarks.tune_nncf digits vit

NNCF quantizes an ONNX model to static int8, and puts operators back to float until the cosine with
the float model has fallen by no more than asked. `pq.tune` is given as many bytes for a mix of
static int8 and float. Both run in ONNX Runtime, on data that neither has seen.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nncf
import onnx
import onnxruntime
import torch
from torch import Tensor

import pt2e_quant as pq
from benchmarks.measure import mean_cosine
from benchmarks.results import write_results
from benchmarks.tune import BACKEND, Case, case_named, outputs

DROPS = {"digits": (1e-5, 3e-6), "vit": (2e-5, 5e-6)}
"""How far the cosine of each model may fall."""


def float_onnx(case: Case) -> onnx.ModelProto:
    """The float model as ONNX."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float.onnx"
        torch.onnx.export(case.model, case.calibration[0], str(path), dynamo=True, verbose=False)
        return onnx.load(path)


def results(model: onnx.ModelProto, batches: Sequence[Any]) -> list[Tensor]:
    """The result of each batch."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    name = session.get_inputs()[0].name
    return [torch.from_numpy(session.run(None, {name: x.numpy()})[0]) for (x,) in batches]


def peer(case: Case, drop: float) -> onnx.ModelProto:
    """The model as NNCF mixes int8 and float in it."""
    model = float_onnx(case)
    name = model.graph.input[0].name
    expected = outputs(case.model, case.calibration)
    data = nncf.Dataset(list(case.calibration), lambda batch: {name: batch[0].numpy()})

    def validate(model: onnx.ModelProto, _: Any) -> tuple[float, None]:
        return mean_cosine(expected, results(model, case.calibration)), None

    return nncf.quantize_with_accuracy_control(model, data, data, validate, max_drop=drop)


def bytes_of(model: onnx.ModelProto) -> int:
    """Bytes of the constants, a weight that is quantized as one byte an element."""
    quantized = {n.input[0] for n in model.graph.node if n.op_type == "QuantizeLinear"}
    return sum(
        torch.Size(tensor.dims).numel()
        * (1 if tensor.name in quantized or tensor.data_type == onnx.TensorProto.INT8 else 4)
        for tensor in model.graph.initializer
        if tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.INT8)
    )


def measure(name: str, drop: float) -> dict[str, Any]:
    """One row: both cosines at the peer's size."""
    case = case_named(name)
    expected = outputs(case.model, case.held_out)
    begin = time.perf_counter()
    model = peer(case, drop)
    peer_seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    found = pq.tune(
        case.model,
        case.calibration[0],
        calibration_data=case.calibration,
        backend=BACKEND,
        recipe="int8",
        budget={"bytes": bytes_of(model)},
        menu=(),
        points=0,
        progress=False,
    )
    (point,) = (p for p in found.measured if p.recipe == found.recipe)
    return {
        "model": name,
        "drop": drop,
        "bytes": bytes_of(model),
        "our_bytes": point.size,
        "peer_cosine": mean_cosine(expected, results(model, case.held_out)),
        "cosine": mean_cosine(expected, outputs(found.artifact.run, case.held_out)),
        "peer_seconds": peer_seconds,
        "seconds": time.perf_counter() - begin,
    }


def main() -> None:
    """Write the rows of the cases into benchmarks/results/tune_nncf.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[*DROPS])
    for name in parser.parse_args().cases:
        rows = [measure(name, drop) for drop in DROPS[name]]
        for row in rows:
            print(row)
        write_results("tune_nncf", rows, ("model", "drop"))


if __name__ == "__main__":
    main()
