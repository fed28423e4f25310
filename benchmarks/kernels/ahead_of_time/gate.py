"""What a compiled kernel must hold to, and how it may not get worse."""

from benchmarks.kernels.ahead_of_time.facts import KernelFacts
from benchmarks.kernels.compile_case import CompileCase

__all__ = ["broken_rules", "regressions"]

_SLACK = 1.05
"""A loop may grow by this before it counts as a regression: compilers shuffle a few moves."""


def broken_rules(case: CompileCase, capability: int, facts: KernelFacts) -> list[str]:
    """What is wrong with a kernel whatever it was before; empty if nothing is."""
    found = []
    if facts.spills:
        found.append(f"{facts.spills} instructions move spilled registers")
    if not facts.blocks_per_sm:
        found.append(f"no block fits: {facts.shared_bytes} bytes of shared memory")
    wanted = case.matrix_units.get(capability)
    if wanted is not None and not facts.matrix.startswith(wanted):
        found.append(f"its loop multiplies by {facts.matrix or 'nothing'}, not by {wanted}")
    if wanted is not None and facts.wide_loads < case.least_wide:
        found.append(f"only {facts.wide_loads:.0%} of its loop's bytes are loaded 16 at a time")
    if facts.narrowest_load < case.least_load:
        found.append(f"its loop has loads of {facts.narrowest_load} bytes, not {case.least_load}")
    if facts.half_arithmetic:
        found.append(f"{facts.half_arithmetic} operations on 16-bit floats: cast to float32 first")
    return found


def regressions(facts: KernelFacts, baseline: KernelFacts) -> list[str]:
    """How a kernel is worse than its baseline; empty if it is nowhere."""
    found = []
    if facts.spills > baseline.spills:
        found.append(f"spills: {facts.spills} instructions, were {baseline.spills}")
    if facts.blocks_per_sm < baseline.blocks_per_sm:
        found.append(f"blocks per SM: {facts.blocks_per_sm}, were {baseline.blocks_per_sm}")
    if facts.matrix.partition(".")[0] != baseline.matrix.partition(".")[0]:
        found.append(f"matrix instruction: {facts.matrix or 'none'}, was {baseline.matrix}")
    if facts.wide_loads < baseline.wide_loads:
        found.append(f"wide loads: {facts.wide_loads:.0%}, were {baseline.wide_loads:.0%}")
    for name, now, before in (
        ("instructions of the loop", facts.loop_instructions, baseline.loop_instructions),
        ("issue share", facts.issue_share, baseline.issue_share),
        ("instructions per weight", facts.per_weight, baseline.per_weight),
    ):
        if now is not None and before is not None and now > _SLACK * before:
            found.append(f"{name}: {now}, were {before}")
    return found
