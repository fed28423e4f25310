"""Training as people do it: compiled, on two ranks, in mixed precision, averaged, resumed."""

import copy
import os
import warnings

import pytest
import torch
from qat_nets import QatQuantizer, settled
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.qat.prepare_qat_pt2e import prepare_qat_pt2e
from pt2e_quant.observers.training.fake_quantize import disable_observer
from pt2e_quant.passes.batch_norm.trained_batch_norm import freeze_bn_stats
from tests.two_ranks import run_two_ranks

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))


class Residual(nn.Module):
    """A block of ResNet."""

    def __init__(self, width) -> None:
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv2, self.bn2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


class Inverted(nn.Module):
    """A block of MobileNetV2."""

    def __init__(self, width) -> None:
        super().__init__()
        inner = 2 * width
        self.layers = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(inplace=True),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return x + self.layers(x)


def network(block):
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 5))
    return settled(nn.Sequential(stem, block(8), block(8), head)).train()


def prepared_of(model):
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    ep = torch.export.export(model, (X,), dynamic_shapes={"input": batch})
    return prepare_qat_pt2e(ep, QatQuantizer())


def train(model, steps, optimizer, autocast=False):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = (model(X) - Y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def assert_exact(prepared):
    prepared.eval().apply(disable_observer)
    expected = prepared(X)
    assert torch.equal(convert_pt2e(prepared)(X), expected)


@pytest.mark.parametrize("block", [Residual, Inverted])
def test_network_when_trained_then_no_statistic_is_lost(block):
    model = network(block)
    prepared = prepared_of(model)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    losses = train(prepared, 6, sgd(prepared))
    assert losses[-1] < losses[0]
    state = prepared.state_dict()
    for name, before in start.items():
        assert torch.equal(model.state_dict()[name], before), name
        if name.endswith("num_batches_tracked"):
            assert state[name] == 6, name
        else:
            assert not torch.equal(state[name], before), name
    assert sum(name.endswith("running_var") for name in state) == sum(
        isinstance(m, nn.BatchNorm2d) for m in model.modules()
    )
    assert_exact(prepared)


def test_checkpoint_when_resumed_then_training_goes_on_equally():
    one = prepared_of(network(Residual))
    optimizer = sgd(one)
    torch.manual_seed(1)
    train(one, 2, optimizer)
    saved = copy.deepcopy((one.state_dict(), optimizer.state_dict()))
    two = prepared_of(network(Residual))
    two.load_state_dict(saved[0])
    resumed = sgd(two)
    resumed.load_state_dict(saved[1])
    results = []
    for model, using in ((one, optimizer), (two, resumed)):
        torch.manual_seed(2)
        results.append(train(model, 2, using))
    assert results[0] == results[1]
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


def test_average_when_training_then_it_evaluates_and_converts():
    prepared = prepared_of(network(Inverted))
    average = AveragedModel(prepared, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    optimizer = sgd(prepared)
    for _ in range(3):
        train(prepared, 1, optimizer)
        average.update_parameters(prepared)
    weights = [dict(m.named_parameters())["0.0.weight"] for m in (prepared, average.module)]
    assert not torch.equal(*weights)
    before = prepared.state_dict()["0.1.running_mean"].clone()
    average.module.train()
    average(X)
    assert torch.equal(prepared.state_dict()["0.1.running_mean"], before)
    assert_exact(average.module)


def test_autocast_when_training_then_statistics_stay_float32():
    prepared = prepared_of(network(Residual))
    losses = train(prepared, 4, sgd(prepared), autocast=True)
    assert all(torch.tensor(losses).isfinite())
    assert losses[-1] < losses[0]
    assert {v.dtype for v in prepared.state_dict().values() if v.is_floating_point()} == {
        torch.float32
    }
    assert_exact(prepared)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_compiled_when_trained_then_as_in_eager_in_each_mode():
    torch._dynamo.reset()
    model = network(Residual)
    model[3][2].p = 0.0  # the compiled one draws other random numbers
    eager, inner = prepared_of(model), prepared_of(model)
    compiled = torch.compile(inner, backend="aot_eager")
    both = [train(m, 2, sgd(m)) for m in (eager, compiled)]
    # Gradients too: see core/snapshot_op.py for what goes wrong otherwise.
    torch.testing.assert_close(*both, rtol=1e-6, atol=1e-6)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(inner.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    inner.load_state_dict(eager.state_dict())
    for step in (lambda m: m.apply(freeze_bn_stats), lambda m: m.eval(), lambda m: m.train()):
        for m in (eager, inner):
            step(m)
        before = eager.state_dict()["0.1.running_mean"].clone()
        outputs = [m(X) for m in (eager, compiled)]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
        assert torch.equal(inner.state_dict()["0.1.running_mean"], before)
    assert_exact(inner)


def _rank(rank, port, queue):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    prepared = prepared_of(network(Residual))
    model = DistributedDataParallel(prepared)
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        part = slice(4 * rank, 4 * rank + 4)
        (model(X[part] * (1 + step)) - Y[part]).square().mean().backward()
        optimizer.step()
    model.eval()
    model.apply(disable_observer)
    model(X)  # sends rank 0's buffers
    values = [v.double().sum().item() for v in prepared.state_dict().values()]
    output = prepared(X)
    converted = convert_pt2e(prepared)(X)
    queue.put((rank, values, torch.equal(output, converted), output.sum().item()))
    torch.distributed.destroy_process_group()


def test_data_parallel_when_two_ranks_train_then_they_agree():
    (_, first, exact_0, output_0), (_, second, exact_1, output_1) = run_two_ranks(_rank)
    parameters = len(list(network(Residual).parameters()))
    assert first[:parameters] == second[:parameters]
    assert exact_0
    assert exact_1
    assert output_0 == pytest.approx(output_1, abs=1e-6)
