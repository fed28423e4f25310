"""The kept sample of a graph's inputs."""

import torch

from pt2e_quant.observers.statistics.kept_inputs import MOST_CALLS, KeptInputs


def test_sample_when_calls_are_many_then_bounded_and_the_same_places_of_every_input():
    inputs = KeptInputs(), KeptInputs()
    for count in range(200):
        assert inputs[0](torch.full((2,), count)).shape == (2,)
        assert inputs[1](count) == count
    assert len(inputs[0].kept) == MOST_CALLS
    assert [int(x[0]) for x in inputs[0].kept] == inputs[1].kept
    assert max(inputs[1].kept) > 100
    assert inputs[0].scaled(torch.ones(2)).kept is inputs[0].kept


def test_sample_when_a_caller_writes_its_input_later_then_it_stays():
    kept, x = KeptInputs(), torch.zeros(3)
    assert not kept.seen
    kept(x)
    x.fill_(1.0)
    assert torch.equal(kept.kept[0], torch.zeros(3))
