"""How long does GPTQ take on a Llama's layers, beside the paper's algorithm in plain torch?

Run `python -m benchmarks.gptq_time`. Layers of a Llama of about 100 M parameters (12 of width 768,
random weights: the time is that of trained ones), CPU seconds on one thread. Layers cost alike, so
a few say what all take. The reference is `benchmarks.reference_gptq`, column by column in float64.
`--methods llm-compressor` times that package, where it is installed: llmcompressor 0.14 asks for
transformers below 5.18, so it needs an environment of its own. GPTQModel 7.7 asks for torch 2.14.
"""

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import pt2e_quant as pq
from benchmarks.algorithms_llm import Logits
from benchmarks.llama_model import LlamaShape
from benchmarks.reference_gptq import reference_gptq
from benchmarks.results import write_results

SCHEME, BITS, GROUP = "w4_g128", 4, 128
VOCABULARY = 2048
LENGTH = 128
OURS = ("gptq", "gptq by block", "reference gptq")


def ours(model: LlamaForCausalLM, batches: list[Tensor], *, by_block: bool) -> nn.Module:
    """Return the converted graph; its head stays float, as the reference leaves it."""
    quantizer = pq.backends.get("onnx").quantizer(SCHEME).remove_algorithm("balance_channels")
    quantizer.set_module_name("model.lm_head", None)
    program = torch.export.export(Logits(model), (batches[0],))
    prepared = pq.prepare_pt2e(program, quantizer, algorithms=["gptq"])
    run = pq.calibrate_by_block if by_block else pq.calibrate
    return pq.convert_pt2e(run(prepared, batches, progress=False))


def llm_compressor(model: LlamaForCausalLM, batches: list[Tensor]) -> nn.Module:
    """Return the model as llm-compressor leaves it: linears W4A16 in groups of 128, the head float.

    It reads the model and a processor from a folder, and needs a transformers of its own.
    """
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from tokenizers import Tokenizer, models
    from torch.utils.data import DataLoader
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    processor = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", pad_token="a")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        made = LlamaForCausalLM.from_pretrained(folder).eval()
        ids = torch.cat(batches)
        columns = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
        oneshot(
            model=made,
            processor=processor,
            dataset=DataLoader(Dataset.from_dict(columns).with_format("torch"), batch_size=4),
            recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
            num_calibration_samples=len(ids),
            max_seq_length=LENGTH,
        )
    return made


def cpu_seconds(make: Callable[[], nn.Module]) -> float:
    """Return the CPU seconds of one run."""
    start = time.process_time()
    make()
    return time.process_time() - start


def main() -> None:
    """Time both, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=8, help="of four windows of 128 tokens")
    parser.add_argument("--methods", nargs="*", default=OURS, help="llm-compressor is another")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = LlamaShape(
        layers=options.layers,
        width=768,
        heads=12,
        kv_heads=12,
        intermediate=2048,
        vocabulary=VOCABULARY,
    )
    model = LlamaForCausalLM(shape.config()).eval()
    generator = torch.Generator().manual_seed(1)
    sizes = (4 * options.batches, LENGTH)
    batches = list(torch.randint(0, VOCABULARY, sizes, generator=generator).split(4))
    ways: dict[str, Callable[[], nn.Module]] = {
        "gptq": lambda: ours(model, batches, by_block=False),
        "gptq by block": lambda: ours(model, batches, by_block=True),
        "llm-compressor": lambda: llm_compressor(model, batches),
        "reference gptq": lambda: reference_gptq(model, batches, BITS, GROUP),
    }
    rows = []
    for name, make in ways.items():
        if options.methods and name not in options.methods:
            continue
        seconds = cpu_seconds(make)
        row = {"layers": options.layers, "width": 768, "scheme": SCHEME, "method": name}
        rows.append({**row, "tokens": 4 * options.batches * LENGTH, "cpu_s": round(seconds, 1)})
        Console(width=120).print(rows[-1])
    write_results("gptq_time", rows, ("layers", "width", "scheme", "method"))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # torch.export's own
    logging.getLogger("root").setLevel(logging.ERROR)
    main()
