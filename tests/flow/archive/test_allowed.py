"""What a saved file may name: classes and passes of this package."""

import importlib
import pkgutil

import pytest

import pt2e_quant
from pt2e_quant.flow.archive.allowed import class_of_name, name_of_class
from pt2e_quant.observers.base import ObserverBase
from pt2e_quant.observers.training.fake_quantize import FakeQuantizeBase


def every_observer() -> list[type]:
    """The observers and fake-quantizes of every room of the package."""
    for found in pkgutil.walk_packages(pt2e_quant.__path__, "pt2e_quant."):
        if found.name.split(".")[1] in ("observers", "pt2e", "passes", "flow"):
            importlib.import_module(found.name)
    classes, waiting = set(), [ObserverBase, FakeQuantizeBase]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        classes.add(cls)
    return sorted((c for c in classes if c.__module__.startswith("pt2e_quant.")), key=str)


@pytest.mark.parametrize("cls", every_observer(), ids=lambda cls: cls.__name__)
def test_name_when_of_an_observer_of_any_room_then_it_stands_for_the_class(cls):
    assert class_of_name(name_of_class(cls)) is cls
