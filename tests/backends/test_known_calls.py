"""Calls bound to a capture: the leaves of a full check, which is made once per signature."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pt2e_quant.backends import artifact
from pt2e_quant.backends.artifact import KnownCalls, result_builder
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError
from pt2e_quant.core.read_capture import capture_of


class Nested(nn.Module):
    """Containers, a keyword, literals left out, a dynamic batch."""

    def forward(self, x, pair, *, scale=None, extra, times=2):
        a, b = pair
        y = x + a["left"] + b[0] + extra * times
        return y if scale is None else y * scale


BATCH = torch.export.Dim("batch", min=2, max=16)


def call(batch=3, dtype=torch.float32):
    x = torch.ones(batch, 4, dtype=dtype)
    return (x, ({"left": x + 1}, [x + 2])), {"extra": x + 3}


@pytest.fixture
def capture(monkeypatch):
    args, kwargs = call()
    rows = {0: BATCH}
    shapes = {"x": rows, "pair": ({"left": rows}, [rows]), "scale": None, "extra": rows}
    kwargs = {"scale": None, **kwargs, "times": 2}
    program = torch.export.export(
        Nested(), args, kwargs, dynamic_shapes=shapes | {"times": None}, strict=False
    )
    return capture_of(program.module())


@pytest.fixture
def checks(monkeypatch):
    """The calls that were checked in full."""
    made = []
    bind = Capture.bind
    monkeypatch.setattr(Capture, "bind", lambda *given: made.append(given) or bind(*given))
    return made


def same(left, right):
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


FORMS = {
    "as exported": lambda args, kwargs: (args, {"scale": None, **kwargs, "times": 2}),
    "literals left out": lambda args, kwargs: (args, kwargs),
    "by name": lambda args, kwargs: ((), {"pair": args[1], **kwargs, "x": args[0]}),
    "by place": lambda args, kwargs: ((*args, None, kwargs["extra"]), {}),
    "a parameter": lambda args, kwargs: ((nn.Parameter(args[0]), args[1]), kwargs),
}


@pytest.mark.parametrize("form", FORMS)
def test_bind_when_the_form_is_known_then_the_leaves_of_a_full_check(capture, checks, form):
    calls = KnownCalls(capture)
    for batch in (3, 3, 5, 3):
        args, kwargs = FORMS[form](*call(batch))
        assert same(calls.bind(args, kwargs), capture.arrange(args, kwargs))
    assert len(checks) == 2  # one for each batch size


BAD = {
    "another dtype": lambda args, kwargs: call(dtype=torch.float64),
    "unequal batches": lambda args, kwargs: (args, {"extra": torch.ones(2, 4)}),
    "too large": lambda args, kwargs: call(17),
    "another literal": lambda args, kwargs: (args, {**kwargs, "times": 3}),
    "no data": lambda args, kwargs: (args, {"extra": kwargs["extra"].to("meta")}),
    "sparse": lambda args, kwargs: (args, {"extra": kwargs["extra"].to_sparse()}),
    "another key": lambda args, kwargs: ((args[0], ({"right": args[0]}, [args[0]])), kwargs),
    "a tuple for a list": lambda args, kwargs: ((args[0], (args[1][0], (args[0],))), kwargs),
    "an array": lambda args, kwargs: (args, {"extra": kwargs["extra"].numpy()}),
    "swapped names": lambda args, kwargs: (args, {"scale": kwargs["extra"], "extra": None}),
}


@pytest.mark.parametrize("name", BAD)
def test_bind_when_a_call_does_not_fit_then_an_error_each_time(capture, name):
    calls = KnownCalls(capture)
    calls.bind(*call())
    for _ in range(2):
        with pytest.raises(InputError):
            calls.bind(*BAD[name](*call()))
    args, kwargs = call()
    assert calls.bind(args, kwargs)[0] is args[0]


def test_bind_when_signatures_are_many_then_few_are_kept(capture, checks, monkeypatch):
    monkeypatch.setattr(artifact, "LIMIT", 3)
    calls = KnownCalls(capture)
    for batch in (2, 3, 4, 4, 5, 2):
        args, kwargs = call(batch)
        assert calls.bind(args, kwargs)[0] is args[0]
    assert len(checks) == 5  # the second batch of 2 again: the fourth size made room


@pytest.mark.parametrize(
    "result",
    [7, (1, 2), [1, 2], {"b": 1, "a": 2}, (), {"a": 1, "b": (2, [3])}, ((), 1), torch.Size([1, 2])],
)
def test_result_builder_when_given_leaves_then_builds_what_pytree_builds(result):
    leaves, spec = pytree.tree_flatten(result)
    built = result_builder(spec)(leaves)
    expected = pytree.tree_unflatten(leaves, spec)
    assert built == expected
    assert type(built) is type(expected)
    if isinstance(expected, dict):
        assert list(built) == list(expected)
