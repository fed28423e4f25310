"""Choices of ranges are compared in the whole model, by calls that had no part in them."""

import pytest

from pt2e_quant.flow.prepare.prepared import prepared_state
from pt2e_quant.passes.algorithms.algorithm import take_statistics
from pt2e_quant.passes.algorithms.choose_ranges import _Chooser
from pt2e_quant.passes.algorithms.observed_run import OutputError
from pt2e_quant.passes.algorithms.range_groups import AS_OBSERVED, SQUARED, Calls, range_groups
from tests.passes.algorithms.outlier_images import Reader, calibrated, images


def _chooser(errors):
    """A chooser of a network with two open ranges, whose candidates cost what is given."""
    data = images(8, seed=1)
    prepared = calibrated(Reader(1.0), data)
    take_statistics(prepared, prepared_state(prepared).algorithms)
    groups = range_groups(prepared)
    for group in groups.values():
        group.errors = dict(errors)
    calls = Calls(fitted=[], judged=[], unseen=[([x], 1.0) for x in data[:2]])
    return _Chooser(prepared, groups, calls, progress=False)


def test_tried_when_squared_error_wins_nowhere_then_it_is_compared_in_the_whole_model_too():
    errors = {AS_OBSERVED: 1.0, SQUARED: 1.1, "99.9 %": 2.0}
    chooser = _chooser(errors)
    assert [set(choice.values()) for choice in chooser.tried()] == [{AS_OBSERVED}, {SQUARED}]
    chooser = _chooser({**errors, "99.9 %": 0.9})  # too little for the cautious choice
    found = [set(choice.values()) for choice in chooser.tried()]
    assert found == [{AS_OBSERVED}, {"99.9 %"}, {SQUARED}]
    assert len(_chooser({AS_OBSERVED: 1.0, SQUARED: 0.5}).tried()) == 2


@pytest.mark.parametrize(
    ("judged", "unseen", "taken"),
    [
        ((20.0, 21.0, 20.9), (20.0, 20.5, 21.5), SQUARED),  # the calls that confirm decide
        ((20.0, 23.0, 20.9), (20.0, 21.0, 21.0), "99.9 %"),
        ((20.0, 19.5, 19.9), (20.0, 20.5, 23.0), SQUARED),  # few calls judged wrongly
        ((20.0, 23.0, 22.0), (20.0, 20.05, 19.0), AS_OBSERVED),  # nothing is confirmed
        ((20.0, 20.1, 20.1), (20.0, 20.2, 20.2), AS_OBSERVED),  # too little
    ],
)
def test_confirmed_when_choices_differ_then_all_calls_that_set_nothing_decide(
    judged, unseen, taken, monkeypatch
):
    chooser = _chooser({AS_OBSERVED: 1.0, SQUARED: 0.9, "99.9 %": 0.8})

    names = AS_OBSERVED, "99.9 %", SQUARED

    def whole(choices, compared, text="comparing ranges"):
        of_name = dict(zip(names, judged if text == "comparing ranges" else unseen, strict=True))
        found = [of_name[name] for choice in choices for name in set(choice.values())]
        return [OutputError([1.0] * 4, [10 ** (-db / 10)] * 4) for db in found]

    monkeypatch.setattr(chooser, "_whole", whole)
    choice, text = chooser.confirmed()
    assert set(choice.values()) == {taken}
    assert text.startswith("ranges are as observed") == (taken == AS_OBSERVED)


@pytest.mark.parametrize(
    ("spread", "noises", "taken"),
    [
        (1.05, [5.0, 0.8, 0.8, 0.8], AS_OBSERVED),  # all together lose
        (1.05, [0.9, 0.9, 1.0, 0.8], SQUARED),  # few gain much, but each call gains
        (1.05, [0.6, 1.1, 1.1, 1.05], AS_OBSERVED),  # one call makes the gain
        (2.00, [0.9, 0.9, 1.0, 0.8], SQUARED),
        (2.00, [0.96, 0.95, 0.96, 0.95], AS_OBSERVED),  # less than 0.25 dB
        (1.05, [0.96, 0.95, 0.96, 0.95], SQUARED),
    ],
)
def test_confirmed_when_calls_are_alike_then_the_mean_of_their_gains_is_evidence_too(
    spread, noises, taken, monkeypatch
):
    chooser = _chooser({AS_OBSERVED: 1.0, SQUARED: 0.9})
    for group in chooser.groups.values():
        group.maxima = {node: [1.0, spread] for node in group.nodes}

    def whole(choices, compared, text="comparing ranges"):
        of_name = {AS_OBSERVED: [1.0] * 4, SQUARED: noises}
        names = [next(iter(choice.values())) for choice in choices]
        return [OutputError([100.0] * 4, list(of_name[name])) for name in names]

    monkeypatch.setattr(chooser, "_whole", whole)
    choice, _ = chooser.confirmed()
    assert set(choice.values()) == {taken}
