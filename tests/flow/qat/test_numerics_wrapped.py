"""Training through integers as people do it: copied, saved, checkpointed, compiled, on ranks."""

import copy
import io
import os
import warnings

import pytest
import torch
from numerics_nets import X, Y, assert_exact, prepared_of, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pt2e_quant as pq
from pt2e_quant.observers.training.fake_quantize import disable_observer
from pt2e_quant.passes.batch_norm.trained_batch_norm import freeze_bn_stats
from tests.two_ranks import run_two_ranks


def gradients(model, forward):
    model.zero_grad()
    (forward(X) - Y).square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_copies_when_made_or_pickled_or_saved_then_they_train_alike(tmp_path):
    prepared = prepared_of("integer")
    train(prepared, 2)
    prepared.apply(disable_observer).apply(freeze_bn_stats)
    stream = io.BytesIO()
    torch.save(prepared, stream)
    stream.seek(0)
    pq.save(prepared, tmp_path / "checkpoint.ptq")
    copies = [
        copy.deepcopy(prepared),
        torch.load(stream, weights_only=False),
        pq.load(tmp_path / "checkpoint.ptq"),
    ]
    expected = train(prepared, 2)
    for made in copies:
        assert pq.numerics_of(made) == pq.numerics_of(prepared)
        assert train(made, 2) == expected
        assert_exact(made)


def test_checkpointing_when_activations_are_recomputed_then_gradients_are_equal():
    prepared = prepared_of("integer")
    train(prepared, 2)
    prepared.apply(disable_observer).apply(freeze_bn_stats)
    expected = gradients(prepared, prepared)
    found = gradients(prepared, lambda x: checkpoint(prepared, x, use_reentrant=False))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("reenters", [False, True])
@pytest.mark.parametrize("numerics", ["fake_quant", "integer"])
def test_checkpointing_when_ranges_move_then_as_without_it(numerics, reenters):
    plain, recomputed = prepared_of(numerics), prepared_of(numerics)
    for step in range(3):
        x = X.detach().requires_grad_() * (1.0 + step)
        for model in (plain, recomputed):
            model.zero_grad()
        plain(x).square().mean().backward(retain_graph=True)
        checkpoint(recomputed, x, use_reentrant=reenters).square().mean().backward()
        for p, q in zip(plain.parameters(), recomputed.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    for (name, p), (_, q) in zip(plain.named_buffers(), recomputed.named_buffers(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_compiled_when_trained_in_integers_then_as_in_eager():
    torch._dynamo.reset()
    eager, inner = prepared_of(), prepared_of()
    for model in (eager, inner):
        train(model, 2)
        model.apply(disable_observer).apply(freeze_bn_stats)
        pq.set_numerics(model, "integer", nodes=["conv2d"])
    inner.load_state_dict(eager.state_dict())
    compiled = torch.compile(inner, backend="aot_eager")
    torch.testing.assert_close(train(compiled, 1), train(eager, 1), rtol=1e-5, atol=1e-6)
    pq.set_numerics(compiled, "integer")
    pq.set_numerics(eager, "integer")
    inner.load_state_dict(eager.state_dict())
    torch.testing.assert_close(compiled(X), eager(X), rtol=0, atol=1e-6)
    torch.testing.assert_close(train(compiled, 2), train(eager, 2), rtol=1e-4, atol=1e-6)
    assert_exact(inner)


def _rank(rank, port, queue):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    prepared = prepared_of()
    model = DistributedDataParallel(prepared)
    pq.set_numerics(model, "integer")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(3):
        if step == 1:
            model.apply(disable_observer).apply(freeze_bn_stats)
        optimizer.zero_grad()
        part = slice(4 * rank, 4 * rank + 4)
        (model(X[part]) - Y[part]).square().mean().backward()
        optimizer.step()
    model.eval()
    model(X)  # sends rank 0's buffers
    values = [p.double().sum().item() for p in prepared.parameters()]
    output = prepared(X)
    reference = pq.integer_reference(pq.convert_pt2e(prepared))
    queue.put((rank, values, torch.equal(output, reference(X))))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_data_parallel_when_two_ranks_train_in_integers_then_they_agree():
    (_, first, exact_0), (_, second, exact_1) = run_two_ranks(_rank)
    assert first == second
    assert exact_0
    assert exact_1
