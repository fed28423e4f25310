"""What do strided slices of an image cost that a model joins, and the permute that they are?

    python -m benchmarks.strided_slices [--rounds 30]

The first layer of a YOLO (slices of rows and columns joined along the channels, a convolution) and
the merged patches of a Swin transformer (channels last, a linear), as a `.pte`. `slices` is our
file without the pass `blocks_as_permutes`; `permute` with it. Both are called in shuffled rounds,
one thread.
"""

import argparse
import warnings
from unittest import mock

import torch
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.measure import interleave
from benchmarks.results import write_results
from pt2e_quant.backends.xnnpack.passes import blocks_as_permutes

FOCUS, MERGED = "focus", "merged patches"
CASES = ((FOCUS, 3, 224), (FOCUS, 16, 64), (FOCUS, 64, 56), (MERGED, 96, 56), (MERGED, 192, 28))


class Focus(nn.Module):
    """Blocks of 2 x 2 pixels as channels, behind a convolution and in front of one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(channels, channels, 1), nn.Conv2d(4 * channels, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        x = self.first(x)
        parts = [x[..., i::2, j::2] for j in range(2) for i in range(2)]
        return self.last(torch.cat(parts, 1))


class MergedPatches(nn.Module):
    """Blocks of 2 x 2 tokens between linears."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Linear(channels, channels)
        self.last = nn.Linear(4 * channels, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        x = self.first(x)
        parts = [x[:, i::2, j::2] for j in range(2) for i in range(2)]
        return self.last(torch.cat(parts, -1))


def measure(name: str, channels: int, side: int, rounds: int) -> dict[str, object]:
    """One row: microseconds of both files."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, channels, side, side) if name == FOCUS else (1, side, side, channels)
    x = torch.randn(shape, generator=generator)

    def ours() -> pq.Artifact:
        torch.manual_seed(0)
        model = (Focus if name == FOCUS else MergedPatches)(channels).eval()
        return pq.quantize(
            model, (x,), calibration_data=[(x,)], backend="xnnpack", effort="fast", progress=False
        )

    with mock.patch.object(blocks_as_permutes, "_blocks", return_value=None):
        before = ours()
    after = ours()
    found = interleave(
        {"slices": lambda: before.run(x), "permute": lambda: after.run(x)}, rounds=rounds
    )
    slices, permute = (found[key].median_ms * 1e3 for key in ("slices", "permute"))
    return {
        "layer": name,
        "x": list(shape),
        "slices_us": round(slices),
        "permute_us": round(permute),
        "times_as_fast": round(slices / permute, 2),
    }


def main() -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        row = measure(*case, given.rounds)
        print(row, flush=True)
        write_results("strided_slices", [row], ("layer", "x"))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # others' own
    with torch.no_grad():
        main()
