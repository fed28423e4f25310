"""What do the experts of a mixture of experts cost, as linears and as the model has them?

    python -m benchmarks.experts [--rounds 30]

A block of Mixtral with random weights is lowered for both runtimes: in float and with int8 weights
and activations, with and without the passes that write its experts as linears
(`experts_as_linears`; `split_experts` for ONNX Runtime). The artifacts are called in shuffled
rounds, one thread. Times are in microseconds.
"""

import argparse
import warnings
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import pt2e_quant as pq
from benchmarks.measure import interleave
from benchmarks.results import write_results
from pt2e_quant.passes.cleanup.experts_as_linears import experts_as_linears

WIDTH, INNER = 256, 512
MIXTURES = {"8 experts, 2 chosen": (8, 2), "32 experts, 4 chosen": (32, 4)}
TOKENS = (1, 16, 128)
FORMS = {"float": None, "int8": "int8_dynamic"}


class Block(nn.Module):
    """A mixture of experts, by one of transformers' implementations."""

    def __init__(self, experts: int, chosen: int, implementation: str) -> None:
        super().__init__()
        config = MixtralConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_local_experts=experts,
            num_experts_per_tok=chosen,
        )
        config._experts_implementation = implementation
        self.block = MixtralSparseMoeBlock(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.block.parameters():
                weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """As large as x."""
        found: Tensor = self.block(x)
        return found


def artifact(model: nn.Module, x: Tensor, name: str, form: str, *, as_linears: bool) -> pq.Artifact:
    """A block for one backend."""
    backend = pq.backends.get(name).allowing_slower()
    if not as_linears:
        kept = tuple(p for p in backend.transforms if p is not experts_as_linears)
        backend = replace(backend, transforms=kept)
    quantizer = backend.quantizer(FORMS[form] or "int8_dynamic")
    if FORMS[form] is None:
        quantizer.set_global(None)
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), quantizer, strict=False)
    return backend.lower(pq.convert_pt2e(prepared), (x,))


def main() -> None:
    """Measure every mixture on both runtimes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--mixtures", nargs="*", default=list(MIXTURES), choices=list(MIXTURES))
    given = parser.parse_args()
    rounds = given.rounds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for mixture in given.mixtures:
        experts, chosen = MIXTURES[mixture]
        for tokens in TOKENS:
            x = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(1))
            # What users are told to export for one token at a time, and transformers' default.
            model = Block(experts, chosen, "batched_mm" if tokens == 1 else "grouped_mm").eval()
            for backend in ("onnx", "xnnpack"):
                row = {"mixture": mixture, "tokens": tokens, "backend": backend}
                row |= measure(model, x, backend, rounds)
                print(row, flush=True)
                write_results("experts", [row], ("mixture", "tokens", "backend"))


def measure(model: nn.Module, x: Tensor, backend: str, rounds: int) -> dict[str, object]:
    """Times and sizes of one block on one runtime."""
    made = {
        f"{form} {'linears' if as_linears else 'written'}": artifact(
            model, x, backend, form, as_linears=as_linears
        )
        for form in FORMS
        for as_linears in (False, True)
    }
    calls = {key: (lambda a: lambda: a.run(x))(one) for key, one in made.items()}
    times = {k: v.median_ms * 1e3 for k, v in interleave(calls, rounds=rounds).items()}
    sizes = {key: one.report.size_bytes for key, one in made.items()}
    return {
        **{f"{key}, us": round(value) for key, value in times.items()},
        "int8 bytes by float": round(sizes["int8 linears"] / sizes["float written"], 3),
        "int8 bytes by float, as written": round(sizes["int8 written"] / sizes["float written"], 3),
    }


if __name__ == "__main__":
    with torch.no_grad():
        main()
