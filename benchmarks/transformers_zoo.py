"""Small random models of architectures that transformers has, quantized for each backend.

    python -m benchmarks.transformers_zoo [--models swinv2 modernbert] [--backends xnnpack onnx cpu]

Each file is run by its runtime on inputs that calibration has not seen; SQNR is that of the first
result against the float model's. Beside it is the q/dq graph of torchao's XNNPACKQuantizer, or why
there is none. Weights are random, so that figures tell what is lost and not what a task needs.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.measure import Stopwatch, sqnr_db
from benchmarks.peers import torchao_quantize
from benchmarks.results import write_results

Batches = list[tuple[Tensor, ...]]
Made = tuple[nn.Module, Batches]
HIDDEN: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
DEEP: dict[str, Any] = {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]}
DECODER: dict[str, Any] = HIDDEN | {"use_cache": False}
KEY_HEADS: dict[str, Any] = DECODER | {"num_key_value_heads": 2}
SPEECH: dict[str, Any] = HIDDEN | {
    "vocab_size": 32,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}
COUNT, HELD_OUT = 8, 4


class First(nn.Module):
    """The logits of a model, or its first result.

    Args:
        model: of transformers.
        names: of the inputs, in order.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run the model."""
        found = self.model(**dict(zip(self.names, inputs, strict=True)))
        made: Tensor = found.logits if hasattr(found, "logits") else found[0]
        return made


def ids(length: int = 16) -> Tensor:
    """Tokens of two sentences."""
    return torch.randint(3, 100, (2, length))


def made(kind: str, config: Any, inputs: dict[str, Callable[[], Tensor]]) -> Made:
    """A model of transformers and its inputs."""
    model = getattr(transformers, kind)(config).eval()
    batches = [tuple(make() for make in inputs.values()) for _ in range(COUNT)]
    return First(model, list(inputs)), batches


def text(name: str, head: str, **settings: Any) -> Callable[[], Made]:
    """A model of tokens."""
    settings = {"vocab_size": 100} | settings
    return lambda: made(
        f"{name}{head}", getattr(transformers, f"{name}Config")(**settings), {"input_ids": ids}
    )


def image(name: str, size: int, head: str = "ForImageClassification", **settings: Any) -> Any:
    """A model of two images."""
    pixels = {"pixel_values": lambda: torch.randn(2, 3, size, size)}
    return lambda: made(f"{name}{head}", getattr(transformers, f"{name}Config")(**settings), pixels)


def video(name: str) -> Callable[[], Made]:
    """A model of two films of four images."""
    settings = HIDDEN | {"image_size": 32, "patch_size": 8, "num_frames": 4}
    pixels = {"pixel_values": lambda: torch.randn(2, 4, 3, 32, 32)}
    config = getattr(transformers, f"{name}Config")(**settings)
    return lambda: made(f"{name}ForVideoClassification", config, pixels)


def speech(name: str) -> Callable[[], Made]:
    """A model of sound."""
    config = getattr(transformers, f"{name}Config")(**SPEECH)
    return lambda: made(f"{name}ForCTC", config, {"input_values": lambda: torch.randn(2, 800)})


def pairs(name: str, **settings: Any) -> Callable[[], Made]:
    """An encoder and a decoder."""
    config = getattr(transformers, f"{name}Config")(vocab_size=100, use_cache=False, **settings)
    both = {"input_ids": ids, "decoder_input_ids": lambda: ids(8)}
    return lambda: made(f"{name}ForConditionalGeneration", config, both)


BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
}
PATCHES: dict[str, Any] = HIDDEN | {"image_size": 32, "patch_size": 8}
CLASSES, TOKENS = "ForSequenceClassification", "ForCausalLM"
MODELS: dict[str, Callable[[], Made]] = {
    "albert": text("Albert", CLASSES, embedding_size=16, **HIDDEN),
    "electra": text("Electra", CLASSES, embedding_size=16, **HIDDEN),
    "deberta_v2": text(
        "DebertaV2", CLASSES, relative_attention=True, pos_att_type=["p2c", "c2p"], **HIDDEN
    ),
    "mpnet": text("MPNet", "Model", **HIDDEN),
    "roformer": text("RoFormer", CLASSES, embedding_size=32, max_position_embeddings=64, **HIDDEN),
    "squeezebert": text("SqueezeBert", CLASSES, embedding_size=32, **HIDDEN),
    "fnet": text("FNet", CLASSES, hidden_size=32, num_hidden_layers=2, intermediate_size=64),
    "xlnet": text("XLNet", CLASSES, d_model=32, n_layer=2, n_head=4, d_inner=64),
    "modernbert": text("ModernBert", CLASSES, pad_token_id=0, **HIDDEN),
    "opt": text(
        "OPT",
        TOKENS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        word_embed_proj_dim=32,
        use_cache=False,
    ),
    "bloom": text("Bloom", TOKENS, hidden_size=32, n_layer=2, n_head=4, use_cache=False),
    "falcon": text("Falcon", TOKENS, **DECODER),
    "gptj": text("GPTJ", TOKENS, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, use_cache=False),
    "gpt_neox": text("GPTNeoX", TOKENS, **DECODER),
    "phi": text("Phi", TOKENS, **DECODER),
    "gemma2": text("Gemma2", TOKENS, head_dim=8, sliding_window=8, **KEY_HEADS),
    "qwen3": text("Qwen3", TOKENS, head_dim=8, **KEY_HEADS),
    "olmo2": text("Olmo2", TOKENS, **KEY_HEADS),
    "starcoder2": text("Starcoder2", TOKENS, **KEY_HEADS),
    "mixtral": text("Mixtral", TOKENS, num_local_experts=4, **KEY_HEADS),
    "granite": text("Granite", TOKENS, **KEY_HEADS),
    "mamba": text(
        "Mamba", TOKENS, hidden_size=32, num_hidden_layers=2, state_size=8, use_cache=False
    ),
    "t5": pairs("T5", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
    "bart": pairs("Bart", **BART),
    "beit": image("Beit", 32, **PATCHES),
    "deit": image("DeiT", 32, **PATCHES),
    "dinov2": image("Dinov2", 32, **PATCHES),
    "data2vec": image("Data2VecVision", 32, **PATCHES),
    "yolos": image(
        "Yolos",
        32,
        "ForObjectDetection",
        num_detection_tokens=5,
        **PATCHES | {"image_size": [32, 32]},
    ),
    "swinv2": image(
        "Swinv2", 64, image_size=64, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4
    ),
    "convnextv2": image("ConvNextV2", 64, image_size=64, **DEEP),
    "focalnet": image(
        "FocalNet",
        64,
        image_size=64,
        embed_dim=16,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    "poolformer": image("PoolFormer", 64, **DEEP),
    "pvt_v2": image("PvtV2", 64, image_size=64, num_attention_heads=[1, 2, 2, 4], **DEEP),
    "regnet": image("RegNet", 64, embedding_size=16, groups_width=8, **DEEP),
    "timesformer": video("Timesformer"),
    "videomae": video("VideoMAE"),
    "wav2vec2": speech("Wav2Vec2"),
    "hubert": speech("Hubert"),
}


def measure(name: str, backends: Sequence[str], effort: str) -> dict[str, object]:
    """One row: the SQNR of each backend's file, and of torchao's graph, or an error's class."""
    torch.manual_seed(0)
    model, batches = MODELS[name]()
    held_out, calibration = batches[:HELD_OUT], batches[HELD_OUT:]
    with torch.no_grad():
        expected = [model(*batch) for batch in held_out]

    def score(run: Callable[..., Any]) -> float:
        with torch.no_grad():
            return round(sqnr_db(expected, [run(*batch).clone() for batch in held_out]), 2)

    def ours(backend: str) -> Callable[..., Any]:
        made = pq.quantize(
            model,
            batches[0],
            calibration_data=calibration,
            backend=backend,
            effort=effort,
            progress=False,
        )
        return made.run

    ways: dict[str, Callable[[], Callable[..., Any]]] = {
        backend: lambda backend=backend: ours(backend) for backend in backends
    }
    ways["XNNPACKQuantizer"] = lambda: torchao_quantize(model, batches[0], calibration, Stopwatch())
    row: dict[str, object] = {"model": name, "effort": effort}
    for how, make in ways.items():
        start = time.process_time()
        try:
            row[how] = score(make())
        except Exception as error:  # a failure is a result, of a peer and of ours
            row[how] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        row[f"{how}_s"] = round(time.process_time() - start, 1)
    return row


def main() -> None:
    """Run the models that are asked for and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backends", nargs="*", default=["xnnpack", "onnx"])
    parser.add_argument("--effort", default="balanced")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models:
        row = measure(name, given.backends, given.effort)
        print(row, flush=True)
        write_results("transformers_zoo", [row], ("model", "effort"))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # others' own
    main()
