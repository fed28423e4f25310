"""A three-layer LSTM of 160 steps against its float form on the same runtime.

`python -m benchmarks.recurrent` writes `benchmarks/results/recurrent.json`. The float form has the
same head in int8; its recurrent layers are left float by a rule.
"""

import json
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import pt2e_quant as pq

RESULTS = Path(__file__).parent / "results" / "recurrent.json"
BACKENDS = ("onnx", "cpu", "xnnpack")
RUNS = 15


class Stack(nn.Module):
    """1.4 million parameters, nearly all of them recurrent layers'."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(80, 256, 3, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the last step."""
        scores: Tensor = self.head(self.layer(x)[0][:, -1])
        return scores


def measure(backend: str) -> dict[str, float]:
    """Size, times in ms (interleaved runs, medians) and seconds to lower."""
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(1, 160, 80)
    target = pq.backends.get(backend)
    artifacts = []
    seconds = 0.0
    for rule in (None, "layer"):
        quantizer = target.quantizer("int8_dynamic")
        if rule:
            quantizer.set_module_name(rule, None)
        gm = pq.convert_pt2e(pq.prepare_pt2e(torch.export.export(model, (x,)), quantizer))
        start = time.process_time()
        artifacts.append(target.lower(gm, (x,)))
        seconds = seconds or time.process_time() - start
    times: list[list[float]] = [[], []]
    for _ in range(RUNS):
        for artifact, found in zip(artifacts, times, strict=True):
            start = time.perf_counter()
            artifact.run(x)
            found.append(1e3 * (time.perf_counter() - start))
    with torch.no_grad():
        quality = pq.sqnr_db(model(x), artifacts[0].run(x))
    float_bytes = sum(p.numel() * 4 for p in model.parameters())
    return {
        "size": round(artifacts[0].report.size_bytes / float_bytes, 4),
        "int8_ms": round(median(times[0][1:]), 2),
        "float_ms": round(median(times[1][1:]), 2),
        "lower_cpu_s": round(seconds, 1),
        "sqnr_db": round(quality, 1),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {backend: measure(backend) for backend in BACKENDS}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
