"""Compile every kernel for every GPU generation, print what the instructions say, judge it.

`python -m benchmarks.kernels.ahead_of_time` exits with 1 where a rule is broken or a kernel
is worse than its baseline; `--write` rewrites the baselines of the installed Triton instead of
comparing; `--op int8_linear` takes one unit, `--match large` the rows whose name has the text.
"""

import argparse
import sys

from benchmarks.kernels.ahead_of_time.baseline import read_baseline, write_baseline
from benchmarks.kernels.ahead_of_time.compile_kernel import triton_version
from benchmarks.kernels.ahead_of_time.examine import examine
from benchmarks.kernels.ahead_of_time.facts import KernelFacts
from benchmarks.kernels.ahead_of_time.gate import broken_rules, regressions
from benchmarks.kernels.ahead_of_time.matrix import Target, targets
from benchmarks.kernels.catalog import COMPILE_CASES
from pt2e_quant.core.errors import ConfigError


def main() -> int:
    """Run the command; 0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", help="one unit's folder")
    parser.add_argument("--match", default="", help="text that a row's name must have")
    parser.add_argument("--write", action="store_true", help="rewrite the baselines")
    options = parser.parse_args()
    chosen = [
        target
        for target in targets(COMPILE_CASES)
        if target.case.op == (options.op or target.case.op) and options.match in target.name
    ]
    found: dict[str, dict[str, KernelFacts]] = {}
    wrong = 0
    for target in chosen:
        wrong += _print_one(target, found, compare=not options.write)
    version = triton_version()
    for op, facts in found.items() if options.write else ():
        kept = read_baseline(op, version) if options.match else {}
        print(f"wrote {write_baseline(op, version, {**kept, **facts})}")
    print(f"{len(chosen)} compiled with Triton {version}, {wrong} with something wrong")
    return 1 if wrong else 0


def _print_one(target: Target, found: dict[str, dict[str, KernelFacts]], *, compare: bool) -> int:
    """Compile, print, and count 1 where something is wrong."""
    try:
        facts = examine(target)
    except ConfigError as error:
        print(f"{target.name}\n    REFUSED {error}", flush=True)
        return 1
    found.setdefault(target.case.op, {})[target.name] = facts
    problems = broken_rules(target.case, target.capability, facts)
    before = read_baseline(target.case.op, triton_version()).get(target.name)
    if compare and before is not None:
        problems += regressions(facts, before)
    numbers = ", ".join(f"{name} {value}" for name, value in facts.to_json().items() if value != "")
    print("\n    ".join([target.name, numbers, *(f"WRONG {p}" for p in problems)]), flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
