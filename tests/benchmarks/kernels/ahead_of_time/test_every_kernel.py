"""Every kernel, tile row and GPU generation: compiled, its instructions held to the baseline."""

import pytest

from benchmarks.kernels.ahead_of_time.baseline import read_baseline
from benchmarks.kernels.ahead_of_time.gate import broken_rules, regressions
from benchmarks.kernels.ahead_of_time.matrix import targets
from benchmarks.kernels.catalog import COMPILE_CASES
from pt2e_quant.kernels.tiles import DEFAULT

TARGETS = {target.name: target for target in targets(COMPILE_CASES)}
BASELINES = {
    version: {
        name: facts
        for op in sorted({case.op for case in COMPILE_CASES})
        for name, facts in read_baseline(op, version).items()
    }
    for version in ("3.7.1", "3.6.0")
}

by_version = pytest.mark.parametrize("version", BASELINES)


def in_every_run():
    """Of each kernel its first case on Hopper and its last on Ampere; `slow` has the others."""
    found = {}
    for target in TARGETS.values():
        kernel = (target.case.op, target.case.kernel)
        if target.table == DEFAULT and target.capability == 90:
            found.setdefault((*kernel, 90), target.name)
        elif target.table == DEFAULT and target.capability == 80:
            found[(*kernel, 80)] = target.name
    return sorted(found.values())


IN_EVERY_RUN = in_every_run()


@by_version
def test_baseline_when_read_then_has_every_target_and_no_other(version):
    how = "run python -m benchmarks.kernels.ahead_of_time --write"
    assert BASELINES[version].keys() - TARGETS.keys() == set(), how
    assert TARGETS.keys() - BASELINES[version].keys() == set(), how


@by_version
def test_baseline_when_checked_then_breaks_no_rule(version):
    broken = set()
    for name, facts in BASELINES[version].items():
        target = TARGETS[name]
        if broken_rules(target.case, target.capability, facts):
            broken.add(name)
    assert broken == set()


def check(name):
    pytest.importorskip("triton")
    from benchmarks.kernels.ahead_of_time.compile_kernel import triton_version
    from benchmarks.kernels.ahead_of_time.examine import examine

    target = TARGETS[name]
    facts = examine(target)
    assert broken_rules(target.case, target.capability, facts) == []
    before = read_baseline(target.case.op, triton_version()).get(name)
    assert before is None or regressions(facts, before) == []


@pytest.mark.parametrize("name", IN_EVERY_RUN)
def test_kernel_when_compiled_in_every_run_then_is_what_it_was(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TARGETS.keys() - set(IN_EVERY_RUN)))
def test_kernel_when_compiled_in_the_slow_run_then_is_what_it_was(name):
    check(name)
