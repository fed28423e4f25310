"""Results of a class that is not imported come back as plain dicts and tuples."""

import io
import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import pt2e_quant as pq
from pt2e_quant.core.errors import InputError, Pt2eQuantWarning
from pt2e_quant.core.tree_specs import dump_spec, load_result_spec, load_spec
from tests.parameters import named_subset

LEAF = {"type": None, "context": None, "children_spec": []}


def spec_text(kind, context, children):
    return json.dumps([1, {"type": kind, "context": context, "children_spec": children}])


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ('["logits", "hidden"]', {"logits": 1, "hidden": 2}),
        ('[["logits", "hidden"], ["past"]]', {"logits": 1, "hidden": 2}),
        ("null", (1, 2)),
        ("no json", (1, 2)),
        ('["one"]', (1, 2)),
        ("[3, 4]", (1, 2)),
    ],
)
def test_spec_when_its_class_is_unknown_then_fields_are_a_dict_or_a_tuple(context, expected):
    text = spec_text("nobody.Result", context, [LEAF, LEAF])
    with pytest.warns(Pt2eQuantWarning, match=r"class nobody\.Result .* import nobody before"):
        spec = load_result_spec(text)
    assert pytree.tree_unflatten([1, 2], spec) == expected


def test_unknown_class_when_it_is_inside_others_then_they_are_kept():
    inner = {"type": "nobody.Part", "context": '["a"]', "children_spec": [LEAF]}
    text = spec_text("builtins.list", "null", [inner, LEAF])
    with pytest.warns(Pt2eQuantWarning, match="nobody.Part"):
        spec = load_result_spec(text)
    assert pytree.tree_unflatten([1, 2], spec) == [{"a": 1}, 2]


def test_spec_when_its_structure_is_known_then_read_without_a_warning():
    spec = pytree.tree_structure({"x": (1, [2])})
    assert load_result_spec(pytree.treespec_dumps(spec)) == spec


@dataclass
class Result:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


torch.export.register_dataclass(Result, serialized_type_name="tests.core.test_tree_specs.Result")


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Result:
        return Result(logits=self.linear(x))


@pytest.mark.parametrize("backend", named_subset(["cpu", "onnx", "xnnpack"], "onnx"))
def test_artifact_when_another_process_does_not_know_the_class_then_runs(backend, tmp_path):
    pytest.importorskip({"onnx": "onnxruntime", "xnnpack": "executorch", "cpu": "torch"}[backend])
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    target = pq.backends.get(backend)
    path = tmp_path / f"net{target.suffix}"
    if backend == "cpu":
        target = target.allowing_slower()
    artifact = pq.quantize(_Net(), (x,), calibration_data=[x], backend=target, progress=False)
    artifact.save(path)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch, pt2e_quant as pq\n"
        f"artifact = pq.backends.get({backend!r}).load({str(path)!r})\n"
        f"found = artifact.run(torch.load({str(tmp_path / 'x.pt')!r}))\n"
        f"assert list(found) == ['logits'], found\n"
        f"torch.save(found['logits'], {str(tmp_path / 'y.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)
    assert torch.equal(torch.load(tmp_path / "y.pt"), artifact.run(x).logits)


class _Taker(_Net):
    def forward(self, x: Result) -> Result:
        return super().forward(x.logits)


def test_class_in_a_call_when_its_program_is_stored_then_the_file_holds_no_object_of_it(tmp_path):
    given = Result(logits=torch.randn(2, 8, generator=torch.Generator().manual_seed(0)))
    target = pq.backends.get("cpu").allowing_slower()
    artifact = pq.quantize(
        _Taker(), (given,), calibration_data=[(given,)], backend=target, progress=False
    )
    artifact.save(tmp_path / "net.qpt2")
    with zipfile.ZipFile(tmp_path / "net.qpt2") as archive:
        samples = [n for n in archive.namelist() if "sample_inputs" in n]
        kept = [archive.read(n) for n in samples]
    assert kept
    for data in kept:  # Reading a file never runs code.
        torch.load(io.BytesIO(data), weights_only=True)
    found = target.load(tmp_path / "net.qpt2").run(given)
    assert torch.equal(found.logits, artifact.run(given).logits)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Box:
    """A class that was registered without a name."""

    def __init__(self, value, label):
        self.value, self.label = value, label


pytree.register_pytree_node(
    Box, lambda box: ([box.value], box.label), lambda parts, label: Box(parts[0], label)
)


class Unnamed(nn.Module):
    """Takes and returns classes that torch can write no name of."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, pair):
        h = self.linear(pair.first) + pair[1]
        return {"pair": Pair(h, h * 2), "best": h.max(1), "box": Box(h, "label")}


@pytest.mark.parametrize("backend", named_subset(["cpu", "onnx", "xnnpack"], "xnnpack"))
def test_class_without_a_name_when_in_a_call_and_its_result_then_kept_in_a_file(backend, tmp_path):
    target = pq.backends.get(backend)
    torch.manual_seed(0)
    model = Unnamed().eval()
    pair = Pair(torch.randn(4, 32), torch.randn(4, 32))
    artifact = pq.quantize(
        model,
        (pair,),
        calibration_data=[(pair,)],
        dynamic_shapes=(Pair(*({0: torch.export.Dim("b", min=1, max=8)},) * 2),),
        backend=target.allowing_slower() if backend == "cpu" else target,
        progress=False,
        verify="process",
    )
    path = tmp_path / f"model{target.suffix}"
    artifact.save(path)
    small = Pair(*(part[:2] for part in pair))
    wanted = model(small)
    for found in (artifact.run(small), target.load(path).run(small)):
        assert type(found["pair"]) is Pair
        assert type(found["best"]) is torch.return_types.max
        assert found["box"].label == "label"
        leaves = pytree.tree_leaves(found)
        for right, left in zip(pytree.tree_leaves(wanted), leaves, strict=True):
            assert right.shape == left.shape
        torch.testing.assert_close(found["pair"].second, wanted["pair"].second, atol=0.1, rtol=0.1)


def test_class_without_a_name_when_not_imported_then_a_namedtuple_like_it_or_a_tuple():
    leaves = {"children_spec": [LEAF, LEAF]}
    pair = {"type": "nobody.Pair", "context": '["a", "b"]', "form": "namedtuple", **leaves}
    box = {"type": "nobody.Box", "context": '["a", "b"]', "form": "node", **leaves}
    text = spec_text("builtins.list", "null", [pair, box])
    with pytest.warns(Pt2eQuantWarning, match=r"class nobody\.Box is not"):
        found, plain = pytree.tree_unflatten([1, 2, 3, 4], load_result_spec(text))
    assert (found.a, found.b, plain) == (1, 2, (3, 4))
    assert load_spec(text).num_leaves == 4


def test_class_without_a_name_when_what_it_says_is_no_json_then_refused_with_the_fix():
    spec = pytree.tree_structure(Box(1, torch.float32))
    with pytest.raises(InputError, match=r"structure of .*Box cannot be written") as found:
        dump_spec(spec)
    assert "to_dumpable_context" in str(found.value.fix)
