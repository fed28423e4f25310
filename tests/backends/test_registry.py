"""Backends by name, from entry points too."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from pt2e_quant.backends import registry
from pt2e_quant.core.errors import ConfigError


def test_unknown_name_offers_near_ones():
    with pytest.raises(ConfigError, match='no backend "xnpack": did you mean "xnnpack"'):
        registry.get("xnpack")


def test_entry_point_is_found_and_checked(monkeypatch):
    entry = EntryPoint("mine", "builtins:dict", "pt2e_quant.backends")
    found = EntryPoints([entry])
    monkeypatch.setattr(registry, "entry_points", lambda **query: found.select(**query))
    assert "mine" in registry.names()
    with pytest.raises(ConfigError, match='entry point of backend "mine" is no Backend'):
        registry.get("mine")
