"""Decoder-only models export with their cache, generate as transformers does, or are refused."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import pt2e_quant as pq
from pt2e_quant.core.errors import InputError, UnsupportedError
from pt2e_quant.flow.causal_lm import export_causal_lm

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SHARED = _SIZES | {"num_key_value_heads": 2}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
CONFIGS = {
    "llama": _SHARED,
    "mistral": _SHARED | {"sliding_window": 4},
    "qwen3": _SHARED | {"head_dim": 8},
    "gemma2": _SHARED | {"head_dim": 8, "sliding_window": 4},
    "gemma3_text": _SHARED | {"head_dim": 8, "sliding_window": 4},
    "phi3": _SHARED,
    "gpt_neox": _SIZES,
    "gpt2": _GPT2 | {"bos_token_id": 1, "eos_token_id": 2},
}


def model_of(kind, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(CONFIGS[kind] | changes))
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def llama():
    return model_of("llama")


PROMPT = torch.tensor([[5, 9, 3, 40, 17]])


@pytest.mark.parametrize("kind", CONFIGS)
def test_export_when_run_in_parts_then_equal_to_the_model_without_cache(kind):
    model = model_of(kind)
    ids = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(1))
    run = export_causal_lm(model, max_length=16).module()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        parts = [run(ids[:, a:b], torch.arange(a, b)) for a, b in ((0, 7), (7, 8), (8, 12))]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "sizes", "says"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, "fixed size"),
        (
            "mamba",
            {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64},
            "no past_key|LinearAttention",
        ),
        ("bamba", {**_SIZES, "mamba_n_heads": 4, "mamba_d_head": 16}, "get_seq_length"),
    ],
)
def test_export_when_the_state_is_no_such_cache_then_refused_with_the_reason(kind, sizes, says):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    with pytest.raises(UnsupportedError, match=says):
        export_causal_lm(model, max_length=16)


@pytest.mark.parametrize("lengths", [{"max_length": 1}, {"max_length": 8, "max_prompt": 9}])
def test_export_when_lengths_are_none_then_refused(llama, lengths):
    with pytest.raises(InputError, match="max_length is"):
        export_causal_lm(llama, **lengths)


def test_export_when_it_is_no_language_model_then_refused():
    with pytest.raises(InputError, match="found Linear"):
        export_causal_lm(torch.nn.Linear(2, 2), max_length=8)


@pytest.fixture(scope="module", params=["onnx", "xnnpack"])
def artifact(request, llama):
    pytest.importorskip({"onnx": "onnxruntime", "xnnpack": "executorch"}[request.param])
    program = export_causal_lm(llama, max_length=16, max_prompt=4)
    return pq.quantize(program, backend=request.param, recipe="int8_dynamic", progress=False)


def test_generate_when_the_prompt_is_longer_than_a_call_then_as_the_float_model(artifact, llama):
    # The logits of a random model lie close together; int8 of 32 columns keeps their order here.
    expected = llama.generate(PROMPT, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(artifact.generate(PROMPT, max_new_tokens=6), expected)
    assert torch.equal(artifact.generate(PROMPT, max_new_tokens=6), expected)


def test_generate_when_a_token_ends_the_text_then_it_stops_there(artifact):
    whole = artifact.generate(PROMPT, max_new_tokens=6)
    stopped = artifact.generate(PROMPT, max_new_tokens=6, eos_token_id=int(whole[0, 6]))
    first = int((whole[0, 5:] == whole[0, 6]).nonzero()[0])
    assert torch.equal(stopped, whole[:, : 5 + first + 1])


def test_generate_when_tokens_are_drawn_then_the_seed_decides(artifact):
    drawn = [
        artifact.generate(PROMPT, max_new_tokens=8, temperature=5.0, seed=s) for s in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("ids", "count", "says"),
    [
        (PROMPT, 13, "max_new_tokens=1 to 12"),
        (PROMPT[0], 2, r"expected int64\[1, T\]"),
        (PROMPT.float(), 2, "dtype float32"),
        (PROMPT[:, :0], 2, r"shape \(1, 0\)"),
    ],
)
def test_generate_when_it_cannot_be_then_refused(artifact, ids, count, says):
    with pytest.raises(InputError, match=says):
        artifact.generate(ids, max_new_tokens=count)


def test_generate_when_the_cache_is_just_filled_then_fine(artifact):
    assert artifact.generate(PROMPT, max_new_tokens=12).shape == (1, 17)


def test_generate_when_loaded_in_a_new_process_then_the_same_text(artifact, tmp_path):
    backend = {"ONNX Runtime": "onnx", "XNNPACK": "xnnpack"}[artifact.report.backend]
    path = tmp_path / f"lm{pq.backends.get(backend).suffix}"
    artifact.save(path)
    code = (
        "import torch, pt2e_quant as pq\n"
        f"artifact = pq.backends.get({backend!r}).load({str(path)!r})\n"
        f"print(artifact.generate(torch.tensor({PROMPT.tolist()}), max_new_tokens=6).tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == str(artifact.generate(PROMPT, max_new_tokens=6).tolist())


def test_generate_when_the_model_is_no_language_model_then_the_way_is_shown(plain_backend):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    made = pq.quantize(
        net,
        (torch.ones(2, 4),),
        calibration_data=[torch.ones(2, 4)],
        backend="plain",
        progress=False,
    )
    with pytest.raises(InputError, match="export_causal_lm") as error:
        made.generate(PROMPT, max_new_tokens=2)
    assert "takes (input)" in str(error.value)


def test_quantize_when_a_language_model_is_given_as_it_is_then_the_way_is_shown(
    llama, plain_backend
):
    with pytest.raises(InputError, match="export_causal_lm"):
        pq.quantize(llama, (PROMPT,), backend="plain", progress=False)
