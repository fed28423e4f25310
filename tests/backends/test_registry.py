"""Backends by name, from entry points too."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from pt2e_quant.backends import registry
from pt2e_quant.core.errors import ConfigError


def test_registry_when_the_name_is_unknown_then_the_error_offers_near_ones():
    with pytest.raises(ConfigError, match='no backend "xnpack": did you mean "xnnpack"'):
        registry.get("xnpack")


def test_registry_when_an_entry_point_names_a_backend_then_it_is_found_and_checked(monkeypatch):
    entry = EntryPoint("mine", "builtins:dict", "pt2e_quant.backends")
    found = EntryPoints([entry])
    monkeypatch.setattr(registry, "entry_points", lambda **query: found.select(**query))
    assert "mine" in registry.names()
    with pytest.raises(ConfigError, match='entry point of backend "mine" is no Backend'):
        registry.get("mine")
