"""Small models of the kinds that people ship, with data for them: seeded, seconds to run."""

import torch
from torch import nn

from benchmarks.inputs import noise_images
from benchmarks.models import (
    BasicBlock,
    Bottleneck,
    InvertedResidual,
    VisionTransformer,
    conv_bn_relu6,
    init_conv_weights,
    settle_batch_norm,
)
from benchmarks.text_models import bert, llama, token_batches
from examples.digits_cnn import DigitsCnn

__all__ = ["MODELS"]


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


def bottleneck():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [Bottleneck(8, 4, 1), Bottleneck(16, 4, 2)]
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
    "bottleneck": (bottleneck, lambda: images(2, 3, 32)),
    "mobilenet": (mobilenet, lambda: images(2, 3, 32)),
    "vit": (vit, lambda: images(2, 3, 32)),
    "digits": (digits, lambda: images(2, 1, 8)),
    "bert": (lambda: bert(layers=2, width=64), lambda: token_batches(4, 16, 1000, seed=0)),
    "llama": (
        lambda: llama(layers=2, width=128, vocabulary=256),
        lambda: [batch[:1] for batch in token_batches(4, 16, 256, seed=0)],
    ),
}
