import itertools
import math
import random
import sys

import pytest

from pt2e_quant.analysis.solve import Candidate, least_noise, least_precision
from pt2e_quant.core.errors import MissingExtraError


def drawn_menu(seed, clusters=6):
    chance = random.Random(seed)
    menu = {}
    for at in range(clusters):
        noise = sorted((10 ** chance.uniform(-6, -1) for _ in range(2)), reverse=True)
        menu[f"g{at}"] = [
            Candidate(scheme="int8", noise=noise[0], precision=0, size=chance.randint(10, 99)),
            Candidate(scheme="dynamic", noise=noise[1], precision=1, size=chance.randint(10, 99)),
            Candidate(scheme="float", noise=0.0, precision=2, size=400.0),
        ]
    return menu


def every_choice(menu):
    return itertools.product(*menu.values())


@pytest.mark.parametrize("seed", range(8))
def test_least_precision_when_solved_then_no_choice_within_the_noise_gives_up_less(seed):
    menu = drawn_menu(seed)
    bound = 0.3 * sum(options[0].noise for options in menu.values())
    found = least_precision(menu, noise=bound).values()
    assert sum(c.noise for c in found) <= bound * (1 + 1e-6)
    fitting = [c for c in every_choice(menu) if sum(x.noise for x in c) <= bound]
    assert sum(c.precision for c in found) == min(sum(x.precision for x in c) for c in fitting)


@pytest.mark.parametrize("seed", range(8))
def test_least_noise_when_solved_then_no_choice_of_the_size_has_less(seed):
    menu = drawn_menu(seed)
    bound = 1000.0
    found = least_noise(menu, size=bound).values()
    assert sum(c.size for c in found) <= bound
    fitting = [c for c in every_choice(menu) if sum(x.size for x in c) <= bound]
    least = min(sum(x.noise for x in c) for c in fitting)
    assert sum(c.noise for c in found) == pytest.approx(least, rel=1e-4, abs=1e-9)


def test_solve_when_a_candidate_gives_nan_then_it_is_never_chosen():
    lost = Candidate(scheme="int8", noise=math.inf, precision=0, size=1.0)
    kept = Candidate(scheme="float", noise=0.0, precision=2, size=4.0)
    menu = {"a": [lost, kept], **drawn_menu(0)}
    size = sum(max(c.size for c in options) for options in menu.values())
    for found in (least_noise(menu, size=size), least_precision(menu, noise=1.0)):
        assert found["a"] is kept


def test_solve_when_nothing_fits_then_there_is_no_choice():
    assert least_noise(drawn_menu(0), size=1.0) is None
    only = {"g": [Candidate(scheme="int8", noise=1.0, precision=0, size=1.0)]}
    assert least_precision(only, noise=0.5) is None
    assert least_precision(only, noise=0.0) is None


def test_solve_when_scipy_is_missing_then_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtraError, match=r"pt2e-quant\[tune\]"):
        least_noise(drawn_menu(0), size=1000.0)
