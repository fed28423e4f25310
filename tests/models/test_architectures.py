"""Small random models of many architectures, whole, through the one call: they lower, and agree.

The gate inside holds each artifact to its graph; here the graph is held to the float model.
"""

import pytest
import torch

import pt2e_quant as pq

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("integers_everywhere")

TEXT = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
DECODER = {**TEXT, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
IMAGE = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"image_size": 64, "patch_size": 16}
T5 = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}

# Name of the model's class, of its config's, the config, and what it is called with.
MODELS = {
    "albert": ("AlbertModel", "AlbertConfig", {"embedding_size": 32, **TEXT}, "text"),
    "bert": ("BertForSequenceClassification", "BertConfig", TEXT, "text"),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 99, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
        "text",
    ),
    "deberta": (
        "DebertaV2Model",
        "DebertaV2Config",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        "text",
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "use_cache": False}, "pair"),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4, "use_cache": False},
        "text",
    ),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 16}, "text"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 16}, "text"),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        "text",
    ),
    "vit": ("ViTModel", "ViTConfig", IMAGE, "image"),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", IMAGE, "image"),
    "swin": (
        "SwinModel",
        "SwinConfig",
        {
            "image_size": 64,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "image",
    ),
    "convnext": (
        "ConvNextModel",
        "ConvNextConfig",
        {"hidden_sizes": [32, 64], "depths": [2, 2], "num_stages": 2},
        "image",
    ),
    "regnet": (
        "RegNetModel",
        "RegNetConfig",
        {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2], "groups_width": 16},
        "image",
    ),
}


def built(name):
    model_class, config_class, config, kind = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config))
    return model.eval(), [inputs(kind) for _ in range(4)]


def inputs(kind):
    if kind == "image":
        return {"pixel_values": torch.randn(1, 3, 64, 64)}
    tokens = {
        "input_ids": torch.randint(3, 99, (1, 16)),
        "attention_mask": torch.ones(1, 16, dtype=torch.long),
    }
    return tokens | ({"decoder_input_ids": torch.randint(3, 99, (1, 4))} if kind == "pair" else {})


def check(name, backend, recipe):
    pytest.importorskip({"xnnpack": "executorch", "onnx": "onnxruntime"}[backend])
    model, batches = built(name)
    artifact = pq.quantize(
        model, kwargs=batches[0], calibration_data=batches, backend=backend, recipe=recipe
    )
    assert artifact.report.sqnr_float_db > 20
    assert sum(artifact.report.integer_ops.values()) >= 5


@pytest.mark.parametrize(
    ("name", "backend", "recipe"),
    [("albert", "onnx", "int8"), ("albert", "xnnpack", "int8_dynamic")],
)
def test_architecture_when_in_the_fast_subset_then_near_its_float_model(name, backend, recipe):
    check(name, backend, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_architecture_when_any_backend_and_recipe_then_near_its_float_model(name, backend, recipe):
    if MODELS[name][3] == "image" and recipe == "int8_dynamic" and name in ("convnext", "regnet"):
        pytest.skip("its convolutions are float in dynamic recipes")
    check(name, backend, recipe)
