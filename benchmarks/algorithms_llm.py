"""What do algorithms win back of the perplexity that few bits cost a language model?

Run `python -m benchmarks.algorithms_llm`. A small Llama is trained first, where `build/llama` has
none. Every figure is of the converted graph, run by torch, so that no runtime has a say.
"""

import argparse
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.nn import functional as F
from transformers import LlamaForCausalLM

import pt2e_quant as pq
from benchmarks.llama_model import BRIEF, TINY, TrainedLlama, trained_llama
from benchmarks.llm_quality import float_logits, perplexity
from benchmarks.llm_text import draw_windows, encode, read_sources
from benchmarks.measure import sqnr_db
from benchmarks.reference_gptq import reference_gptq
from benchmarks.results import write_results
from pt2e_quant.core.granularity import PerToken
from pt2e_quant.core.specs import Q_ANNOTATION_KEY, QuantizationAnnotation, QuantizationSpec
from pt2e_quant.graph.ops import LINEAR, argument, is_call
from pt2e_quant.observers.static.minmax import PerChannelMinMaxObserver
from pt2e_quant.passes.algorithms import Gptq, Lwc, QuaRot
from pt2e_quant.passes.algorithms.registry import names
from pt2e_quant.pt2e.observers.affine import AffineQuantizedPlaceholderObserver, MappingType

SCHEMES = ("w4_g128", "w4", "w3_g128", "w3", "a8w4_g32", "w4a4")
LENGTH = 128
SEED = 12
console = Console(width=120)
Row = dict[str, object]


class FourByFour:
    """Annotates linears with 4-bit activations per token and 4-bit weights per channel."""

    def transform_for_annotation(self, gm: GraphModule) -> GraphModule:
        """Leave the graph."""
        return gm

    def annotate(self, gm: GraphModule) -> GraphModule:
        """Annotate every linear but the head, which QuaRot leaves float too."""
        limits = {"dtype": torch.int8, "quant_min": -8, "quant_max": 7}
        weight = QuantizationSpec(
            observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
            **limits,
        )
        tokens = QuantizationSpec(
            observer_or_fake_quant_ctr=lambda **_: AffineQuantizedPlaceholderObserver(
                MappingType.SYMMETRIC, torch.int8, PerToken(), -8, 7, is_dynamic=True
            ),
            is_dynamic=True,
            **limits,
        )
        linears = [node for node in gm.graph.nodes if is_call(node, LINEAR)]
        for node in linears[:-1]:
            specs = {argument(node, "input"): tokens, argument(node, "weight"): weight}
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(input_qspec_map=specs)
        return gm

    def validate(self, gm: GraphModule) -> None:
        """Refuse nothing."""


@dataclass(frozen=True, slots=True)
class Method:
    """What is done to weights.

    Args:
        algorithms: as `prepare_pt2e` takes them.
        search: how scales are found, where a recipe has a say.
        by_block: each block sees the quantized ones before.
    """

    algorithms: tuple[object, ...] = ()
    search: str = "min_max"
    by_block: bool = False


METHODS: Mapping[str, Method | None] = {
    "round to nearest": Method(),
    "reference gptq": None,
    "least squares": Method(search="mse"),
    "hqq": Method(("hqq",)),
    "awq": Method(("awq",)),
    "lwc": Method((Lwc(steps=40),)),
    "gptq": Method(("gptq",)),
    "gptq, least squares": Method(("gptq",), "mse"),
    "gptq, groups as reached": Method((Gptq(act_order=False, static_groups=False),)),
    "gptq by block": Method(("gptq",), "mse", by_block=True),
    "awq + gptq": Method(("awq", "gptq")),
    **({"auto_round": Method(("auto_round",))} if "auto_round" in names() else {}),
}
ROTATED: Mapping[str, Method | None] = {
    "round to nearest": Method(),
    "gptq": Method(("gptq",)),
    "quarot": Method(("quarot",)),
    "quarot, online": Method((QuaRot(online_block=128),)),
    "quarot + gptq": Method(("quarot", "gptq")),
    "quarot, online + gptq": Method((QuaRot(online_block=128), "gptq")),
}


class Logits(nn.Module):
    """A language model as ids to logits."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of all tokens."""
        return self.model(input_ids=ids, use_cache=False).logits


@dataclass(frozen=True, slots=True)
class Subject:
    """The float model's program, calibration batches, and held-out windows with its logits."""

    name: str
    model: LlamaForCausalLM
    program: ExportedProgram
    batches: list[Tensor]
    windows: Tensor
    logits: list[Tensor]


