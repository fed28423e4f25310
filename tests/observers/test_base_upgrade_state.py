"""State dicts of torchao's observers, new and old, into ours; and of whole models."""

import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.static.histogram import HistogramObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.static.moving_average import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from pt2e_quant.pt2e.observer import (
    get_observer_state_dict,
    load_observer_state_dict,
)

theirs = pytest.importorskip("torchao.quantization.pt2e.observer")

OURS = [
    MinMaxObserver,
    PerChannelMinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    HistogramObserver,
]


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("reverse", [False, True])
def test_state_when_from_the_other_library_then_the_same_qparams(ours, reverse):
    kinds = ours, getattr(theirs, ours.__name__)
    target_kind, source_kind = kinds[::-1] if reverse else kinds
    source, target = source_kind(dtype=torch.int8), target_kind(dtype=torch.int8)
    source(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    assert list(source.state_dict()) == list(target.state_dict())
    target.load_state_dict(source.state_dict())
    for expected, found in zip(source.calculate_qparams(), target.calculate_qparams(), strict=True):
        assert torch.equal(expected.double(), found.double())


def test_state_when_of_version_1_then_eps_is_made_and_ranges_renamed():
    observer = PerChannelMinMaxObserver(dtype=torch.int8)
    state = {"min_vals": torch.tensor([-1.0, -2.0]), "max_vals": torch.tensor([1.0, 3.0])}
    observer.load_state_dict(state)
    assert observer.max_val.tolist() == [1.0, 3.0]
    assert observer.eps.item() == torch.finfo(torch.float32).eps


def test_state_when_an_old_one_saw_nothing_then_neither_did_the_new_one():
    observer = HistogramObserver()
    state = observer.state_dict()
    state["min_val"], state["max_val"] = torch.tensor([]), torch.tensor([])
    state._metadata[""]["version"] = 2
    observer.load_state_dict(state)
    assert not observer.seen


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.activation_post_process_0 = MinMaxObserver()
        self.activation_post_process_1 = PerChannelMinMaxObserver()

    def forward(self, x):
        return self.activation_post_process_1(self.activation_post_process_0(x))


def test_observer_state_when_taken_and_put_back_then_equal():
    source, target = Model(), Model()
    source(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    state = get_observer_state_dict(source)
    assert all("activation_post_process" in key for key in state)
    load_observer_state_dict(target, state)
    found = get_observer_state_dict(target)
    assert all(torch.equal(state[key], found[key]) for key in state)


@pytest.mark.parametrize(("name", "message"), [("eps", "missing"), ("max_val", "missing")])
def test_observer_state_when_an_entry_is_missing_then_named(name, message):
    state = get_observer_state_dict(Model())
    del state[f"activation_post_process_0.{name}"]
    with pytest.raises(ConfigError, match=f"{message}: activation_post_process_0.{name}"):
        load_observer_state_dict(Model(), state)


def test_observer_state_when_an_entry_is_of_no_observer_then_named():
    state = get_observer_state_dict(Model())
    state["activation_post_process_7.min_val"] = torch.zeros(())
    with pytest.raises(ConfigError, match="unexpected: activation_post_process_7"):
        load_observer_state_dict(Model(), state)
