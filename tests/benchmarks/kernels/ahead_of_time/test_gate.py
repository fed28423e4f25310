"""Facts counted from a listing, rules, regressions, occupancy: by hand, without Triton."""

import dataclasses

import pytest

from benchmarks.kernels.ahead_of_time.baseline import read_baseline, write_baseline
from benchmarks.kernels.ahead_of_time.compiled import Compiled
from benchmarks.kernels.ahead_of_time.disassemble import Disassembly, read_listing
from benchmarks.kernels.ahead_of_time.facts import KernelFacts, kernel_facts
from benchmarks.kernels.ahead_of_time.gate import broken_rules, regressions
from benchmarks.kernels.ahead_of_time.generations import GENERATIONS, capability_of
from benchmarks.kernels.ahead_of_time.matrix import targets
from benchmarks.kernels.compile_case import CompileCase
from benchmarks.kernels.compile_cases.int8_linear import CASES
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.kernels.tiles import TileConfig

CASE = CompileCase(
    op="int8_linear",
    kernel="k",
    variant="v",
    shape_class="large",
    signature={},
    constants={},
    aligned=(),
    matrix_units={80: "IMMA", 90: "IGMMA"},
    packed_weights=("BLOCK_N", "BLOCK_K"),
)
TILES = TileConfig((("BLOCK_N", 64), ("BLOCK_K", 32)), num_warps=4, num_stages=3)
GOOD = KernelFacts(
    registers=128,
    spills=0,
    shared_bytes=98304,
    blocks_per_sm=2,
    matrix="IGMMA.64x128x32.S8.S8",
    loop_instructions=100,
    wide_loads=1.0,
    issue_share=0.4,
    per_weight=2.0,
)


def facts_of(body, *, capability=90, ttir="", registers=128, shared=65536):
    lines = [f"/*{16 * n:04x}*/ {text} ;" for n, text in enumerate([*body, "BRA 0x0"])]
    listing = Disassembly(
        instructions=read_listing("\n".join(lines)),
        registers=registers,
        local_bytes=0,
        shared_bytes=1024,
    )
    compiled = Compiled(cubin=b"", ttir=ttir, shared_bytes=shared, warps=4)
    return kernel_facts(CASE, TILES, compiled, listing, GENERATIONS[capability])


def test_facts_when_counted_from_a_listing_then_are_those_counted_by_hand():
    loads = ["LDG.E.128 R1", "LDGSTS.E.BYPASS.128 [R1]", "LDG.E R1"]
    found = facts_of([*loads, "LDL R1", "STL R1", "IGMMA.64x128x32.S8.S8 R1", "MOV R1"])
    assert found.spills == 2
    assert found.wide_loads == pytest.approx(32 / 36, abs=1e-3)
    assert found.loop_instructions == 8
    assert found.matrix == "IGMMA.64x128x32.S8.S8"
    assert found.shared_bytes == 65536
    # 8 instructions over 4 issue slots; 64 * 128 * 32 products of four warps at 4096 a clock.
    assert found.issue_share == pytest.approx(2 / (64 * 128 * 32 / 4 / 4096), abs=1e-3)
    assert found.per_weight == pytest.approx(8 * 128 / (64 * 32), abs=1e-2)


def test_broken_rules_when_loads_are_narrow_then_only_a_case_that_forbids_them_breaks():
    case = dataclasses.replace(CASE, matrix_units={}, least_load=4)
    found = facts_of(["LDG.E.128 R1", "LDGSTS.E [R1]", "LDG.E.U8 R1"])
    assert found.narrowest_load == 1
    assert broken_rules(case, 90, found) == ["its loop has loads of 1 bytes, not 4"]
    assert not broken_rules(case, 90, facts_of(["LDG.E.128 R1", "LDGSTS.E [R1]"]))
    assert "narrowest_load" not in found.to_json()


def test_facts_when_products_are_a_warps_own_then_the_issue_share_is_of_one_warp():
    found = facts_of(["IMMA.16832.S8.S8.SAT R1"] * 4, capability=80)
    assert found.issue_share == pytest.approx((5 / 4) / (4 * 16 * 8 * 32 / 2048), abs=1e-3)
    assert facts_of(["IMMA.16832.S8.S8.SAT R1"], capability=100).issue_share is None
    assert facts_of(["UTCHMMA R1"]).issue_share is None


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("%b = arith.mulf %a, %c : tensor<128x64xbf16> loc(#loc1)", 1),
        ("%b = arith.addf %a, %c : bf16 loc(#loc1)", 1),
        ("%b = math.exp %a : tensor<4xf16> loc(#loc1)", 1),
        ("%b = arith.addf %a, %c : tensor<128xf32> loc(#loc1)", 0),
        ("%b = arith.extf %a : tensor<128xbf16> to tensor<128xf32> loc(#loc1)", 0),
        ("%b = arith.truncf %a : tensor<128xf32> to tensor<128xbf16> loc(#loc1)", 0),
        ("%b = tt.dot %a, %c, %d : tensor<16x16xbf16> * tensor<16x16xbf16> -> tensor<16xf32>", 0),
    ],
)
def test_facts_when_arithmetic_is_on_16_bit_floats_then_it_is_counted(line, count):
    assert facts_of([], ttir=line).half_arithmetic == count


