"""Algorithms by name, and which go together."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.passes.algorithms import BalanceChannels, Gptq, KeepFloat, SmoothQuant, registry


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRounding(Gptq):
    name: ClassVar[str] = "other_rounding"


def test_algorithm_when_named_then_with_the_settings_of_its_paper():
    assert registry.algorithm_named("gptq") == Gptq()
    mine = Gptq(block_size=32)
    assert registry.algorithm_named(mine) is mine


def test_algorithm_when_unknown_then_near_names_are_offered():
    with pytest.raises(ConfigError, match='no algorithm "gptg": did you mean "gptq"'):
        registry.algorithm_named("gptg")


def entry(value: str) -> EntryPoint:
    return EntryPoint("theirs", value, "pt2e_quant.algorithms")


def test_entry_point_when_named_then_loaded(monkeypatch):
    there = entry("pt2e_quant.passes.algorithms.gptq:Gptq")
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: [there])
    assert registry.algorithm_named("theirs") == Gptq()
    assert "theirs" in registry.names()


def test_entry_point_when_it_makes_no_algorithm_then_refused(monkeypatch):
    there = entry("collections:OrderedDict")
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: [there])
    with pytest.raises(ConfigError, match="makes no Algorithm"):
        registry.algorithm_named("theirs")


def test_combination_when_one_is_asked_for_again_then_the_new_settings_count():
    found = registry.combined([SmoothQuant(), Gptq()], [SmoothQuant(least_gain=3.0), "gptq"])
    assert found == (SmoothQuant(least_gain=3.0), Gptq())


def test_combination_when_one_rounds_weights_then_it_runs_last():
    found = registry.combined([Gptq()], ["smooth_quant", BalanceChannels()])
    assert [algorithm.name for algorithm in found] == ["smooth_quant", "balance_channels", "gptq"]


def test_combination_when_two_round_weights_then_refused():
    with pytest.raises(ConfigError, match="gptq and other_rounding both choose the integers"):
        registry.combined([Gptq()], [OtherRounding()])


def test_effort_when_a_recipe_brings_keep_float_then_its_settings_stay():
    for own in (KeepFloat(least_db=30.0), KeepFloat(least_db=30.0, any_observer=False)):
        kept, _ = registry.with_effort([own], [], registry.Effort.BALANCED)
        assert [a for a in kept if isinstance(a, KeepFloat)] == [KeepFloat(least_db=30.0)]
    assert not any(
        isinstance(a, KeepFloat) for a in registry.with_effort([], [], registry.Effort.BALANCED)[0]
    )
