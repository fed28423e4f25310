"""Write the generated parts of the docs: a page for each backend's op table, and the results.

Run `python docs/generate.py` after a change of a table or of `benchmarks/results`; with `--check`
it writes nothing and exits with 1 where a page is out of date.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pt2e_quant.backends import get, names
from pt2e_quant.backends.artifact import Backend
from pt2e_quant.flow.op_table import OpRow
from pt2e_quant.graph.pattern import Op

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accuracy_speed.json"
BEGIN, END = "<!-- results: python docs/generate.py -->", "<!-- end of results -->"
MODELS = {
    "digits": "digits CNN",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNetV2",
    "vit_small": "ViT-Small",
    "minilm": "MiniLM (real weights)",
}


def backend_page(backend: Backend) -> str:
    """The page of one backend: its recipes and its op table."""
    lines = [
        f"# What {backend.table.backend} runs in integers",
        "",
        "Generated from the backend's op table by `docs/generate.py`; each row is proven by a test",
        "that lowers and runs it.",
        "",
        "| recipe | what it does |",
        "| --- | --- |",
        *(f"| `{name}` | {text} |" for name, text in sorted(backend.recipes.items())),
        "",
        "| row | operators | quantized tensors | runs as | needs |",
        "| --- | --- | --- | --- | --- |",
        *(_row(row) for row in sorted(backend.table, key=lambda row: row.name)),
        "",
    ]
    if backend.table.reasons:
        lines += ["Left in float, and why:", "", "| operator | reason |", "| --- | --- |"]
        lines += [f"| `{op}` | {why} |" for op, why in sorted(backend.table.reasons.items())]
        lines.append("")
    return "\n".join(lines)


def _row(row: OpRow) -> str:
    operators = sorted({name for op in row.find for name in _operators(op)})
    slots = [f"{slot.at}{'?' if slot.is_optional else ''}" for slot in row.slots]
    needs = "; ".join([*(c.text for c in row.constraints), *([row.note] if row.note else [])])
    cells = (
        row.name,
        ", ".join(f"`{name}`" for name in operators),
        ", ".join(slots),
        row.lowers_to,
        needs,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _operators(op: Op) -> Iterator[str]:
    named = (str(t.overloadpacket) for t in op.targets if hasattr(t, "overloadpacket"))
    yield from (name for name in named if not name.endswith("_"))  # in place: prepare rewrites it
    for inner in op.args:
        if isinstance(inner, Op):
            yield from _operators(inner)


def results_table() -> str:
    """The README's table; nothing where no benchmark has been run."""
    if not RESULTS.exists():
        return ""
    rows: list[Mapping[str, Any]] = json.loads(RESULTS.read_text())["rows"]
    lines = [
        "| model | runtime | pt2e_quant: SQNR, speed-up, size | best peer by SQNR |",
        "| --- | --- | --- | --- |",
    ]
    for model, runtime in dict.fromkeys((r["model"], r["runtime"]) for r in rows):
        of_pair = [r for r in rows if (r["model"], r["runtime"]) == (model, runtime)]
        ours = [r for r in of_pair if r["program"] == "pt2e_quant" and "sqnr_db" in r]
        peers = [
            r for r in of_pair if r["program"] not in ("pt2e_quant", "float") and "sqnr_db" in r
        ]
        if not ours:
            continue
        best = max(peers, key=lambda r: r["sqnr_db"], default=None)
        peer = "" if best is None else f"{_cell(best)} ({best['program']})"
        lines.append(f"| {MODELS.get(model, model)} | {runtime} | {_cell(ours[0])} | {peer} |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any]) -> str:
    return f"{row['sqnr_db']:.1f} dB, {row['speed_up']:.2f}x, {row['size_ratio']:.2f}x"


def pages() -> dict[Path, str]:
    """Every generated page with what it should hold."""
    found = {
        ROOT / "docs" / "backends" / f"{name}.md": backend_page(get(name))
        for name in names()
        if type(get(name)).__module__.startswith("pt2e_quant.")
    }
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    found[readme] = f"{head}{BEGIN}\n{results_table()}\n{END}{tail}"
    return found


def main(check: bool) -> int:
    """Write the pages, or say which differ."""
    stale = {p: t for p, t in pages().items() if not p.exists() or p.read_text() != t}
    for path, text in stale.items():
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
