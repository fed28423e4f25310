import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import CalibrationError, ConfigError
from pt2e_quant.tensors import prune_2_4, prune_2_4_, quantize_


def most_of_fours(weight):
    return int((weight.reshape(-1, 4) != 0).sum(1).max())


def correlated_rows(count, K):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(K, K, generator=generator) / K**0.5 + 0.5 * torch.ones(K, K) / K
    return torch.randn(count, K, generator=generator) @ mixing


def test_prune_when_moments_are_given_then_outputs_are_nearer():
    x = correlated_rows(400, 32)
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    plain, aware = prune_2_4(weight), prune_2_4(weight, x.t() @ x)
    assert most_of_fours(plain) == most_of_fours(aware) == 2

    def error(pruned):
        return (x @ (pruned - weight).t()).square().mean()

    assert error(aware) < 0.7 * error(plain)


def test_prune_when_inputs_do_not_depend_on_each_other_then_is_by_magnitude_and_size_of_input():
    weight = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert torch.equal(prune_2_4(weight, torch.eye(4)), prune_2_4(weight))
    moments = torch.diag(torch.tensor([100.0, 1.0, 1.0, 1.0]))
    assert prune_2_4(weight, moments).tolist() == [[1.0, 0.0, 0.0, 4.0]]


@pytest.mark.parametrize("has_data", [False, True])
def test_module_when_pruned_then_its_linears_go_into_the_sparse_layout(has_data):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
    kept = module[2].weight.clone()
    data = [correlated_rows(8, 32), correlated_rows(8, 32)] if has_data else None
    prune_2_4_(module, data, filter=lambda part, path: path == "0")
    assert torch.equal(module[2].weight, kept)
    quantize_(module, "w8", filter=lambda part, path: path == "0", layout="sparse_2_4")
    assert module[0].weight.form.layout == "sparse_2_4"


@pytest.mark.parametrize("pick", [0, "rows"])
def test_prune_when_batches_have_labels_then_inputs_picks_what_the_module_takes(pick):
    torch.manual_seed(0)
    labeled, plain = nn.Sequential(nn.Linear(32, 16)), nn.Sequential(nn.Linear(32, 16))
    plain.load_state_dict(labeled.state_dict())
    rows, labels = correlated_rows(64, 32), torch.zeros(64)
    batch = (rows, labels) if pick == 0 else {"rows": rows, "labels": labels}
    prune_2_4_(labeled, [batch], inputs=pick)
    prune_2_4_(plain, [rows])
    assert torch.equal(labeled[0].weight, plain[0].weight)
    assert most_of_fours(labeled[0].weight) == 2


def test_prune_when_it_cannot_then_says_what_to_do():
    with pytest.raises(ConfigError, match="no fours"):
        prune_2_4(torch.ones(2, 6))
    with pytest.raises(ConfigError, match='"0" has rows of 6'):
        prune_2_4_(nn.Sequential(nn.Linear(6, 2)))
    with pytest.raises(ConfigError, match="no linear is chosen"):
        prune_2_4_(nn.Sequential(nn.ReLU()))
    with pytest.raises(CalibrationError, match="calibration data is empty"):
        prune_2_4_(nn.Sequential(nn.Linear(8, 2)), [])
    module = nn.Sequential(nn.Linear(8, 2))
    quantize_(module, "w8")
    with pytest.raises(ConfigError, match="quantized already"):
        prune_2_4_(module)
