"""This project's road for a Llama with its KV cache, and the exports that everybody starts from."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from transformers import LlamaForCausalLM

import pt2e_quant as pq
from benchmarks.measure import Stopwatch
from benchmarks.ours import BACKENDS, LABEL
from benchmarks.runtimes import Program, Runtime, load_program
from examples.cached_llama import Step, carry_cache, empty_cache, export_llama

PROMPT = 64
"""The longest call in tokens; a prompt of this length is what is timed."""
FLOAT_TABLE = ", float table"
"""What a label ends with where embedding and output layer stay in float."""


def context_of(model: LlamaForCausalLM) -> int:
    """Return how many tokens the cache holds."""
    return int(model.config.max_position_embeddings)


def export_with_state(model: LlamaForCausalLM) -> ExportedProgram:
    """Export with the cache as buffers, as ExecuTorch keeps it."""
    return export_llama(model, context=context_of(model), with_state=True, longest=PROMPT)


def export_without_state(model: LlamaForCausalLM) -> ExportedProgram:
    """Export with the cache as inputs and outputs, as ONNX Runtime needs it."""
    return export_llama(model, context=context_of(model), with_state=False, longest=PROMPT)


def prompt_of_zeros() -> tuple[Tensor, Tensor]:
    """Return ids and positions of a full prompt; the ids do not matter."""
    return torch.zeros(1, PROMPT, dtype=torch.int64), torch.arange(PROMPT)


def quantize_llama(
    runtime: Runtime,
    model: LlamaForCausalLM,
    recipe: str,
    prompt: Tensor,
    *,
    keep_table: bool = False,
) -> tuple[Program, float]:
    """Quantize without calibration, through a saved file.

    Args:
        runtime: Where it shall run.
        model: In float; it is not changed.
        recipe: A recipe of that runtime's backend.
        prompt: Ids int64[1, T] for the lowering's own check.
        keep_table: Leave the embedding and the output layer in float.

    Returns:
        The loaded program, and the bits per weight of its quantized constants, scales included.
    """
    name, suffix = BACKENDS[runtime]
    backend = pq.backends.get(name)
    with_state = runtime is Runtime.EXECUTORCH
    export = export_with_state if with_state else export_without_state
    watch = Stopwatch()
    ep = watch.run("export", lambda: export(model))
    quantizer = backend.quantizer(recipe)
    if keep_table:
        quantizer.set_operator("embedding", None)
        quantizer.set_module_name("model.lm_head", None)
    prepared = watch.run("prepare", lambda: pq.prepare_pt2e(ep, quantizer))
    quantized = watch.run("convert", lambda: pq.convert_pt2e(prepared))
    sample: tuple[object, ...] = (prompt, torch.arange(prompt.shape[1]))
    if not with_state:
        sample = (*sample, empty_cache(model, context_of(model)))
    artifact = watch.run("lower", lambda: backend.lower(quantized, sample))
    constants = [record for record in artifact.report.provenance.tensors if record.size_before]
    weights = sum(record.size_before for record in constants) / 4
    bits = 8 * sum(record.size_after for record in constants) / weights
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{suffix}"
        artifact.save(path)
        data = path.read_bytes()
    label = f"{LABEL} {recipe}{FLOAT_TABLE if keep_table else ''}"
    return load_program(label, runtime, data, watch.stages), bits


def step_of(program: Program, model: LlamaForCausalLM) -> Step:
    """Return a program as ids and positions in, logits out, whoever keeps the cache.

    A `.pte` needs no empty cache to start again: slots after the current token are masked.
    """
    if program.runtime is Runtime.EXECUTORCH:
        return lambda ids, positions: program.run(ids, positions)[0]

    def run(ids: Tensor, positions: Tensor, cache: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        logits, *following = program.run(ids, positions, *cache)
        return logits, following

    return carry_cache(run, empty_cache(model, context_of(model)))
