"""The kept sample of a graph's inputs."""

import torch

from pt2e_quant.observers.statistics import kept_inputs
from pt2e_quant.observers.statistics.kept_inputs import (
    MOST_CALLS,
    MOST_LARGEST,
    KeptCalls,
    KeptInputs,
)


def test_sample_when_calls_are_many_then_bounded_and_the_same_places_of_every_input():
    calls = KeptCalls()
    inputs = KeptInputs(calls), KeptInputs(calls)
    for count in range(200):
        assert inputs[0](torch.full((2,), count)).shape == (2,)
        assert inputs[1](count) == count
    assert len(inputs[0].kept) == MOST_CALLS
    assert [int(x[0]) for x in inputs[0].kept] == inputs[1].kept == calls.places
    assert max(inputs[1].kept) > 100
    assert inputs[0].scaled(torch.ones(2)).calls is calls


def test_sample_when_a_call_is_larger_than_others_then_kept_with_all_its_inputs():
    calls = KeptCalls()
    names, images = KeptInputs(calls), KeptInputs(calls)
    sizes = [float((37 * count) % 101) for count in range(101)]
    for count, size in enumerate(sizes):
        names(count)
        images(torch.full((count % 3 + 1, 2), -size))
    greatest = sorted(sizes, reverse=True)[:MOST_LARGEST]
    found = [round(size, 3) for size, _ in calls.sizes]
    assert sorted(found, reverse=True) == greatest
    assert [sizes[name] for name, _ in calls.largest] == found
    assert [float(x.abs().amax()) for _, x in calls.largest] == found


def test_sample_when_calls_are_large_then_as_many_as_there_is_room_for(monkeypatch):
    monkeypatch.setattr(kept_inputs, "MOST_BYTES", 8 * 4 * 100)
    calls = KeptCalls()
    images = KeptInputs(calls)
    for count in range(50):
        images(torch.full((100,), float(count)))
    assert (len(calls.sample), len(calls.largest)) == (8, 2)
    assert [float(x[0]) for x in images.kept] == calls.places
    assert {number for _, number in calls.sizes} == {48, 49}


def test_sample_when_a_call_stops_halfway_then_the_next_is_whole():
    calls = KeptCalls()
    first, second = KeptInputs(calls), KeptInputs(calls)
    first(1)
    first(2)
    second(3)
    assert (first.kept, second.kept, calls.count) == ([2], [3], 1)


def test_sample_when_a_caller_writes_its_input_later_then_it_stays():
    kept, x = KeptInputs(KeptCalls()), torch.zeros(3)
    assert not kept.seen
    kept(x)
    x.fill_(1.0)
    assert torch.equal(kept.kept[0], torch.zeros(3))
