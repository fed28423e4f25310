import pytest
import torch
from torch import nn

from benchmarks import models, stacks
from benchmarks.inputs import image_batches

# parameter counts of torchvision's and timm's models of the same names, 1000 classes
PARAMETERS = {
    models.resnet18: 11_689_512,
    models.mobilenet_v2: 3_504_872,
    models.efficientnet_b0: 5_288_548,
}


@pytest.mark.parametrize("build", PARAMETERS, ids=lambda build: build.__name__)
def test_cnn_when_built_then_has_the_published_number_of_parameters(build):
    model = build(image=32)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[build]


def test_resnet50_when_built_then_has_the_published_number_of_parameters():
    # not built by `resnet50`, whose batch norms would be settled for nothing
    model = models.ResNet(models.Bottleneck, (3, 4, 6, 3), classes=1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032


def test_vit_small_when_built_then_has_the_published_number_of_parameters():
    model = models.vit_small(image=224)
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_050_664


def test_settled_batch_norm_when_fed_such_images_then_output_is_centred():
    model = models.resnet18(image=32)
    outputs = []
    # cloned: the relu behind works in place
    hook = model.bn1.register_forward_hook(lambda module, x, y: outputs.append(y.clone()))
    with torch.no_grad():
        for batch in image_batches(32, 32, seed=7):
            model(*batch)
    hook.remove()
    values = torch.cat([value.transpose(0, 1).flatten(1) for value in outputs], dim=1)
    # contrast varies between images: the average deviation does less
    assert values.mean(dim=1).abs().max() < 0.2
    assert 0.6 < float(values.std(dim=1).mean()) < 1.6


def test_model_when_built_twice_then_weights_are_equal():
    one, two = models.mobilenet_v2(image=32), models.mobilenet_v2(image=32)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


@pytest.mark.parametrize(
    ("build", "example", "kind"),
    [
        (stacks.conv_stack, stacks.conv_stack_input, nn.Conv2d),
        (stacks.attention_stack, stacks.attention_stack_input, nn.LayerNorm),
    ],
)
def test_stack_when_deeper_then_graph_grows_in_proportion(build, example, kind):
    def count(depth: int) -> int:
        model = build(depth)
        assert sum(isinstance(module, kind) for module in model.modules()) == depth
        ep = torch.export.export(model, example())
        return sum(node.op == "call_function" for node in ep.graph.nodes)

    two, four = count(2), count(4)
    assert four == 2 * two
    rng = torch.random.get_rng_state()
    build(1)
    assert torch.equal(rng, torch.random.get_rng_state())
