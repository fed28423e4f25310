"""What does `int8_dynamic` gain in ONNX Runtime where a program has one row, as one token has?

Run `python -m benchmarks.onnx_one_row`. A stack of gated blocks without attention is lowered with
a static row and with dynamic rows, as ONNX Runtime's scheme (`int8_dynamic_per_tensor`), by ONNX
Runtime's `quantize_dynamic` and in float, and called with one row: medians of calls in turn on one
thread, in one process.
"""

import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.peers import onnx_float
from benchmarks.peers_low_bit import onnx_dynamic
from benchmarks.results import write_results
from pt2e_quant.backends.measure_speed import times_in_turn

SIZES = ((64, 3), (256, 3), (768, 2))
ONNX = pq.backends.get("onnx")


class Gated(nn.Module):
    """What a block of a language model has beside its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[rows, width] to the same."""
        x = x + self.out(self.query(self.norm(x)))
        normed = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def lowered(model: nn.Module, recipe: str, *, rows: int | None) -> bytes:
    """The program of one static row, or of dynamic rows (`rows` in the example)."""
    width = next(model.parameters()).shape[-1]
    shapes = None if rows is None else ({0: torch.export.Dim.DYNAMIC},)
    x = torch.randn(rows or 1, width)
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    prepared = pq.prepare(program, ONNX.quantizer(recipe))
    return ONNX.lower(pq.convert(prepared, progress=False)).model


def caller(model: bytes, x: Tensor) -> Callable[[], object]:
    """A call of a model on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    feeds = {session.get_inputs()[0].name: np.asarray(x)}
    return partial(session.run, None, feeds)


def measure(width: int, depth: int) -> dict[str, object]:
    """Median microseconds of every program of one size."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Gated(width) for _ in range(depth)]).eval(), torch.randn(1, width)
    floating = onnx_float(model, (x,)).data
    models = {
        "float": floating,
        "quantize_dynamic": onnx_dynamic(floating).data,
        "int8_dynamic_per_tensor": lowered(model, "int8_dynamic_per_tensor", rows=None),
        "int8_dynamic, static row": lowered(model, "int8_dynamic", rows=None),
        "int8_dynamic, dynamic rows": lowered(model, "int8_dynamic", rows=4),
    }
    times = times_in_turn([caller(m, x) for m in models.values()], rounds=1000, seconds=10)
    found = {name: round(statistics.median(us), 1) for name, us in zip(models, times, strict=True)}
    return {"width": width, "blocks": depth, "us": found}


def main() -> None:
    """Measure, print, write."""
    rows = [measure(width, depth) for width, depth in SIZES]
    for row in rows:
        print(row)
    write_results("onnx_one_row", rows, ("width", "blocks"))


if __name__ == "__main__":
    main()
