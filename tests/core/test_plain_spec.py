"""Results of a class that is not imported come back as plain dicts and tuples."""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import pt2e_quant as pq
from pt2e_quant.core.errors import Pt2eQuantWarning
from pt2e_quant.core.plain_spec import load_result_spec

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


torch.export.register_dataclass(Result, serialized_type_name="tests.core.test_plain_spec.Result")


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Result:
        return Result(logits=self.linear(x))


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_artifact_when_another_process_does_not_know_the_class_then_runs(backend, tmp_path):
    pytest.importorskip({"onnx": "onnxruntime", "xnnpack": "executorch"}[backend])
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    artifact = pq.quantize(_Net(), (x,), calibration_data=[x], backend=backend, progress=False)
    path = tmp_path / f"net{pq.backends.get(backend).suffix}"
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
