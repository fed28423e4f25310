"""Measures are told apart by what they compute."""

import functools
import subprocess
import sys

import pytest
import torch
from torch import nn

from pt2e_quant.analysis.metric import measure_words


def closing_over(value):
    return lambda outputs, targets: (outputs - targets).abs().sum() * value


def with_default(value):
    def metric(outputs, targets, factor=value):
        return outputs.sum() * factor

    return metric


def top(outputs, targets, k=1):
    return outputs.topk(k).indices.sum()


def choosing(value):
    return lambda outputs, targets: targets in {"a", "b", "c", "d"} and value


def calling(value):
    return closing_over(closing_over(value))


class Counting:
    def __init__(self, value):
        self.value = value

    def __call__(self, outputs, targets):
        return self.value

    def measured(self, outputs, targets):
        return self.value


@pytest.mark.parametrize(
    "made",
    [
        closing_over,
        with_default,
        calling,
        Counting,
        lambda value: Counting(value).measured,
        lambda value: functools.partial(top, k=value),
        lambda value: nn.HuberLoss(delta=value),
        lambda value: closing_over(torch.zeros(5000).index_fill(0, torch.tensor(2500), value)),
    ],
)
def test_words_when_a_value_within_differs_then_they_differ(made):
    assert measure_words(made(1)) == measure_words(made(1))
    assert measure_words(made(1)) != measure_words(made(2))


def test_words_when_a_function_within_differs_then_they_differ():
    ours = lambda outputs, targets: list(map(lambda x: x + 1, outputs))  # noqa: E731
    theirs = lambda outputs, targets: list(map(lambda x: x - 1, outputs))  # noqa: E731
    assert measure_words(ours) != measure_words(theirs)


def test_words_when_made_in_another_process_then_the_same():
    told = (
        "from tests.analysis.test_measure_words import *;"
        "print(measure_words(calling(choosing(3))), end='')"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == measure_words(calling(choosing(3)))
