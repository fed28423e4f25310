"""How long does a nearest resize between two convolutions take on ExecuTorch, in int8 and float?

Run `python -m benchmarks.xnnpack_resize`: least times of calls, one thread, of our int8 program,
our float program, and ExecuTorch's own float program, in microseconds. Writes
`benchmarks/results/xnnpack_resize.json`.
"""

import json
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.extension.pybindings import portable_lib
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.results import FOLDER, installed_version
from pt2e_quant.backends.measure_speed import times_in_turn
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.load_program import ForwardCall
from pt2e_quant.graph.editor import Editor
from pt2e_quant.kernels.onednn.speed import cpu_slug

__all__ = []

_SHAPES = ((1, 64, 32, 32), (1, 16, 16, 16))
_SCALES = (2.0, 1.5, 4.0)


class Resizes(nn.Module):
    """A nearest resize between two pointwise convolutions."""

    def __init__(self, channels: int, scale: float) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, 8, 1)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Map images to images."""
        made: Tensor = self.second(F.interpolate(self.first(x), scale_factor=self.scale))
        return made


def _programs(model: nn.Module, x: Tensor) -> dict[str, Callable[[], object]]:
    """Calls of one model's programs."""
    integer = pq.quantize(
        model, (x,), calibration_data=[(x,)], backend="xnnpack", effort="fast", progress=False
    )
    gm = torch.export.export(model, (x,)).module()
    Editor(gm).erase_dead([n for n in gm.graph.nodes if n.op == "call_module"])
    ours = BACKEND.lower(gm, (x,), verify=False)
    edge = to_edge_transform_and_lower(
        torch.export.export(model, (x,)), partitioner=[XnnpackPartitioner()]
    )
    peer = ForwardCall(bytes(edge.to_executorch().buffer))
    return {
        "int8": partial(integer.run, x),
        "float": partial(ours.run, x),
        "executorch": partial(peer.run, [x]),
    }


def main() -> None:
    """Measure, print and write."""
    portable_lib._unsafe_reset_threadpool(1)
    torch.set_num_threads(1)
    rows = []
    for shape in _SHAPES:
        for scale in _SCALES:
            torch.manual_seed(0)
            calls = _programs(Resizes(shape[1], scale).eval(), torch.randn(shape))
            times = times_in_turn(list(calls.values()), rounds=150, seconds=5.0)
            us = {name: round(min(t), 1) for name, t in zip(calls, times, strict=True)}
            rows.append({"x": shape, "scale": scale, **us})
            print(f"{shape!s:18s} x {scale}", us, flush=True)
    result = {"cpu": cpu_slug(), "executorch": installed_version("executorch"), "rows": rows}
    (FOLDER / "xnnpack_resize.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
