"""Backends by name, from entry points too."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("form", [torch.export.ExportedProgram, nn.Module])
def test_lower_when_given_a_program_or_module_then_told_what_it_takes(form):
    model = nn.Linear(2, 2)
    given = model if form is nn.Module else torch.export.export(model, (torch.ones(1, 2),))
    with pytest.raises(ConfigError, match=rf"found {type(given).__name__}\n  fix .*convert_pt2e"):
        registry.get("cpu").lower(given)
