"""This project's road for a Llama with its KV cache, and the exports that everybody starts from."""

import copy

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from transformers import LlamaForCausalLM

import pt2e_quant as pq
from benchmarks.measure import Stopwatch
from benchmarks.ours import BACKENDS, LABEL, through_file
from benchmarks.peers_low_bit import Exporter
from benchmarks.runtimes import Program, Runtime
from pt2e_quant.flow.causal_lm import Step, carry_cache, empty_cache, export_causal_lm

PROMPT = 64
"""The longest call in tokens; a prompt of this length is what is timed."""
FLOAT_TABLE = ", float table"
"""What a label ends with where embedding and output layer stay in float."""


def context_of(model: LlamaForCausalLM) -> int:
    """Return how many tokens the cache holds."""
    return int(model.config.max_position_embeddings)


def export_with_state(model: LlamaForCausalLM) -> ExportedProgram:
    """Export with the cache as buffers, as ExecuTorch keeps it."""
    return export_causal_lm(model, max_length=context_of(model), with_state=True, max_prompt=PROMPT)


def export_without_state(model: LlamaForCausalLM) -> ExportedProgram:
    """Export with the cache as inputs and outputs, as ONNX Runtime needs it."""
    return export_causal_lm(
        model, max_length=context_of(model), with_state=False, max_prompt=PROMPT
    )


def prompt_of_zeros() -> tuple[Tensor, Tensor]:
    """Return ids and positions of a full prompt; the ids do not matter."""
    return torch.zeros(1, PROMPT, dtype=torch.int64), torch.arange(PROMPT)


def exporter(*, with_state: bool) -> Exporter:
    """Return how the peers' tools export a Llama: as this project's do."""

    def again(gm: GraphModule) -> ExportedProgram:
        tokens = torch.export.Dim("tokens", min=1, max=PROMPT)
        shapes = {"input_ids": {1: tokens}, "positions": {0: tokens}}
        return torch.export.export(gm, prompt_of_zeros(), dynamic_shapes=shapes)

    return Exporter(
        float_model=export_with_state if with_state else export_without_state,
        quantized=again,
        sample=prompt_of_zeros(),
    )


def untied(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a copy whose output layer is a matrix of its own: peers quantize no tied one."""
    changed = copy.deepcopy(model)
    changed.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    changed.config.tie_word_embeddings = False
    return changed


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
    label = f"{LABEL} {recipe}{FLOAT_TABLE if keep_table else ''}"
    return through_file(label, runtime, artifact, suffix, watch), bits


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
