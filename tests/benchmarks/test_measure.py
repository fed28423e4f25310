import math
import time
from collections import Counter
from itertools import pairwise

import pytest
import torch

from benchmarks.measure import Stopwatch, interleave, interleave_loads, mean_cosine, sqnr_db


def test_sqnr_when_noise_is_a_tenth_of_the_signal_then_20_db():
    signal = torch.tensor([3.0, 4.0])
    assert sqnr_db([signal], [signal * 1.1]) == pytest.approx(20.0, abs=1e-5)


def test_sqnr_when_equal_then_infinite_and_when_nan_then_minus_infinite():
    signal = torch.ones(3)
    assert sqnr_db([signal], [signal]) == math.inf
    assert sqnr_db([signal], [torch.tensor([1.0, math.nan, 1.0])]) == -math.inf


def test_mean_cosine_when_given_pairs_then_averages_over_them():
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert mean_cosine([x, x], [x, y]) == pytest.approx(0.5)


def test_interleave_when_run_then_each_round_has_every_call_once_behind_any_other():
    log = []
    calls = {name: (lambda name=name: log.append(name)) for name in "abc"}
    latencies = interleave(calls, rounds=30, warmup=0)
    rounds = [log[i : i + 3] for i in range(0, 90, 3)]
    assert all(sorted(labels) == ["a", "b", "c"] for labels in rounds)
    assert len({pair for labels in rounds for pair in pairwise(labels)}) == 6
    assert all(0 <= value.min_ms <= value.median_ms for value in latencies.values())


def test_interleave_loads_when_run_then_makes_every_call_anew_in_each_load():
    made, called = [], Counter()

    def loader(label):
        def load():
            made.append(label)
            return lambda: called.update([label])

        return load

    latencies = interleave_loads({label: loader(label) for label in "ab"}, loads=4, rounds=10)
    assert Counter(made) == {"a": 4, "b": 4}
    assert {tuple(made[i : i + 2]) for i in range(0, 8, 2)} == {("a", "b"), ("b", "a")}
    # rounds are shared out, 3 a load; each load warms up with 3
    assert called == {"a": 4 * 6, "b": 4 * 6}
    assert all(0 <= found.min_ms <= found.median_ms for found in latencies.values())


def test_stopwatch_when_a_stage_runs_again_then_adds_its_seconds():
    watch = Stopwatch()
    assert watch.run("wait", lambda: time.sleep(0.01)) is None
    first = watch.stages["wait"]
    assert watch.run("wait", lambda: 7) == 7
    assert watch.stages["wait"] >= first >= 0.01
