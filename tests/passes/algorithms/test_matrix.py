"""Every algorithm on every backend's recipes: better, no change for a reason, or refused."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.passes.algorithms.algorithm import Stage
from pt2e_quant.passes.algorithms.registry import OWN_NAMES, algorithm_named

pytestmark = pytest.mark.usefixtures("unmeasured")

SLACK_DB = 0.5
"""What chance may take on data that calibration has not seen."""
RECIPES = {
    "onnx": ("int8", "w4", "int8_dynamic", "w8"),
    "xnnpack": ("int8", "int8_dynamic", "w4"),
    "cpu": ("int8", "int8_dynamic", "w4_g32"),
    "cuda": ("int8", "w4_g32"),
}
FAST = (
    ("cnn", "onnx", "w4", "bias_correction"),
    ("cnn", "onnx", "int8", "cross_layer_equalization"),
    ("cnn", "onnx", "w4", "sequential_mse"),
    ("cnn", "xnnpack", "int8", "adaround"),
    ("cnn", "cpu", "int8", "batch_norm_reestimation"),
    ("transformer", "xnnpack", "w4", "adaround"),
    ("transformer", "onnx", "int8_dynamic", "bias_correction"),
    ("transformer", "cuda", "w4_g32", "sequential_mse"),
)
SLOW = tuple(
    (model, backend, recipe, name)
    for model in ("cnn", "transformer")
    for backend, recipes in RECIPES.items()
    for recipe in recipes
    for name in OWN_NAMES
    if (model, backend, recipe, name) not in FAST
)


class SmallCnn(nn.Module):
    """A stem, an inverted residual and a head, with batch norms set by data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.wide = _conv(3, 16, 3), _conv(16, 32, 1)
        self.depthwise, self.narrow = _conv(32, 32, 3, 32), _conv(32, 16, 1)
        self.last, self.head = _conv(16, 32, 3), nn.Linear(32, 10)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.3, 2.0)
                nn.init.normal_(module.bias, 0.3, 0.5)
                module.momentum = None  # the mean over all batches
        self.train()
        with torch.no_grad():
            for _ in range(4):  # statistics of later layers follow those before them
                for x in _images(32, seed=9):
                    self(x)
        self.eval()

    def forward(self, x):
        x = self.stem(x)
        x = self.last(x + self.narrow(self.depthwise(self.wide(x))))
        return self.head(x.mean((2, 3)))


class SmallTransformer(nn.Module):
    """Two layers of attention and a gated MLP, with outlier channels behind norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(32, 64)
        self.layers = nn.ModuleList([_Layer() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)])
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)
        with torch.no_grad():
            for norm in self.norms:
                norm.weight[3] = 8.0

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).reshape(n, t, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, 64))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


def _images(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(2, 3, 6, 6, generator=generator) for _ in range(count)]
    return [functional.interpolate(x, size=(12, 12), mode="bilinear") for x in made]


def _rows(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(8, 32, generator=torch.Generator().manual_seed(5))
    return [torch.randn(1, 16, 8, generator=generator) @ mixing for _ in range(count)]


MODELS = {"cnn": (SmallCnn, _images), "transformer": (SmallTransformer, _rows)}


@cache
def float_side(model: str):
    """The model, its calibration and held-out data, and its outputs."""
    build, data = MODELS[model]
    module, held = build().eval(), data(16, seed=2)
    with torch.no_grad():
        return module, data(16, seed=1), held, [module(x) for x in held]


@cache
def quality(model: str, backend: str, recipe: str, *names: str, plainly: bool = False):
    """Decibels on held-out data, the notes, and the outputs."""
    module, data, held, wanted = float_side(model)
    quantizer = pq.backends.get(backend).quantizer(recipe)
    if plainly and any(a.name == "block_gptq" for a in quantizer.algorithms):
        quantizer.remove_algorithm("block_gptq")
    program = torch.export.export(module, (held[0],))
    prepared = pq.prepare_pt2e(program, quantizer, algorithms=names)
    gm = pq.convert_pt2e(pq.calibrate(prepared, data, progress=False))
    with torch.no_grad():
        found = [gm(x) for x in held]
    return pq.sqnr_db(wanted, found), provenance_of(gm).notes, found


def without(model: str, backend: str, recipe: str, name: str):
    """The same without an algorithm; one that chooses integers replaces the recipe's own choice."""
    is_choice = algorithm_named(name).stage is Stage.CODES
    return quality(model, backend, recipe, plainly=is_choice)


def outcome(model: str, backend: str, recipe: str, name: str) -> str:
    """What an algorithm makes of a recipe, in words."""
    before, _, plain = without(model, backend, recipe, name)
    try:
        after, notes, found = quality(model, backend, recipe, name)
    except ConfigError as error:
        return f"refused, because {error.what}"
    if all(map(torch.equal, plain, found)):
        reasons = [note for note in notes if note]
        return f"no change, because {reasons[0]}" if reasons else "no change, for no reason"
    change = f"{before:.2f} -> {after:.2f} dB"
    if after > before:
        return f"better: {change}"
    is_chance = after > before - SLACK_DB
    return f"no change, because of chance: {change}" if is_chance else f"worse: {change}"


@pytest.mark.parametrize(("model", "backend", "recipe", "name"), FAST)
def test_cell_when_an_algorithm_is_asked_for_then_better_or_a_reason(model, backend, recipe, name):
    found = outcome(model, backend, recipe, name)
    assert found.startswith(("better", "no change, because", "refused, because")), found


@pytest.mark.slow
@pytest.mark.parametrize(("model", "backend", "recipe", "name"), SLOW)
def test_slow_cell_when_an_algorithm_is_asked_for_then_better_or_a_reason(
    model, backend, recipe, name
):
    found = outcome(model, backend, recipe, name)
    assert found.startswith(("better", "no change, because", "refused, because")), found
