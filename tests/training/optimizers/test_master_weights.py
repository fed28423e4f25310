import copy

import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.training import (
    AdamW8bit,
    quantize_parameters,
    state_bytes,
    with_cpu_offload,
    with_master_weights,
)

ADAM = torch.optim.AdamW


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(dtype)


def step(model, optimizer, count=1):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=generator).to(model[0].bias.dtype)
    for _ in range(count):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_with_master_weights_when_parameters_are_float32_then_equal_to_the_optimizer_alone():
    model, plain = net(), net()
    step(model, with_master_weights(ADAM, model, lr=1e-2), 3)
    step(plain, ADAM(plain.parameters(), lr=1e-2), 3)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_with_master_weights_when_parameters_are_bfloat16_then_small_steps_are_not_lost():
    model, plain = net(torch.bfloat16), net(torch.bfloat16)
    start = plain[0].weight.detach().clone()
    optimizer = with_master_weights(ADAM, model, lr=1e-6)
    step(model, optimizer, 100)
    step(plain, ADAM(plain.parameters(), lr=1e-6), 100)
    lost = (plain[0].weight == start).float().mean()
    kept = (model[0].weight == start).float().mean()
    assert kept < lost - 0.1
    master = optimizer.state[model[0].weight]["master"]
    assert master.dtype == torch.float32
    assert torch.equal(master.to(torch.bfloat16), model[0].weight)


@pytest.mark.parametrize("optimizer_class", [ADAM, AdamW8bit])
@pytest.mark.parametrize("scheme", [None, "w8"])
def test_with_master_weights_when_its_state_is_loaded_then_training_goes_on_equal_to_the_bit(
    optimizer_class, scheme
):
    model = net(torch.bfloat16)
    if scheme is not None:
        quantize_parameters(model, scheme)
    optimizer = with_master_weights(optimizer_class, model, lr=1e-3)
    step(model, optimizer, 3)
    other = copy.deepcopy(model)
    loaded = with_master_weights(optimizer_class, other, lr=1.0)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert step(model, optimizer, 3) == step(other, loaded, 3)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        master, found = optimizer.state[one]["master"], loaded.state[two]["master"]
        assert torch.equal(master, found)


def test_with_master_weights_when_values_are_given_then_masters_start_from_them():
    model = net()
    before = copy.deepcopy(model.state_dict())
    quantize_parameters(model, "w4_g32")
    optimizer = with_master_weights(torch.optim.SGD, model, values=before, lr=0.0)
    step(model, optimizer)
    assert torch.equal(optimizer.state[model[0].weight]["master"], before["0.weight"])
    with pytest.raises(ConfigError, match=r'none for the parameter "2\.weight"'):
        with_master_weights(ADAM, model, values={"0.weight": before["0.weight"]})
    with pytest.raises(ConfigError, match="give the module"):
        with_master_weights(ADAM, [{"params": model.parameters()}], values=before)


def test_with_master_weights_when_groups_have_options_then_each_has_its_own():
    model = net(torch.bfloat16)
    groups = [{"params": [model[0].weight], "lr": 0.0}, {"params": [model[2].weight]}]
    optimizer = with_master_weights(ADAM, groups, lr=1e-1)
    start = [model[i].weight.detach().clone() for i in (0, 2)]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    step(model, optimizer)
    assert torch.equal(model[0].weight, start[0])
    assert not torch.equal(model[2].weight, start[1])
    scheduler.step()
    after = model[2].weight.detach().clone()
    step(model, optimizer)
    assert torch.equal(model[2].weight, after)


def test_with_master_weights_when_a_parameter_has_no_gradient_then_it_stays():
    model = quantize_parameters(net(), "w8")
    unused = model[2].weight
    optimizer = with_master_weights(ADAM, model, lr=1e-2)
    model[0](torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert unused.requantizations == 0
    assert model[0].weight.requantizations == 1


def test_with_cpu_offload_when_stepped_then_equal_and_states_are_on_the_cpu():
    model, plain = net(), net()
    optimizer = with_cpu_offload(ADAM, model, lr=1e-2)
    step(model, optimizer, 3)
    step(plain, ADAM(plain.parameters(), lr=1e-2), 3)
    assert torch.equal(model[0].weight, plain[0].weight)
    assert state_bytes(optimizer) > 0
    kept = [v for state in optimizer.state.values() for v in state.values()]
    assert {value.device.type for value in kept} == {"cpu"}


@pytest.mark.parametrize("stored", [False, True])
def test_group_when_added_later_then_its_parameters_train_by_its_options(stored):
    model = net(torch.float32 if stored else torch.bfloat16)
    if stored:
        quantize_parameters(model, "w8")
    first, second = ([*part.parameters()] for part in (model[0], model[2]))
    optimizer = with_master_weights(ADAM, [{"params": first}], lr=1e-2)
    step(model, optimizer)
    optimizer.add_param_group({"params": second, "lr": 0.0})
    before = [p.detach().clone() for p in second]
    step(model, optimizer)
    assert all(torch.equal(p, old) for p, old in zip(second, before, strict=True))
    optimizer.param_groups[1]["lr"] = 0.1
    step(model, optimizer)
    assert not any(torch.equal(p, old) for p, old in zip(second, before, strict=True))
    assert len(optimizer.state) == 4


def test_optimizer_when_copied_or_pickled_with_its_model_then_both_train_on(tmp_path):
    model = net(torch.bfloat16)
    optimizer = with_master_weights(ADAM, model, lr=1e-2)
    step(model, optimizer)
    torch.save((model, optimizer), tmp_path / "both.pt")
    pairs = (
        copy.deepcopy((model, optimizer)),
        torch.load(tmp_path / "both.pt", weights_only=False),
    )
    step(model, optimizer, 2)
    for other, own in pairs:
        step(other, own, 2)
        assert torch.equal(other[0].weight, model[0].weight)
