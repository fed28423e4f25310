"""Whole models on the CPU backend: every convolution and linear fused, near the canonical graph."""

import pytest
import torch
from torch import nn

from benchmarks.inputs import noise_images
from benchmarks.models import (
    BasicBlock,
    InvertedResidual,
    VisionTransformer,
    conv_bn_relu6,
    init_conv_weights,
    settle_batch_norm,
)
from benchmarks.text_models import bert, token_batches
from examples.digits_cnn import DigitsCnn
from pt2e_quant.backends import get
from pt2e_quant.flow.calibrate import calibrate
from pt2e_quant.flow.convert import convert_pt2e
from pt2e_quant.flow.prepare import prepare_pt2e

CPU = get("cpu")
# A sum that differs in its last bit moves a value by one step where it lies on a tie, and deep
# graphs make more of it: the artifact is held to the graph far closer than the graph to float.
LEAST_DB = 40.0


def built(model, image):
    generator = torch.Generator().manual_seed(0)
    init_conv_weights(model, generator)
    settle_batch_norm(model, image, generator)
    return model.eval()


def resnet():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers += [BasicBlock(8, 8, 1), BasicBlock(8, 16, 2), BasicBlock(16, 16, 1)]
    return built(
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)), 32
    )


def mobilenet():
    layers = [
        conv_bn_relu6(3, 8, 3, 2),
        InvertedResidual(8, 8, 1, 2),
        InvertedResidual(8, 12, 2, 4),
    ]
    layers += [InvertedResidual(12, 12, 1, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return built(nn.Sequential(*layers, nn.Linear(12, 5)), 32)


def vit():
    torch.manual_seed(0)
    model = VisionTransformer(32, patch=8, width=32, depth=2, heads=2, classes=5)
    nn.init.normal_(model.class_token)
    nn.init.normal_(model.positions)
    return model.eval()


def digits():
    model = DigitsCnn()
    init_conv_weights(model, torch.Generator().manual_seed(0))
    return model.eval()


def images(count, channels, size):
    batches = noise_images(4 * count, size, torch.Generator().manual_seed(1))
    return [(b,) for b in batches[:, :channels].split(count)]


MODELS = {
    "resnet": (resnet, lambda: images(2, 3, 32)),
    "mobilenet": (mobilenet, lambda: images(2, 3, 32)),
    "vit": (vit, lambda: images(2, 3, 32)),
    "digits": (digits, lambda: images(2, 1, 8)),
    "bert": (lambda: bert(layers=2, width=64), lambda: token_batches(4, 16, 1000, seed=0)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["int8-full", "int8-reduced"])
def test_model_when_lowered_then_all_fused_and_near_the_graph(name, recipe):
    make, batches = MODELS[name]
    model, data = make(), batches()
    gemms = sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in model.modules())
    batch = torch.export.Dim("batch", max=64)
    shapes = None if name == "bert" else ({0: batch},)
    ep = torch.export.export(model, data[0], dynamic_shapes=shapes)
    prepared = prepare_pt2e(ep, CPU.quantizer(recipe))
    calibrate(prepared, data, progress=False)
    gm = convert_pt2e(prepared)
    artifact = CPU.lower(gm)
    report = artifact.report
    fused = sum(n for op, n in report.integer_ops.items() if op.startswith("onednn."))
    assert fused == gemms
    assert not report.islands
    assert report.sqnr_canonical_db >= LEAST_DB
    if name != "bert":
        one = data[0][0][:1]
        with torch.no_grad():
            expected, found = gm(one), artifact.run(one)
        assert found.shape == expected.shape
