"""The package's own names: what they are, where they come from, what importing them costs."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pt2e_quant as pq

SOURCE = Path(pq.__file__).read_text()

HEAVY = (
    *("sympy", "torchao", "executorch", "onnx", "onnxscript", "onnxruntime", "triton"),
    *("typer", "rich", "safetensors", "transformers"),
    *("torch._inductor.compile_fx", "torch._dynamo.guards"),
)


def modules_after(statement: str) -> set[str]:
    """What a statement imports in a process that has imported torch."""
    code = (
        f"import sys, torch; before = set(sys.modules); {statement}; "
        "print('\\n'.join(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_package_when_imported_then_nothing_heavy_is():
    new = modules_after("import pt2e_quant")
    assert not [name for name in new if name.startswith(HEAVY)]
    own = [name for name in new if name.startswith("pt2e_quant")]
    assert {name.split(".")[1] for name in own if "." in name} == {"core"}
    assert len(new) <= 60  # 26 of torch.ao, which registers the operators of q/dq graphs


def test_package_when_imported_then_operators_of_converted_graphs_are_registered():
    names = "quantized_decomposed.quantize_per_tensor", "pt2e_quant.unpack"
    lookups = "; ".join(f"torch.ops.{name}.default" for name in names)
    assert modules_after(f"import pt2e_quant; {lookups}")


def test_dir_when_called_then_gives_the_table_of_contents():
    assert dir(pq) == sorted(pq.__all__)
    assert {"quantize", "prepare", "calibrate", "convert", "save", "load"} <= set(dir(pq))
    assert [name for name in dir(pq) if inspect.ismodule(getattr(pq, name))] == [
        "algorithms",
        "backends",
        "errors",
        "tensors",
        "training",
    ]


def test_names_when_a_type_checker_reads_them_then_it_sees_where_each_comes_from():
    for name, file, target in checked_names():
        found = importlib.import_module(file)
        expected = getattr(found, target, None) or importlib.import_module(f"{file}.{target}")
        assert getattr(pq, name) is expected, name
    assert sorted(name for name, _, _ in checked_names()) == dir(pq)


def test_docstring_when_read_then_names_what_the_package_offers():
    told = pq.__doc__ or ""
    untold = [name for name in dir(pq) if f"`{name}" not in told and "Observer" not in name]
    # Those of one kind are named by an example.
    assert set(untold) <= {"FusedMovingAvgObsFakeQuantize", *SPECS}


SPECS = ("SharedQuantizationSpec", "DerivedQuantizationSpec")


def test_short_names_when_read_then_are_the_functions_of_pt2e():
    assert pq.prepare is pq.prepare_pt2e
    assert pq.convert is pq.convert_pt2e
    assert pq.prepare_qat is pq.prepare_qat_pt2e


def test_names_when_one_is_unknown_then_raises_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        pq.quantise  # noqa: B018


def checked_names():
    """(name, file, name there) of the block that only type checkers read."""
    block = next(
        node
        for node in ast.parse(SOURCE).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    found = {}
    for line in block.body:
        if isinstance(line, ast.ImportFrom):
            for name in line.names:
                found[name.asname] = (line.module, name.name)
        else:
            assert isinstance(line, ast.Assign)
            found[line.targets[0].id] = found[line.value.id]
    return [(name, *where) for name, where in found.items()]
