"""Draw models, run them, shrink what fails.

`python -m tests.fuzz.search --models N --start SEED`
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.grammar import draw_program
from tests.fuzz.processes import Answerer, Died, Hung
from tests.fuzz.program import Program, source
from tests.fuzz.shrink import failure_class, shrink

__all__ = ["FAILURES", "Result", "run_source", "search"]

LIMIT_S = 150.0
FAILURES = ("wrong", "crash", "hang", "raw", "unneeded", "unplaced")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A program and what came of it, as `Trial` has it."""

    program: Program
    answer: dict[str, Any]

    @property
    def outcome(self) -> str:
        return str(self.answer["outcome"])


def run_source(text: str, worker: Answerer) -> dict[str, Any]:
    """Run a file in the worker; a death is the outcome "crash", silence "hang"."""
    try:
        return worker.ask({"source": text}, LIMIT_S)
    except Died as error:
        return {"outcome": "crash", "stage": "", "error": "", "detail": str(error)}
    except Hung as error:
        return {"outcome": "hang", "stage": "", "error": "", "detail": str(error)}


def search(seeds: Iterator[int], worker: Answerer, backend: str | None = None) -> Iterator[Result]:
    """Run the programs of seeds, one after another.

    A crash may be of an earlier model's making: it is tried once more in a fresh process.
    """
    for seed in seeds:
        program = draw_program(seed, backend)
        answer = run_source(source(program), worker)
        if answer["outcome"] == "crash":
            again = run_source(source(program), worker)
            if again["outcome"] != "crash":
                again["notes"] = ["a process died here that had run other models before"]
                again["outcome"] = "crash"
                again["detail"] = answer["detail"]
            answer = again
        yield Result(program=program, answer=answer)


def shrunk(result: Result, worker: Answerer, budget: int) -> Result:
    """The smallest program found that fails as a result's does."""
    wanted, answers = failure_class(result.answer), [result.answer]

    def fails(program: Program) -> bool:
        answer = run_source(source(program), worker)
        if failure_class(answer) != wanted:
            return False
        answers.append(answer)
        return True

    program = shrink(result.program, fails, budget)
    return Result(program=program, answer=answers[-1])


def main() -> None:
    """Write one line of JSON a model to --log, and failures to --failures, shrunk."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--backend")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--failures", type=Path, help="folder for the files of failing models")
    parser.add_argument("--budget", type=int, default=50, help="trials to shrink one failure")
    options = parser.parse_args()
    worker, counts, kinds = Answerer("tests.fuzz.worker"), Counter[str](), Counter[str]()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    seeds = iter(range(options.start, options.start + options.models))
    for result in search(seeds, worker, options.backend):
        p = result.program
        counts[f"{p.backend} {result.outcome}"] += 1
        row = {"seed": p.seed, "backend": p.backend, "recipe": p.recipe, "commit": commit}
        row |= result.answer
        if options.log:
            with options.log.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
        if result.outcome in FAILURES:
            kind = failure_class(result.answer)
            kinds[kind] += 1
            print(p.seed, p.backend, p.recipe, kind, flush=True)
            if options.failures and options.budget and kinds[kind] <= 1:
                write_failure(options.failures, shrunk(result, worker, options.budget))
    print(dict(sorted(counts.items())), file=sys.stderr)
    worker.close()


def write_failure(folder: Path, result: Result) -> None:
    """Write a program's file, with what came of it behind."""
    folder.mkdir(parents=True, exist_ok=True)
    p = result.program
    lines = [failure_class(result.answer), *result.answer["detail"].splitlines()]
    text = source(p) + "\n\n" + "".join(f"# {line}\n" for line in lines)
    (folder / f"{p.backend}_{result.outcome}_{p.seed}.py").write_text(text)


if __name__ == "__main__":
    main()
