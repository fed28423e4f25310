"""QAT checkpoints: training goes on from a file as if it had never stopped."""

import copy

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import pt2e_quant as pq


def train(gm: GraphModule, images: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> float:
    torch.manual_seed(0)  # for dropout
    loss = torch.zeros(())
    for x in images:
        loss = gm(x)["logits"].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("mmap", [False, True])
def test_load_when_training_then_it_goes_on_with_the_same_numbers(
    net, quantizer, images, tmp_path, mmap
):
    gm = pq.prepare_qat_pt2e(torch.export.export(net.train(), (images[0],)), quantizer())
    optimizer = torch.optim.Adam(gm.parameters(), lr=1e-3)
    train(gm, images[:2], optimizer)
    pq.save(gm, tmp_path / "checkpoint.ptq")
    loaded = pq.load(tmp_path / "checkpoint.ptq", mmap=mmap)
    # The optimizer is the user's: its state goes by position, so the order of parameters counts.
    names = [name for name, _ in gm.named_parameters()]
    assert names == [name for name, _ in loaded.named_parameters()]
    resumed = torch.optim.Adam(loaded.parameters(), lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it shares their tensors
    assert train(gm, images, optimizer) == train(loaded, images, resumed)
    state = loaded.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in gm.state_dict().items())
    assert all(isinstance(loaded.get_parameter(n), nn.Parameter) for n in names)
    with torch.no_grad():
        a, b = pq.convert_pt2e(gm)(images[1]), pq.convert_pt2e(loaded)(images[1])
    assert torch.equal(a["logits"], b["logits"])


@pytest.mark.parametrize("backend", pq.backends.names())
def test_load_when_a_backends_own_recipe_is_trained_then_the_same_converted(backend, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(288, 4))
    program = torch.export.export(model.train(), (x,))
    gm = pq.prepare_qat_pt2e(program, pq.backends.get(backend).quantizer())
    gm(x).square().mean().backward()
    pq.save(gm, tmp_path / "checkpoint.ptq")
    loaded = pq.load(tmp_path / "checkpoint.ptq")
    for trained in (gm, loaded):
        trained(x)
        trained.eval()
    assert torch.equal(pq.convert_pt2e(gm)(x), pq.convert_pt2e(loaded)(x))
