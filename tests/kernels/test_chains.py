"""Small networks whose every tensor between operators is integers, lowered for a GPU."""

import torch
from torch import nn

from pt2e_quant.backends.cuda.backend import BACKEND
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from tests.kernels.lowering import calls_of


class Images(nn.Module):
    """Pools, a concatenation and a gate between convolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.branch = nn.Conv2d(16, 16, 3, padding=1)
        self.join = nn.Conv2d(32, 16, 1)
        self.gate = nn.Conv2d(16, 16, 1)
        self.last = nn.Linear(16, 5)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.stem(x)), 3, 2, 1)
        x = torch.relu(self.join(torch.cat([x, torch.relu(self.branch(x))], 1)))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.last(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Tokens(nn.Module):
    """An embedding, and a norm that three linears read."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.norm = nn.RMSNorm(64, eps=1e-6)
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, indices):
        h = self.norm(self.table(indices))
        return sum(part(h) for part in self.parts)


def lowered(model, recipe, x, *batches):
    torch.manual_seed(0)
    prepared = prepare_pt2e(torch.export.export(model.eval(), (x,)), BACKEND.quantizer(recipe))
    if batches:
        calibrate(prepared, [(batch,) for batch in batches], progress=False)
    gm = convert_pt2e(prepared)
    artifact = BACKEND.allowing_unmeasured().lower(gm)
    assert sqnr_db([gm(x)], [artifact.run(x)]) > 100
    return artifact


def test_images_when_lowered_then_are_integers_from_the_first_quantize_to_the_last_linear():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, 3, 16, 16, generator=generator) for _ in range(4)]
    artifact = lowered(Images(), "int8", batches[0], *batches)
    assert calls_of(artifact.module, "quantized_decomposed") == []
    names = calls_of(artifact.module)
    # Of three channels: a fourth is written beside them.
    assert names[0] == "quantize_pixels"
    assert "quantize" not in names
    assert names.count("quantize_pixels") == 1
    assert {"int8_pool", "int8_cat", "int8_add", "int8_conv2d", "int8_linear"} < set(names)


def test_tokens_when_lowered_then_three_linears_share_one_norm_quantized_per_token():
    artifact = lowered(Tokens(), "int8_dynamic", torch.randint(0, 50, (2, 7)))
    assert sorted(calls_of(artifact.module)) == [
        "embedding_gather",
        *["int8_linear"] * 3,
        "norm_quantize_per_token",
    ]