def make_subject(trained: TrainedLlama, batches: int, windows: int) -> Subject:
    """Calibrate on texts of the training half, judge on others."""
    own = encode(trained.tokenizer, read_sources().training[:12])
    data = draw_windows(own, 4 * batches, LENGTH, SEED).split(4)
    held = draw_windows(trained.held_out, windows, LENGTH, SEED)
    config = trained.model.config
    return Subject(
        name=f"llama {config.num_hidden_layers}x{config.hidden_size}",
        model=trained.model,
        program=torch.export.export(Logits(trained.model), (data[0],)),
        batches=[batch.contiguous() for batch in data],
        windows=held,
        logits=float_logits(trained.model, held),
    )


def quantize(subject: Subject, scheme: str, method: Method | None) -> nn.Module:
    """Return the converted graph of one scheme and method; None is the reference."""
    if method is None:
        bits, _, group = scheme.removeprefix("w").partition("_g")
        size = int(group) if group else None
        return Logits(reference_gptq(subject.model, subject.batches, int(bits), size))
    if scheme == "w4a4":
        quantizer: object = FourByFour()
    else:
        recipe = pq.backends.get("onnx").quantizer(scheme).with_search(method.search)
        quantizer = recipe.remove_algorithm("balance_channels")
    prepared = pq.prepare_pt2e(subject.program, quantizer, algorithms=method.algorithms)
    run: Callable[..., GraphModule] = pq.calibrate_by_block if method.by_block else pq.calibrate
    return pq.convert_pt2e(run(prepared, subject.batches, progress=False))


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures on held-out windows.

    Args:
        perplexity: of the text.
        divergence: mean of KL(float, quantized) over all tokens, in nats.
        sqnr_db: of the logits.
    """

    perplexity: float
    divergence: float
    sqnr_db: float


@torch.no_grad()
def judge(subject: Subject, gm: nn.Module) -> Quality:
    """Run a quantized graph over the held-out windows."""
    found = [row for batch in subject.windows.split(4) for row in gm(batch.contiguous())]
    pairs = zip(found, subject.logits, strict=True)
    apart = [
        F.kl_div(
            a.double().log_softmax(-1),
            b.double().log_softmax(-1),
            reduction="none",
            log_target=True,
        ).sum(-1)
        for a, b in pairs
    ]
    divergence = float(torch.cat(apart).mean())
    return Quality(perplexity(found, subject.windows), divergence, sqnr_db(subject.logits, found))


def measure(subject: Subject, scheme: str, chosen: set[str]) -> list[Row]:
    """Return a row for each method of a scheme; what is won back is a share of rounding's loss."""
    floating = perplexity(subject.logits, subject.windows)
    rows: list[Row] = []
    plain = Quality(floating, 0.0, 0.0)
    for name, method in (ROTATED if scheme == "w4a4" else METHODS).items():
        if chosen and name not in chosen and name != "round to nearest":
            continue
        if method is None and scheme.startswith("a"):
            continue  # the reference rounds weights alone
        start = time.process_time()
        gm = quantize(subject, scheme, method)
        seconds = time.process_time() - start
        found = judge(subject, gm)
        plain = found if name == "round to nearest" else plain
        lost, of = found.perplexity - floating, plain.perplexity - floating
        row: Row = {
            "model": subject.name,
            "scheme": scheme,
            "method": name,
            "float_perplexity": round(floating, 3),
            "perplexity": round(found.perplexity, 3),
            "lost": round(lost, 3),
            "won_back": round(1 - lost / of, 3),
            "divergence": round(found.divergence, 6),
            "divergence_won_back": round(1 - found.divergence / plain.divergence, 3),
            "sqnr_db": round(found.sqnr_db, 2),
            "cpu_s": round(seconds, 1),
        }
        rows.append(row)
    return rows


def show(rows: list[Row]) -> None:
    """Print one table."""
    columns = ("scheme", "method", "perplexity", "lost", "won_back", "divergence")
    columns = (*columns, "divergence_won_back", "sqnr_db", "cpu_s")
    table = Table(*columns, title=f"{rows[0]['model']}, float {rows[0]['float_perplexity']}")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)


def main() -> None:
    """Measure the asked schemes and methods."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES)
    parser.add_argument("--methods", nargs="+", default=(), help="besides plain rounding")
    parser.add_argument("--batches", type=int, default=8, help="of four windows, to calibrate")
    parser.add_argument("--windows", type=int, default=32, help="held-out windows of text")
    parser.add_argument("--tiny", action="store_true", help="a model trained in seconds")
    parser.add_argument("--no-write", action="store_true", help="leave the results file alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trained = trained_llama(TINY, BRIEF) if options.tiny else trained_llama()
    subject = make_subject(trained, options.batches, options.windows)
    rows: list[Row] = []
    for scheme in options.schemes:
        found = measure(subject, scheme, set(options.methods))
        rows += found
        if not options.no_write:
            write_results("algorithms_llm", found, ("model", "scheme", "method"))
    show(rows)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # torch.export's own
    logging.getLogger("root").setLevel(logging.ERROR)
    main()
