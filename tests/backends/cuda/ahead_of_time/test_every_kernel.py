"""Every kernel, tile row and GPU generation: compiled, its instructions held to the baseline."""

import pytest

from pt2e_quant.backends.cuda.ahead_of_time.baseline import read_baseline
from pt2e_quant.backends.cuda.ahead_of_time.gate import broken_rules, regressions
from pt2e_quant.backends.cuda.ahead_of_time.matrix import targets
from pt2e_quant.kernels.catalog import COMPILE_CASES

VERSION = "3.7.1"
"""Of the Triton that baselines are written with."""

TARGETS = {target.name: target for target in targets(COMPILE_CASES)}
# One tile row of each kernel on Hopper, one on Ampere; `slow` has the others.
IN_EVERY_RUN = (
    "int8_linear/int8_linear_kernel/decode/per token, gelu, residual, bf16 @ default sm_80",
    "int8_linear/int8_linear_kernel/large/static, relu, int8 @ default sm_90",
    "quantize/quantize_kernel/large/bf16, gelu, int8 @ default sm_90",
    "quantize_per_token/quantize_per_token_kernel/wide/bf16 @ default sm_90",
    "int8_add/int8_add_kernel/large/two int8, relu @ default sm_80",
    "norm_quantize/norm_quantize_kernel/wide/rms, per token @ default sm_90",
)


def test_the_baseline_has_every_row_and_no_other():
    ops = {target.case.op for target in TARGETS.values()}
    rows = {name for op in ops for name in read_baseline(op, VERSION)}
    how = "run python -m pt2e_quant.backends.cuda.ahead_of_time --write"
    assert rows - TARGETS.keys() == set(), how
    assert TARGETS.keys() - rows == set(), how


def test_the_baseline_breaks_no_rule():
    broken = {}
    for name, target in TARGETS.items():
        facts = read_baseline(target.case.op, VERSION).get(name)
        if facts is not None and (found := broken_rules(target.case, target.capability, facts)):
            broken[name] = found
    assert broken == {}


def test_a_row_of_every_kernel_is_in_every_run():
    kernels = {(case.op, case.kernel) for case in COMPILE_CASES}
    chosen = {(TARGETS[n].case.op, TARGETS[n].case.kernel) for n in IN_EVERY_RUN}
    assert kernels - chosen == set()


def check(name):
    pytest.importorskip("triton")
    from pt2e_quant.backends.cuda.ahead_of_time.compile_kernel import triton_version
    from pt2e_quant.backends.cuda.ahead_of_time.examine import examine

    target = TARGETS[name]
    facts = examine(target)
    assert broken_rules(target.case, target.capability, facts) == []
    before = read_baseline(target.case.op, triton_version()).get(name)
    assert before is None or regressions(facts, before) == []


@pytest.mark.parametrize("name", IN_EVERY_RUN)
def test_a_kernel_compiles_to_what_it_was(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TARGETS.keys() - set(IN_EVERY_RUN)))
def test_any_kernel_compiles_to_what_it_was(name):
    check(name)
