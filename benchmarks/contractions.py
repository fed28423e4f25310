"""What do products by constants that are no plain matrix cost, in float and as int8 linears?

    python -m benchmarks.contractions [--rounds 30]

Each product is lowered for both runtimes: in float as the model writes it, in float as
`products_as_linears` does, and in int8 as linears. The artifacts are called in shuffled rounds,
one thread. Times are in microseconds.
"""

import argparse
import warnings
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.measure import interleave
from benchmarks.results import write_results
from pt2e_quant.passes.cleanup import contractions
from pt2e_quant.passes.cleanup.linear_forms import products_as_linears

Product = Callable[[Tensor, Tensor], Tensor]


def _heads(x: Tensor, w: Tensor) -> Tensor:
    """Blocks of a block-diagonal layer: [B, T, H * K] by [H, K, N]."""
    parts = x.unflatten(-1, w.shape[:2]).transpose(1, 2)
    return (parts @ w).transpose(1, 2).flatten(2)


CASES: dict[str, tuple[Product, tuple[int, ...], tuple[int, ...]]] = {
    f"{count} blocks of {size}, {rows} rows": (_heads, (1, rows, count * size), (count, size, size))
    for count, size in ((32, 32), (16, 64), (8, 128), (32, 128), (4, 256), (16, 256))
    for rows in (1, 196)
} | {
    f"from the left, {steps} steps, {width} wide": (
        lambda x, w: w @ x,
        (1, steps, width),
        (steps, steps),
    )
    for steps, width in ((49, 128), (196, 256))
}


class Model(nn.Module):
    """A product, and a linear behind it that reads its result."""

    def __init__(self, product: Product, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.product, self.head = product, nn.Linear(width, 64)
        self.w = nn.Parameter(torch.randn(shape, generator=generator) * shape[-2] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """As many rows as x has."""
        made: Tensor = self.head(self.product(x, self.w))
        return made


FORMS = ("float", "float linears", "int8 linears", "by default")


def artifact(model: nn.Module, x: Tensor, name: str, form: str) -> pq.Artifact:
    """A model for one backend."""
    backend = pq.backends.get(name)
    quantizer = (backend if form == "by default" else backend.allowing_slower()).quantizer("int8")
    if form.startswith("float"):
        quantizer.set_global(None)
    if form == "float":
        quantizer.transforms = tuple(
            p for p in quantizer.transforms if p is not products_as_linears
        )
    # However small the matrices of a stack are.
    least = contractions.LEAST_MATRIX if form == "by default" else 0
    with patch.object(contractions, "LEAST_MATRIX", least):
        prepared = pq.prepare_pt2e(
            torch.export.export(model, (x,)), quantizer, strict=False, effort="fast"
        )
    canonical = pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False))
    return backend.lower(canonical, (x,))


def main() -> None:
    """Measure every product on both runtimes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for case in given.cases:
        for backend in ("onnx", "xnnpack"):
            row = {"product": case, "backend": backend} | measure(case, backend, given.rounds)
            print(row, flush=True)
            write_results("contractions", [row], ("product", "backend"))


def measure(case: str, backend: str, rounds: int) -> dict[str, object]:
    """Times of one product on one runtime."""
    product, size, shape = CASES[case]
    x = torch.randn(size, generator=torch.Generator().manual_seed(1))
    model = Model(product, shape, size[-1]).eval()
    made = {form: artifact(model, x, backend, form) for form in FORMS}
    calls = {form: (lambda a: lambda: a.run(x))(one) for form, one in made.items()}
    times = {k: v.median_ms * 1e3 for k, v in interleave(calls, rounds=rounds).items()}
    return {
        **{f"{form}, us": round(time, 1) for form, time in times.items()},
        "int8 by float": round(times["int8 linears"] / times["float"], 2),
    }


if __name__ == "__main__":
    with torch.no_grad():
        main()
