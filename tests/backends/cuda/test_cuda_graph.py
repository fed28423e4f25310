"""Captured calls without a GPU: what goes in is copied, replayed, and copied out."""

import contextlib

import pytest
import torch
from torch import nn

from benchmarks.gpu_timer import WARM_UPS, GraphTimer
from pt2e_quant.backends.cuda.backend import BACKEND
from pt2e_quant.backends.cuda.cuda_graph import capture_call
from pt2e_quant.core.errors import InputError
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e

CPU = torch.device("cpu")


class Stream:
    """Work in order: on a CPU everything is."""

    def __init__(self, device=None):
        self.device = device

    def wait_stream(self, other):
        assert isinstance(other, Stream)


class Graph:
    """Replays by calling again what was called while it was captured, into the same results."""

    def replay(self):
        self.again()


class Event:
    """A moment of a clock that the test moves."""

    now = 0.0

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.fixture
def driver(monkeypatch):
    """torch.cuda's streams, events and graphs."""
    for name, value in (("Stream", Stream), ("CUDAGraph", Graph), ("Event", Event)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    for name in ("stream", "device", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda it: contextlib.nullcontext(it))


class Counting(nn.Module):
    """A linear, and a buffer that every call writes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return {"y": self.linear(x), "calls": self.calls + 0}


@pytest.fixture
def artifact(monkeypatch):
    """A program that says it is on a GPU; its tensors stay."""
    torch.manual_seed(0)
    exported = torch.export.export(Counting().eval(), (torch.randn(3, 8),))
    prepared = prepare_pt2e(exported, BACKEND.quantizer("int8_dynamic"))
    made = BACKEND.allowing_unmeasured().lower(convert_pt2e(prepared))

    def run_leaves(leaves):
        return list(made.module(*made.capture.positional(leaves)).values())

    monkeypatch.setattr(made, "device", torch.device("cuda", 0))
    monkeypatch.setattr(made, "run_leaves", run_leaves)
    return made


@pytest.fixture
def captured(driver, artifact):
    """A captured call, whose graph runs the program anew."""
    with torch.no_grad():
        call = capture_call(artifact, torch.zeros(3, 8))

    def again():
        with torch.no_grad():
            for held, new in zip(call.outputs, artifact.run_leaves(call.inputs), strict=True):
                held.copy_(new)

    call.graph.again = again
    return call


def test_captured_call_when_run_again_then_gives_what_the_program_gives(captured, artifact):
    x, other = torch.randn(3, 8), torch.randn(3, 8)
    with torch.no_grad():
        wanted = [artifact.module(value)["y"].clone() for value in (x, other)]
        artifact.reset()
        first, second = captured.run(x), captured.run(other)
    assert torch.equal(first["y"], wanted[0])  # the second call left it be
    assert torch.equal(second["y"], wanted[1])
    # Warm-ups and the capture itself are forgotten.
    assert (float(first["calls"]), float(second["calls"])) == (1.0, 2.0)


def test_captured_call_when_shapes_or_dtypes_differ_then_refuses(captured):
    for other in (torch.randn(2, 8), torch.randn(3, 8).double()):
        with pytest.raises(InputError, match="captured"):
            captured.run(other)


def test_graph_timer_when_a_program_has_many_calls_then_times_are_per_call(driver):
    timer = GraphTimer(CPU)
    ran = []
    program = timer.capture([lambda: ran.append("a"), lambda: ran.append("b")])
    assert ran == ["a", "b"] * (WARM_UPS + 1)
    assert program.calls == 2

    def again():
        Event.now += 6e-3

    program.graph.again = again
    timing = timer.time({"one": program, "other": program}, rounds=5)
    assert timing["one"].median_s == pytest.approx(3e-3)
    assert timing["other"].min_s == pytest.approx(3e-3)
