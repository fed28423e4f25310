import gc
import weakref

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.accelerate import pause_gc, recompile
from pt2e_quant.accelerate.patch import VARIABLE, Patch


@pytest.mark.parametrize(
    ("switch", "is_on"),
    [("", True), ("other", True), ("this", False), ("other, this", False), ("all", False)],
)
def test_is_on_when_the_switch_names_patches_then_those_are_off(switch, is_on, monkeypatch):
    monkeypatch.setenv(VARIABLE, switch)
    assert Patch(name="this", saves="time").is_on() is is_on


@pytest.mark.parametrize("package", ["torch", "no-such-package"])
def test_is_on_when_a_version_is_not_the_tested_one_then_false(package):
    assert not Patch(name="this", saves="time", versions={package: "0.1"}).is_on()


@pytest.mark.parametrize("name", [pause_gc.PATCH.name, recompile.PATCH.name, "all"])
def test_convert_when_patches_are_off_then_the_graph_is_the_same(name, monkeypatch, plain_backend):
    def converted():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        inputs = (torch.linspace(-1, 1, 108).reshape(1, 3, 6, 6),)
        ep = torch.export.export(model.eval(), inputs)
        prepared = pq.prepare_pt2e(ep, plain_backend.quantizer("int8"))
        prepared(*inputs)
        return pq.convert_pt2e(prepared)

    patched = converted()
    monkeypatch.setenv(VARIABLE, name)
    plain = converted()
    assert plain.code == patched.code
    assert all(map(torch.equal, plain.state_dict().values(), patched.state_dict().values()))


@pytest.mark.parametrize("is_off", [False, True])
def test_pause_gc_when_switched_off_then_collections_go_on(is_off, monkeypatch):
    monkeypatch.setenv(VARIABLE, "pause_gc" if is_off else "")
    with pause_gc.pause_gc():
        assert gc.isenabled() is is_off
    assert gc.isenabled()


@pytest.fixture
def nothing_held(monkeypatch):
    """As in a user's process: `conftest.py` holds back what there is when tests start."""
    monkeypatch.setattr(pause_gc, "_holders", [])
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_held")
@pytest.mark.parametrize("is_off", [False, True])
def test_collect_new_when_switched_off_then_nothing_is_held_back(is_off, monkeypatch):
    monkeypatch.setenv(VARIABLE, "pause_gc" if is_off else "")
    with pause_gc.collect_new():
        with pause_gc.collect_new():
            pass
        assert (gc.get_freeze_count() == 0) is is_off
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_held")
def test_collect_new_when_the_block_raises_then_nothing_is_held_back():
    with pytest.raises(ZeroDivisionError), pause_gc.collect_new():
        _ = 1 / 0
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_held")
def test_collect_new_when_a_cycle_is_dropped_in_the_block_then_it_is_collected():
    with pause_gc.collect_new():
        cycle = [torch.zeros(1)]
        cycle.append(cycle)
        dropped = weakref.ref(cycle[0])
        del cycle
        gc.collect()
        assert dropped() is None


@pytest.mark.usefixtures("nothing_held")
def test_collect_new_when_a_caller_holds_objects_back_then_they_stay_so():
    gc.freeze()
    try:
        with pause_gc.collect_new():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
