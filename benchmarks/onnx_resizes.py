"""How long does an `.onnx` take for bicubic resizes and uneven pools, beside torch's float file?

    python -m benchmarks.onnx_resizes [--rounds 15]

Each function stands behind a convolution. Ours is float there too, so both files differ by how the
function is written. They are called in shuffled rounds, one thread. `bare` is our file without the
function.
"""

import argparse
import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.measure import interleave
from benchmarks.peers import onnx_float
from benchmarks.results import write_results

SIZES = ((3, 32, 32), (32, 56, 56), (3, 224, 224))
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "bicubic by 2": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "bicubic by 4": lambda x: F.interpolate(x, scale_factor=4, mode="bicubic"),
    "bicubic by 1.5": lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"),
    "bicubic to 40 x 40": lambda x: F.interpolate(x, (40, 40), mode="bicubic"),
    "bicubic to 40 x 40, anti-aliased": lambda x: F.interpolate(
        x, (40, 40), mode="bicubic", antialias=True
    ),
    "adaptive_avg_pool2d to 3": lambda x: F.adaptive_avg_pool2d(x, 3),
}
_FEW_PIXELS = 60 * 60
"""torch's exporter writes an operator for each pixel of a window: minutes for larger images."""


class Behind(nn.Module):
    """A function behind a convolution."""

    def __init__(self, channels: int, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(channels, channels, 1), function

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        return self.function(self.conv(x))


def _model(channels: int, function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Behind(channels, function).eval()


def measure(name: str, size: tuple[int, int, int], rounds: int) -> dict[str, object]:
    """One row: microseconds of both files and of ours without the function, and bytes of ours."""
    x = torch.randn(1, *size, generator=torch.Generator().manual_seed(0))
    made, bare = (
        pq.quantize(
            _model(size[0], function),
            (x,),
            calibration_data=[(x,)],
            backend="onnx",
            effort="fast",
            progress=False,
        )
        for function in (FUNCTIONS[name], lambda y: y)
    )
    peer = onnx_float(_model(size[0], FUNCTIONS[name]), (x,))
    found = interleave(
        {"ours": lambda: made.run(x), "theirs": peer.bind(x), "bare": lambda: bare.run(x)},
        rounds=rounds,
    )
    own, theirs, around = (found[key].median_ms * 1e3 for key in ("ours", "theirs", "bare"))
    return {
        "function": name,
        "x": size,
        "ours_us": round(own),
        "onnx_float_us": round(theirs),
        "bare_us": round(around),
        "times_as_fast": round(theirs / own, 1),
        "bytes_beside_bare": made.size_bytes - bare.size_bytes,
    }


def main() -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in FUNCTIONS:
        few = [size for size in SIZES if math.prod(size[1:]) <= _FEW_PIXELS]
        for size in few if "pool" in name else SIZES:
            row = measure(name, size, given.rounds)
            print(row, flush=True)
            write_results("onnx_resizes", [row], ("function", "x"))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # others' own
    with torch.no_grad():
        main()
