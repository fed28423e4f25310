"""Images whose outliers count for nothing or for something, and a network that reads them."""

import torch
from torch import nn

import pt2e_quant as pq

CHANNELS, WIDE = 8, 3


def images(count, *, seed, spread=0.0, outlier=100.0):
    """Noise, where each image has a few large values in one channel, the same in every image."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(count, 1, CHANNELS, 16, 16, generator=generator).clamp(-3, 3)
    made[:, :, WIDE, 4, 4] = outlier
    contrast = torch.exp(spread * torch.randn(count, 1, 1, 1, 1, generator=generator))
    return [*(made * contrast)]


class Reader(nn.Module):
    """A convolution, of which the wide channel is a share; the image is computed."""

    def __init__(self, share):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.after = nn.Conv2d(CHANNELS, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.conv.weight[:, WIDE] *= share

    def forward(self, x):
        return self.after(torch.relu(self.conv(x)))


def calibrated(model, data):
    program = torch.export.export(model.eval(), (data[0],))
    quantizer = pq.backends.get("onnx").quantizer("int8")
    prepared = pq.prepare_pt2e(program, quantizer, effort="balanced")
    return pq.calibrate(prepared, data, progress=False)
