"""A model as a list of statements, which prints itself as a Python file.

The printed file is what is run, shrunk and kept in the corpus: it defines `Model`, `model()`,
`batch(seed, **sizes)`, `SIZES`, `DYNAMIC`, `BOUNDED`, `BACKEND`, `RECIPE` and `STRICT`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

__all__ = ["Dynamic", "Input", "Program", "Step", "read_names", "source"]

_VALUE = re.compile(r"\b[vx]\d+\b")
_ATTRIBUTE = re.compile(r"\bself\.([a-z]\d+)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One argument of forward: its name, the expression that makes it, and its dynamic dimensions.

    Args:
        text: an expression that may read the sizes `s0`, `s1`.
        dynamic: dimension to the name of a size.
        keyword: passed by name.
        nested: passed as {"a": x} ("dict"), as (x,) ("tuple"), or as itself ("").
    """

    name: str
    text: str
    dynamic: tuple[tuple[int, str], ...] = ()
    keyword: bool = False
    nested: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`target = text`, or `text` alone where the target is "" (a write)."""

    target: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """A dynamic size: how it is declared, the example, and the other sizes to run at."""

    name: str
    declared: str
    example: int
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model, its data, and where it is to run.

    Args:
        attributes: name to the lines that make it in `__init__`, in order.
        steps: the statements of forward, in order.
        result: the expression that forward returns.
        dtype: of the model's parameters.
        bounded: dimensions without an upper bound are given one, as `max_sizes=` does.
    """

    seed: int
    backend: str
    recipe: str
    inputs: tuple[Input, ...]
    attributes: tuple[tuple[str, tuple[str, ...]], ...]
    steps: tuple[Step, ...]
    result: str
    dynamic: tuple[Dynamic, ...] = ()
    dtype: str = "torch.float32"
    strict: bool = True
    bounded: bool = False
    notes: tuple[str, ...] = field(default=())

    def without_unused(self) -> "Program":
        """Drop statements, attributes and sizes that nothing reads; inputs stay."""
        used, kept = set(read_names(self.result)), []
        for step in reversed(self.steps):
            if not step.target or step.target in used:
                kept.append(step)
                used |= set(read_names(step.text))
        steps = tuple(reversed(kept))
        inputs = tuple(i for i in self.inputs if i.name in used) or self.inputs[:1]
        text = "\n".join([s.text for s in steps] + [self.result])
        wanted = {*_ATTRIBUTE.findall(text)}
        for name, lines in reversed(self.attributes):
            if name in wanted:
                wanted |= {*_ATTRIBUTE.findall("\n".join(lines))}
        attributes = tuple(a for a in self.attributes if a[0] in wanted)
        sizes = " ".join(i.text for i in inputs)
        dynamic = tuple(d for d in self.dynamic if re.search(rf"\b{d.name}\b", sizes))
        return replace(self, steps=steps, inputs=inputs, attributes=attributes, dynamic=dynamic)


def read_names(text: str) -> list[str]:
    """The values that an expression reads."""
    return _VALUE.findall(text)


def source(program: Program) -> str:
    """The Python file of a program."""
    return "\n".join(_lines(program)) + "\n"


def _lines(p: Program) -> Iterator[str]:
    yield f'"""Model {p.seed} of the search: {p.backend}, {p.recipe}."""'
    yield ""
    yield "import torch"
    yield "import torch.nn.functional as F"
    yield "from torch import nn"
    yield "from torch.export import Dim"
    yield ""
    yield f'BACKEND, RECIPE, STRICT = "{p.backend}", "{p.recipe}", {p.strict}'
    yield f"SIZES = {_sizes(p)}"
    yield "DYNAMIC = " + _dynamic_shapes(p)
    yield f"BOUNDED = {p.bounded}"
    yield ""
    yield ""
    yield "class Model(nn.Module):"
    yield "    def __init__(self):"
    yield "        super().__init__()"
    for _, lines in p.attributes:
        yield from (f"        {line}" for line in lines)
    yield ""
    yield f"    def forward({_signature(p)}):"
    for i in p.inputs:
        if i.nested:
            key = '"a"' if i.nested == "dict" else "0"
            yield f"        {i.name} = {i.name}[{key}]"
    for step in p.steps:
        first, *rest = step.text.split("\n")
        yield f"        {step.target} = {first}" if step.target else f"        {first}"
        yield from (f"        {line}" for line in rest)
    yield f"        return {p.result}"
    yield ""
    yield ""
    yield "def model():"
    yield "    torch.manual_seed(0)"
    yield "    return Model().eval()" + ("" if p.dtype == "torch.float32" else f".to({p.dtype})")
    yield ""
    yield ""
    sizes = "".join(f", {d.name}={d.example}" for d in p.dynamic)
    yield f"def batch(seed{sizes}):"
    yield "    torch.manual_seed(seed)"
    for i in p.inputs:
        yield f"    {i.name} = {i.text}"
    positional = "".join(f"{_passed(i)}, " for i in p.inputs if not i.keyword)
    keywords = ", ".join(f'"{i.name}": {_passed(i)}' for i in p.inputs if i.keyword)
    yield f"    return ({positional.strip()}), {{{keywords}}}"


def _signature(p: Program) -> str:
    return ", ".join(["self", *(i.name for i in p.inputs)])


def _passed(i: Input) -> str:
    return {"dict": f'{{"a": {i.name}}}', "tuple": f"({i.name},)", "": i.name}[i.nested]


def _sizes(p: Program) -> str:
    """The example's sizes first, then the others, each size beside each other's."""
    if not p.dynamic:
        return "[{}]"
    count = 1 + max(len(d.others) for d in p.dynamic)
    rows = []
    for row in range(count):
        cells = (
            f'"{d.name}": {(d.example, *d.others)[row % (1 + len(d.others))]}' for d in p.dynamic
        )
        rows.append("{" + ", ".join(cells) + "}")
    return "[" + ", ".join(rows) + "]"


def _dynamic_shapes(p: Program) -> str:
    if not p.dynamic:
        return "None"
    declared = {d.name: d.declared for d in p.dynamic}
    cells = []
    for i in p.inputs:
        dims = ", ".join(f"{at}: {declared[size]}" for at, size in i.dynamic if size in declared)
        shape = "{" + dims + "}" if dims else "None"
        shape = {"dict": f'{{"a": {shape}}}', "tuple": f"({shape},)", "": shape}[i.nested]
        cells.append(f'"{i.name}": {shape}')
    return "{" + ", ".join(cells) + "}"
