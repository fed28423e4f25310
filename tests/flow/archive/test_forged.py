"""Files with right checksums and wrong contents: what an attacker can write, and may not do."""

import sys
from typing import Any

import pytest
import torch

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.flow.archive.program import load

NAMES = [
    "x); import os; os.mkdir('owned'); (",
    "x\nimport os",
    "a b",
    "",
    "1x",
    "x.__class__",
    "é",
]


def node_named(outer: dict[str, Any], op: str) -> dict[str, Any]:
    return next(n for n in outer["program"]["graph"]["nodes"] if n["op"] == op)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", ["placeholder", "get_attr", "call_function"])
def test_load_when_a_name_would_become_code_then_refused(own, op, name, rewrite):
    def change(outer: dict[str, Any]) -> None:
        node_named(outer, op)["name"] = name

    rewrite(own, change)
    with pytest.raises(ArtifactError, match="is no name"):
        load(own)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "x.__class__"])
@pytest.mark.parametrize("op", ["placeholder", "get_attr"])
def test_load_when_a_target_would_become_code_then_refused(own, op, name, rewrite):
    if op == "get_attr" and name == "1x":
        return  # a name of a Sequential's child may begin so; it is looked up as text

    def change(outer: dict[str, Any]) -> None:
        node_named(outer, op)["target"] = name

    rewrite(own, change)
    with pytest.raises(ArtifactError, match=r"is no (dotted )?name"):
        load(own)


@pytest.mark.parametrize("op", ["placeholder", "call_function"])
@pytest.mark.parametrize(
    "value",
    [
        {"$": "module", "v": 0},
        {"$": "data", "v": ["pt2e_quant.core.granularity:PerTensor", {}]},
        {"$": "tensor", "v": 0},
        "x",
    ],
)
def test_load_when_an_argument_prints_as_it_likes_then_refused(own, op, value, rewrite):
    if op == "call_function" and value == "x":
        return  # text is printed in quotes

    def change(outer: dict[str, Any]) -> None:
        state = {"dtype": "x\nimport os", "is_dynamic": False}
        cls = "pt2e_quant.pt2e.observers.recording:RecordingObserver"
        tables = {"parameters": {}, "buffers": {}, "transient": [], "modules": {}}
        row = {"class": cls, "training": False, "state": state, **tables}
        outer["program"]["modules"] = [row]
        node_named(outer, op)["args"] = [value]

    rewrite(own, change)
    with pytest.raises(ArtifactError, match="may not"):
        load(own)


def test_load_when_an_argument_or_trace_holds_code_then_it_is_text(own, tmp_path, rewrite):
    owned = tmp_path / "owned"
    code = f"'''\n\"\"\"\nimport pathlib; pathlib.Path({str(owned)!r}).mkdir()\n"

    def change(outer: dict[str, Any]) -> None:
        for node in outer["program"]["graph"]["nodes"]:
            node["meta"]["stack_trace"] = code
            node["meta"]["custom"] = {"$": "dict", "v": [[code, code]]}
            node["meta"]["nn_module_stack"] = {"map": [[code, {"tuple": [code, code]}]]}

    rewrite(own, change)
    loaded = load(own)
    assert loaded(torch.ones(2, 3))["y"].shape == (2, 2)
    assert "pathlib" not in loaded.code
    assert not owned.exists()


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "aten.from_file.default",
        "aten.linear",
        "torch.load",
        "higher_order.wrap",
        "prim.device.default",
        "aten.__class__.__init__",
    ],
)
def test_load_when_a_call_is_not_allowed_then_refused(own, target, rewrite):
    def change(outer: dict[str, Any]) -> None:
        node_named(outer, "call_function")["target"] = target

    rewrite(own, change)
    with pytest.raises(ArtifactError, match=r"may call|not allowed by default|not registered"):
        load(own)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "data", "v": ["os:PathLike", {}]},
        {"$": "data", "v": ["pt2e_quant.flow.archive.allowed:importlib", {}]},
        {"$": "data", "v": ["pt2e_quant.flow.archive.program:save", {}]},
        {"$": "data", "v": ["pt2e_quant.backends.registry:get", {}]},
        {"$": "enum", "v": ["pathlib:Path", "x"]},
        {"$": "pass", "v": "pt2e_quant.flow.archive.program:save"},
        {"$": "function", "v": "os.system"},
        {"$": "dtype", "v": "load"},
        {"$": "nothing", "v": 1},
    ],
)
def test_load_when_a_value_names_what_it_may_not_then_refused(own, value, rewrite):
    def change(outer: dict[str, Any]) -> None:
        outer["program"]["graph"]["meta"]["pt2e_quant.sample"] = {"value": value}

    rewrite(own, change)
    with pytest.raises(ArtifactError):
        load(own)


@pytest.mark.parametrize("cls", ["torch.nn.modules.linear:Linear", "os:PathLike", "x"])
def test_load_when_a_module_is_not_ours_then_refused(own, cls, rewrite):
    def change(outer: dict[str, Any]) -> None:
        outer["program"]["modules"] = [{"class": cls}]
        outer["program"]["graph"]["modules"] = {"evil": 0}
        outer["program"]["graph"]["order"].append("evil")

    rewrite(own, change)
    with pytest.raises(ArtifactError, match=r"does not have|may not name"):
        load(own)


@pytest.mark.parametrize(
    "spec",
    [
        '[1, {"type": "collections.defaultdict", "context": '
        '"{\\"default_factory_module\\": \\"antigravity\\"}", "children_spec": []}]',
        '[1, {"type": "builtins.dict", "context": "[{\\"__enum__\\": true, '
        '\\"fqn\\": \\"antigravity:x\\", \\"name\\": \\"y\\"}]", "children_spec": []}]',
    ],
)
def test_load_when_a_pytree_would_import_then_refused(own, spec, rewrite):
    def change(outer: dict[str, Any]) -> None:
        outer["program"]["graph"]["call"]["out"] = spec

    rewrite(own, change)
    with pytest.raises(ArtifactError, match="enum or a defaultdict"):
        load(own)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("name", ["../x.ptq", "/etc/passwd", "..", "a/b"])
def test_load_when_a_shard_is_elsewhere_then_refused(own, name, rewrite):
    rewrite(own, lambda outer: outer["shards"].append(name))
    with pytest.raises(ArtifactError, match="outside of its folder"):
        load(own)
