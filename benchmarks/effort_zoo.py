"""The models of benchmarks.effort: a half to tune on and a half to run at the end, and their data.

Weights are drawn as torchvision draws them, batch-norm statistics are those of 1/f-noise images.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks import effort_models
from benchmarks import effort_nets as nets
from benchmarks.cases import digits_case
from benchmarks.effort_models import IMAGE, conv
from benchmarks.inputs import image_batches
from benchmarks.models import init_conv_weights, settle_batch_norm

Batches = list[tuple[Tensor, ...]]
CALIBRATION_SEED, HELD_OUT_SEED = 21, 22
CALIBRATION_COUNT, HELD_OUT_COUNT = 32, 24
OWN_WEIGHTS = ("vit", "mixer", "convnext", "gmlp", "resmlp", "poolformer", "convmixer")
"""Models that keep the weights that they are made with."""


TUNED: dict[str, Callable[[], nn.Module]] = effort_models.TUNED | {
    "vgg": nets.vgg,
    "inception": nets.inception,
    "preact_resnet": nets.preact_resnet,
    "resnext": lambda: nets.stages(nets.bottleneck(4, is_excited=False), (16, 32, 64)),
    "ghostnet": lambda: nets.stages(nets.Ghost, (16, 32, 64)),
    "spp_net": nets.spp_net,
    "hrnet": nets.TwoResolutions,
    "linknet": nets.LinkNet,
    "edsr": nets.edsr,
    "temporal": nets.Temporal,
    "convmixer": nets.convmixer,
    "gmlp": lambda: nets.Tokens([effort_models.GatedTokens((IMAGE // 8) ** 2) for _ in range(3)]),
    "mobilenet_v1": lambda: nets.stages(nets.separable, (16, 32, 64, 128)),
    "darknet": nets.darknet,
}
FINAL: dict[str, Callable[[], nn.Module]] = effort_models.FINAL | {
    "squeezenet": nets.squeezenet,
    "xception": nets.xception,
    "se_resnet": lambda: nets.stages(nets.bottleneck(1, is_excited=True), (16, 32, 64)),
    "repvgg": nets.repvgg,
    "csp": lambda: nets.stages(nets.CrossStage, (16, 32, 64), nn.SiLU),
    "deeplab": nets.Dilated,
    "espcn": nets.espcn,
    "dncnn": nets.dncnn,
    "poolformer": nets.poolformer,
    "resmlp": lambda: nets.Tokens([nets.AffineMlp((IMAGE // 8) ** 2) for _ in range(3)]),
    "prelu_net": nets.prelu_net,
    "elu_net": lambda: nets.stages(
        lambda a, b, s: conv(a, b, 3, s, act=nn.ELU), (16, 32, 64), nn.ELU
    ),
}


def build(
    name: str, draw: int = 0, held_out: int = HELD_OUT_COUNT
) -> tuple[nn.Module, Batches, Batches]:
    """Return a model in eval mode, its calibration batches and its held-out ones.

    Each draw has other images; digits have one.
    """
    if name == "digits":
        case = digits_case(8)
        return case.model, case.calibration[:32], case.held_out[:64]
    torch.manual_seed(sum(name.encode()))
    model = (TUNED | FINAL)[name]()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    if name not in OWN_WEIGHTS:
        init_conv_weights(model, generator)
    settle_batch_norm(model, IMAGE, generator)
    if name.startswith("frozen"):
        effort_models.freeze_norms(model)
    calibration = image_batches(CALIBRATION_COUNT, IMAGE, CALIBRATION_SEED + 10 * draw)
    return model.eval(), calibration, image_batches(held_out, IMAGE, HELD_OUT_SEED + 10 * draw)
