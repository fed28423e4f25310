"""What every kernel unit has, read from the sources: no Triton and no GPU is needed."""

import ast
from pathlib import Path

import pytest

from benchmarks.kernels.ahead_of_time.matrix import targets
from benchmarks.kernels.catalog import BENCHES, COMPILE_CASES
from pt2e_quant.kernels.tiles import DEFAULT, read_tiles

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
INTERPRETED = ROOT / "tests" / "kernels" / "interpreted"
ALWAYS = ("op.py", "reference.py", "gpu.py", "tiles/default.json")
TOOLS = ROOT / "benchmarks" / "kernels"


def launches(path):
    """Kernel name to the call `kernel[grid](…)`, of every launch in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            yield ast.unparse(node.func.value), node


LAUNCHES = {
    path.parent.name: list(launches(path))
    for path in sorted(KERNELS.glob("*/gpu.py"))
    if list(launches(path))
}
UNITS = sorted(LAUNCHES)
CASE_KERNELS = {(case.op, case.kernel) for case in COMPILE_CASES}


def test_units_when_sources_are_read_then_are_found():
    assert "int8_linear" in UNITS


@pytest.mark.parametrize("op", UNITS)
def test_unit_when_listed_then_has_all_its_files(op):
    assert [name for name in ALWAYS if not (KERNELS / op / name).exists()] == []
    tools = [TOOLS / folder / f"{op}.py" for folder in ("bench", "compile_cases")]
    assert [path for path in tools if not path.exists()] == []


@pytest.mark.parametrize("op", UNITS)
def test_unit_when_listed_then_a_lowering_reaches_it(op):
    wanted = f"from pt2e_quant.kernels.{op}.op import"
    own = {KERNELS / op / name for name in ("op.py", "gpu.py", "reference.py")}
    readers = [
        path
        for folder in (KERNELS, ROOT / "backends" / "cuda", ROOT / "pt2e_quant" / "tensors")
        for path in folder.rglob("*.py")
        if path not in own and wanted in path.read_text()
    ]
    assert readers, f"nothing lowers to {op}"


@pytest.mark.parametrize("op", UNITS)
def test_launches_when_read_then_name_arguments_and_say_whether_multiply_adds_are_fused(op):
    fused = {case.kernel: case.fp_fusion for case in COMPILE_CASES if case.op == op}
    for kernel, call in LAUNCHES[op]:
        assert call.args == [], f"{op}: {kernel} is launched with positional arguments"
        said = [k.value for k in call.keywords if k.arg == "enable_fp_fusion"]
        assert said, f"{op}: the launch of {kernel} does not say enable_fp_fusion"
        assert ast.literal_eval(said[0]) is fused[kernel]


@pytest.mark.parametrize("op", UNITS)
def test_kernels_when_launched_then_have_a_compile_case(op):
    assert {(op, kernel) for kernel, _ in LAUNCHES[op]} == {p for p in CASE_KERNELS if p[0] == op}


@pytest.mark.parametrize("op", UNITS)
def test_unit_when_listed_then_interpreted_tests_run_its_launcher(op):
    wanted = f"from pt2e_quant.kernels.{op}.gpu import"
    assert any(wanted in path.read_text() for path in INTERPRETED.glob("test_*.py"))


@pytest.mark.parametrize("op", UNITS)
def test_tile_rows_when_listed_then_are_compiled_and_cases_and_sweeps_have_no_others(op):
    rows = set(read_tiles(op))
    assert {case.shape_class for case in COMPILE_CASES if case.op == op} == rows
    for bench in (bench for bench in BENCHES if bench.op == op):
        assert {case.shape_class for case in bench.cases} <= rows
        assert set(bench.sweep) <= rows


@pytest.mark.parametrize("op", UNITS)
def test_sweep_when_listed_then_has_the_blocks_of_the_table(op):
    (bench,) = (bench for bench in BENCHES if bench.name == op)
    for shape_class, row in read_tiles(op).items():
        names = {name for name, _ in row.blocks}
        for tiles in bench.sweep.get(shape_class, ()):
            assert {name for name, _ in tiles.blocks} == names


def test_cases_when_listed_then_are_of_a_unit_and_named_once():
    assert {case.op for case in COMPILE_CASES} == set(UNITS)
    assert {bench.op for bench in BENCHES} == set(UNITS)
    names = [case.name for case in COMPILE_CASES]
    assert sorted(set(names)) == sorted(names)


def test_targets_when_gpus_are_older_then_only_fp8_is_left_out():
    for target in targets(COMPILE_CASES):
        assert target.table == DEFAULT or target.capability >= 80
    for case in COMPILE_CASES:
        types = {*case.signature.values(), *map(str, case.constants.values())}
        assert (case.lowest_capability > 80) == any("fp8" in t for t in types), case.name


def test_compile_cases_when_they_name_matrix_units_then_do_so_for_every_generation():
    for case in COMPILE_CASES:
        known = {c for c in (80, 89, 90, 100) if c >= case.lowest_capability}
        assert set(case.matrix_units) in (known, set()), case.name
