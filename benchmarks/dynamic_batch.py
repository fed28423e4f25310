"""What does a dynamic batch cost in a `.pte`, against one captured for the batch that is called?

    python -m benchmarks.dynamic_batch [--rounds 30]

Blocks whose slices and resizes ExecuTorch's settings leave outside of the delegate where the batch
is dynamic. `fixed` is captured for a batch of 1, `dynamic` for 1 to 8, `outside` too, with those
operators left where ExecuTorch leaves them. All are called with a batch of 1, in shuffled rounds,
on one thread.
"""

import argparse
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from unittest import mock

import torch
import torch.nn.functional as F
from executorch.backends.xnnpack.partition.config.generic_node_configs import (
    UpsampleBilinear2dConfig,
)
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import Node

import pt2e_quant as pq
from benchmarks.measure import interleave
from benchmarks.results import write_results
from pt2e_quant.backends.xnnpack import partition, slices
from pt2e_quant.backends.xnnpack.conditions import slices_neighbours
from pt2e_quant.backends.xnnpack.passes import data_movement


class Attention(nn.Module):
    """Queries, keys and values of one linear, as timm's vision transformers have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.depth = width // 32, 32
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        size, tokens, width = x.shape
        joined = self.qkv(x).view(size, tokens, 3, self.heads, self.depth)
        q, k, v = joined.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(y.reshape(size, tokens, width))


class Gated(nn.Module):
    """A gated layer: the halves of one linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Pyramid(nn.Module):
    """A coarse map resized and added to a fine one, as segmentation heads do."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fine, self.coarse = (
            nn.Conv2d(3, channels, 3, 2, 1),
            nn.Conv2d(channels, channels, 3, 2, 1),
        )
        self.head = nn.Conv2d(channels, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        fine = torch.relu(self.fine(x))
        coarse = torch.relu(self.coarse(fine))
        resized = F.interpolate(coarse, size=fine.shape[-2:], mode="bilinear")
        return self.head(fine + resized)


class Reflected(nn.Module):
    """A convolution of an image that is reflected at its border, as style transfer has them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 1)
        self.pad, self.last = nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        return self.last(self.pad(torch.relu(self.first(x))))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention, 64 tokens of 192": (lambda: Attention(192), (64, 192)),
    "gated layer, 16 tokens of 256": (lambda: Gated(256), (16, 256)),
    "pyramid, 16 channels of 128 x 128": (lambda: Pyramid(16), (3, 128, 128)),
    "reflected border, 16 channels of 64 x 64": (lambda: Reflected(16), (3, 64, 64)),
}


def slices_outside() -> AbstractContextManager[object]:
    """ExecuTorch's own settings for slices and bilinear resizes."""

    def is_fixed(call: Node) -> bool:
        sizes = (*call.all_input_nodes[0].meta["val"].shape, *call.meta["val"].shape)
        return slices_neighbours(call) and all(isinstance(size, int) for size in sizes)

    stack = ExitStack()
    for module in (slices, data_movement):
        stack.enter_context(mock.patch.object(module, "slices_neighbours", is_fixed))
    theirs = {UpsampleBilinear2dConfig: UpsampleBilinear2dConfig}
    stack.enter_context(mock.patch.dict(partition._OURS, theirs))
    return stack


def measure(name: str, rounds: int) -> dict[str, object]:
    """One row: microseconds of the three files."""
    make, sizes = CASES[name]
    x = torch.randn(2, *sizes, generator=torch.Generator().manual_seed(0))

    def lowered(*, is_dynamic: bool, within: AbstractContextManager[object]) -> pq.Artifact:
        torch.manual_seed(0)
        model = make().eval()
        shapes = ({0: Dim("batch", min=1, max=8)},) if is_dynamic else None
        example = x if is_dynamic else x[:1]
        program = torch.export.export(model, (example,), dynamic_shapes=shapes)
        with within:
            return pq.quantize(
                program, calibration_data=[(example,)], backend="xnnpack", progress=False
            )

    files = {
        "fixed": lowered(is_dynamic=False, within=nullcontext()),
        "dynamic": lowered(is_dynamic=True, within=nullcontext()),
        "outside": lowered(is_dynamic=True, within=slices_outside()),
    }
    calls = {key: (lambda file=file: file.run(x[:1])) for key, file in files.items()}
    found = {
        key: timing.median_ms * 1e3 for key, timing in interleave(calls, rounds=rounds).items()
    }
    return {
        "block": name,
        **{f"{key}_us": round(time, 1) for key, time in found.items()},
        "dynamic_by_fixed": round(found["dynamic"] / found["fixed"], 2),
        "outside_by_fixed": round(found["outside"] / found["fixed"], 2),
    }


def main() -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--blocks", nargs="*", default=list(CASES), choices=list(CASES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.blocks:
        row = measure(name, given.rounds)
        print(row, flush=True)
        write_results("dynamic_batch", [row], ("block",))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # others' own
    with torch.no_grad():
        main()
