"""How long does a `.pte` take for float functions, beside the float file of ExecuTorch?

    python -m benchmarks.delegated_functions [--functions mish bicubic] [--rounds 15]

Each function stands between a convolution and a product, of one image [1, 48, 64, 64]. Both files
are called in shuffled rounds, one thread: ours (recipe `int8`, the function in float) and the float
model as ExecuTorch's XNNPACK partitioner takes it. `bare` is our file without the function. A row
names the operators that run outside of the delegate.
"""

import argparse
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.measure import interleave
from benchmarks.peers import executorch_float
from benchmarks.results import write_results

FOUR, SEVEN, ELEVEN, ROW = (
    torch.randn(48, 1, *kernel, generator=torch.Generator().manual_seed(1))
    for kernel in ((4, 4), (7, 7), (11, 11), (31,))
)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": F.softplus,
    "mish": F.mish,
    "log_sigmoid": F.logsigmoid,
    "celu": F.celu,
    "selu": F.selu,
    "cube": lambda x: x**3,
    "reciprocal": lambda x: (x.abs() + 0.1).reciprocal(),
    "softmax of channels": lambda x: x.softmax(1),
    "log_softmax of channels": lambda x: x.log_softmax(1),
    "normalize channels": lambda x: F.normalize(x, dim=1),
    "normalize rows": lambda x: F.normalize(x, dim=-1),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "adaptive_avg_pool2d to 3": lambda x: F.adaptive_avg_pool2d(x, 3),
    "avg_pool2d, 2, ceil_mode": lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
    "avg_pool2d, 3, padded, ceil_mode": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool1d": lambda x: F.avg_pool1d(x.flatten(2), 4),
    "max_pool1d": lambda x: F.max_pool1d(x.flatten(2), 4),
    "group_norm, 8 groups": lambda x: F.group_norm(x, 8),
    "instance_norm": F.instance_norm,
    "layer_norm of channels": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (48,)).permute(
        0, 3, 1, 2
    ),
    "layer_norm of 3072 rows of 64": lambda x: F.layer_norm(x, (64,)),
    "pad 1, reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "pad 3, replicate": lambda x: F.pad(x, (3, 3, 3, 3), mode="replicate"),
    "depthwise conv2d, 7 x 7": lambda x: F.conv2d(x, SEVEN, padding=3, groups=48),
    "depthwise conv2d, 11 x 11": lambda x: F.conv2d(x, ELEVEN, padding=5, groups=48),
    "depthwise conv1d, 31": lambda x: F.conv1d(x.flatten(2), ROW, padding=15, groups=48),
    "depthwise conv_transpose2d, 4 x 4": lambda x: F.conv_transpose2d(
        x, FOUR, None, 2, 1, groups=48
    ),
    "product with what was expanded": lambda x: x * x.mean((2, 3), keepdim=True).expand_as(x),
}


class Behind(nn.Module):
    """A function behind a convolution."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(48, 48, 1), function

    def forward(self, x: Tensor) -> Tensor:
        """Run both, and double the result."""
        return self.function(self.conv(x)) * 2.0


def ours(function: Callable[[Tensor], Tensor], x: Tensor) -> pq.Artifact:
    """Our file."""
    torch.manual_seed(0)
    model = Behind(function).eval()
    return pq.quantize(
        model, (x,), calibration_data=[(x,)], backend="xnnpack", effort="fast", progress=False
    )


def measure(name: str, rounds: int) -> dict[str, object]:
    """One row: microseconds of the two files and of what stands around the function."""
    x = torch.randn(1, 48, 64, 64, generator=torch.Generator().manual_seed(0))
    made, bare = ours(FUNCTIONS[name], x), ours(lambda y: y, x)
    torch.manual_seed(0)
    peer = executorch_float(Behind(FUNCTIONS[name]).eval(), (x,))
    found = interleave(
        {"ours": lambda: made.run(x), "theirs": peer.bind(x), "bare": lambda: bare.run(x)},
        rounds=rounds,
    )
    own, theirs, around = (found[key].median_ms * 1e3 for key in ("ours", "theirs", "bare"))
    return {
        "function": name,
        "ours_us": round(own),
        "executorch_float_us": round(theirs),
        "bare_us": round(around),
        "times_as_fast": round(theirs / own, 1),
        "outside": sorted(made.contents().overloads),
    }


def main() -> None:
    """Measure the functions that are asked for and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", nargs="*", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.functions:
        row = measure(name, given.rounds)
        print(row, flush=True)
        write_results("delegated_functions", [row], ("function",))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # others' own
    with torch.no_grad():
        main()
