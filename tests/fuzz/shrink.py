"""Make a failing program smaller while it fails in the same way."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.fuzz.program import Input, Program, Step, read_names, source

__all__ = ["failure_class", "shrink"]

_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")


def failure_class(answer: dict[str, Any]) -> str:
    """What two failures of one kind have in common: outcome, stage, error and its words."""
    detail = answer["detail"].strip()
    outcome = answer["outcome"]
    if outcome == "wrong":
        words = "SQNR" if "SQNR" in detail else detail.partition(": ")[2]
    elif outcome == "crash":
        words = ""
    elif outcome in ("raw", "hang"):
        words = detail.splitlines()[-1] if detail else ""
    else:
        words = detail.splitlines()[0] if detail else ""
    words = re.sub(r"[xvmpcb]\d+_?\w*|\d+|'[^']*'|\"[^\"]*\"|_\d+", "#", words)[:160]
    return " | ".join((outcome, answer["stage"], answer["error"], words))


def shrink(program: Program, fails: Callable[[Program], bool], budget: int = 60) -> Program:
    """The smallest program found that still fails, after at most `budget` trials.

    Args:
        fails: whether a program fails as the first one did.
    """
    tried, spent = {source(program)}, 0
    improved = True
    while improved and spent < budget:
        improved = False
        for candidate in _smaller(program):
            candidate = candidate.without_unused()
            text = source(candidate)
            if text in tried:
                continue
            tried.add(text)
            if not _runs(text):
                continue
            spent += 1
            if fails(candidate):
                program, improved = candidate, True
                break
            if spent >= budget:
                break
    return program


def _runs(text: str) -> bool:
    """Whether the float model runs at all its sizes."""
    scope: dict[str, Any] = {"__name__": "shrunk"}
    try:
        exec(compile(text, "shrunk.py", "exec"), scope)
        model = scope["model"]()
        with torch.no_grad():
            for sizes in scope["SIZES"]:
                args, kwargs = scope["batch"](0, **sizes)
                model(*args, **kwargs)
    except Exception:  # Not a model.
        return False
    return True


def _smaller(p: Program) -> Iterator[Program]:
    yield from _with_less_result(p)
    yield from _without_steps(p)
    yield from _with_plainer_calls(p)
    yield from _with_plainer_attributes(p)
    yield from _with_plainer_numbers(p)


def _with_less_result(p: Program) -> Iterator[Program]:
    names = list(dict.fromkeys(read_names(p.result)))
    if p.result not in names:
        for name in names:
            yield replace(p, result=name)
        if len(names) > 1:
            yield replace(p, result=f"({', '.join(names)})")
    earlier = [s.target for s in p.steps if s.target and s.target not in names]
    for name in reversed(earlier):
        yield replace(p, result=name)


def _without_steps(p: Program) -> Iterator[Program]:
    for at in reversed(range(len(p.steps))):
        step, rest = p.steps[at], (*p.steps[:at], *p.steps[at + 1 :])
        if not step.target:
            yield replace(p, steps=rest)
            continue
        known = [i.name for i in p.inputs] + [s.target for s in p.steps[:at] if s.target]
        read = dict.fromkeys(read_names(step.text))
        for name in [*read, *(n for n in reversed(known) if n not in read)][:4]:
            renamed = re.compile(rf"\b{step.target}\b")
            steps = tuple(Step(target=s.target, text=renamed.sub(name, s.text)) for s in rest)
            yield replace(p, steps=steps, result=renamed.sub(name, p.result))


def _with_plainer_calls(p: Program) -> Iterator[Program]:
    if p.dtype != "torch.float32":
        inputs = tuple(replace(i, text=i.text.replace(f".to({p.dtype})", "")) for i in p.inputs)
        steps = tuple(
            Step(target=s.target, text=s.text.replace(p.dtype, "torch.float32")) for s in p.steps
        )
        yield replace(p, dtype="torch.float32", inputs=inputs, steps=steps)
    for size in p.dynamic:
        number = re.compile(rf"\b{size.name}\b")
        yield replace(
            p,
            dynamic=tuple(d for d in p.dynamic if d != size),
            inputs=tuple(
                replace(
                    i,
                    text=number.sub(str(size.example), i.text),
                    dynamic=tuple(d for d in i.dynamic if d[1] != size.name),
                )
                for i in p.inputs
            ),
        )
        if len(size.others) > 1:
            for other in size.others:
                fewer = replace(size, others=(other,))
                yield replace(p, dynamic=tuple(fewer if d == size else d for d in p.dynamic))
    for at, item in enumerate(p.inputs):
        for plainer in _plainer_inputs(item):
            yield replace(p, inputs=(*p.inputs[:at], plainer, *p.inputs[at + 1 :]))
    if p.recipe != "int8":
        yield replace(p, recipe="int8")


def _plainer_inputs(item: Input) -> Iterator[Input]:
    if item.nested:
        yield replace(item, nested="")
    if item.keyword:
        yield replace(item, keyword=False)
    found = re.search(r"torch\.(randn|rand|randint)\((?:[^()]|\([^()]*\))*\)", item.text)
    if found and found.group() != item.text:
        yield replace(item, text=found.group())


def _with_plainer_attributes(p: Program) -> Iterator[Program]:
    for at, (name, lines) in enumerate(p.attributes):
        for index in range(1, len(lines)):
            fewer = (name, (*lines[:index], *lines[index + 1 :]))
            yield replace(p, attributes=(*p.attributes[:at], fewer, *p.attributes[at + 1 :]))
        for option in re.findall(r", \w+=[^,()]+", lines[0]):
            fewer = (name, (lines[0].replace(option, ""), *lines[1:]))
            yield replace(p, attributes=(*p.attributes[:at], fewer, *p.attributes[at + 1 :]))


def _with_plainer_numbers(p: Program) -> Iterator[Program]:
    for at, step in enumerate(p.steps):
        for text in _plainer(step.text):
            changed = Step(target=step.target, text=text)
            yield replace(p, steps=(*p.steps[:at], changed, *p.steps[at + 1 :]))
    for at, item in enumerate(p.inputs):
        for text in _plainer(item.text):
            changed_input = replace(item, text=text)
            yield replace(p, inputs=(*p.inputs[:at], changed_input, *p.inputs[at + 1 :]))
    for at, (name, lines) in enumerate(p.attributes):
        for text in _plainer(lines[0]):
            changed_lines = (name, (text, *lines[1:]))
            yield replace(
                p, attributes=(*p.attributes[:at], changed_lines, *p.attributes[at + 1 :])
            )


def _plainer(text: str) -> Iterator[str]:
    """The text with one of its numbers made smaller."""
    for found in _NUMBER.finditer(text):
        number = float(found.group())
        for smaller in ("1", "2", str(max(int(number) // 2, 1))):
            if float(smaller) < number:
                yield text[: found.start()] + smaller + text[found.end() :]