def test_broken_rules_when_a_kernel_is_good_then_are_none():
    assert broken_rules(CASE, 90, GOOD) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spills": 7}, "7 instructions move spilled registers"),
        ({"blocks_per_sm": 0}, "no block fits: 98304 bytes"),
        ({"matrix": "IMMA.16832.S8.S8"}, "multiplies by IMMA.16832.S8.S8, not by IGMMA"),
        ({"matrix": ""}, "multiplies by nothing, not by IGMMA"),
        ({"wide_loads": 0.5}, "only 50% of its loop's bytes are loaded 16 at a time"),
        ({"half_arithmetic": 3}, "3 operations on 16-bit floats"),
    ],
)
def test_broken_rules_when_one_fact_is_bad_then_name_its_rule(change, said):
    (found,) = broken_rules(CASE, 90, dataclasses.replace(GOOD, **change))
    assert said in found


def test_regressions_when_facts_are_equal_or_better_then_are_none():
    better = {"loop_instructions": 90, "blocks_per_sm": 3, "registers": 200, "issue_share": None}
    assert regressions(GOOD, GOOD) == []
    assert regressions(dataclasses.replace(GOOD, **better), GOOD) == []
    assert regressions(dataclasses.replace(GOOD, loop_instructions=104), GOOD) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spills": 1}, "spills: 1 instructions, were 0"),
        ({"blocks_per_sm": 1}, "blocks per SM: 1, were 2"),
        ({"matrix": "IMMA.16832"}, "matrix instruction: IMMA.16832, was IGMMA"),
        ({"wide_loads": 0.95}, "wide loads: 95%, were 100%"),
        ({"loop_instructions": 106}, "instructions of the loop: 106, were 100"),
        ({"issue_share": 0.5}, "issue share: 0.5, were 0.4"),
        ({"per_weight": 2.2}, "instructions per weight: 2.2, were 2.0"),
    ],
)
def test_regressions_when_one_fact_is_worse_then_name_it(change, said):
    (found,) = regressions(dataclasses.replace(GOOD, **change), GOOD)
    assert said in found


@pytest.mark.parametrize(
    ("capability", "warps", "registers", "shared", "blocks"),
    [
        (90, 4, 32, 0, 16),  # by warps
        (80, 1, 16, 0, 32),  # by blocks
        (89, 8, 64, 0, 4),  # by registers: 8 warps of 2048 in each partition
        (90, 4, 255, 0, 2),
        (80, 4, 128, 98304, 1),  # by shared memory
        (90, 4, 128, 98304, 2),
        (89, 4, 128, 102400, 0),  # does not fit
    ],
)
def test_resident_blocks_when_one_resource_is_short_then_it_bounds_them(
    capability, warps, registers, shared, blocks
):
    generation = GENERATIONS[capability]
    assert generation.resident_blocks(warps=warps, registers=registers, shared=shared) == blocks


def test_capability_of_when_the_device_is_unknown_then_raises():
    with pytest.raises(ConfigError, match='tile table for "riva_128"'):
        capability_of("riva_128")


def test_targets_when_a_case_needs_fp8_then_generations_before_ada_are_left_out():
    made = list(targets([CASES[0], dataclasses.replace(CASES[0], lowest_capability=89)]))
    assert [t.capability for t in made] == [80, 89, 90, 100, 89, 90, 100]
    assert made[0].name == f"{CASES[0].name} @ default sm_80"


def test_targets_when_a_shape_class_has_no_tiles_then_raises():
    with pytest.raises(ConfigError, match='int8_linear has no tiles for shape class "huge"'):
        list(targets([dataclasses.replace(CASES[0], shape_class="huge")]))


def test_baseline_when_written_then_is_read_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.kernels.ahead_of_time.baseline.BASELINES", tmp_path)
    rows = {"b": GOOD, "a": dataclasses.replace(GOOD, per_weight=None, matrix="")}
    file = write_baseline("an_op", "3.7.1", rows)
    assert file == tmp_path / "an_op" / "triton_3_7_1.json"
    assert len(file.read_text().splitlines()) == 4
    assert read_baseline("an_op", "3.7.1") == rows
    assert read_baseline("an_op", "3.6.0") == {}
