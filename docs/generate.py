"""Write the generated parts of the docs: op tables, kernels, scheme names, results, the picture.

Run `python docs/generate.py` after a change of a table or of `benchmarks/results`; with `--check`
it writes nothing and exits with 1 where a page is out of date.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `benchmarks` is not installed

from architecture_picture import picture
from kernel_page import kernels_page
from parity_tables import forms_table, parity_tables

from pt2e_quant.backends import get
from pt2e_quant.backends.cpu.table import REGISTRY
from pt2e_quant.backends.registry import OWN
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES
from pt2e_quant.core.formats.scale_format import FLOAT32_SCALES
from pt2e_quant.core.granularity import PerBlock, PerGroup
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.scheme_size import bits_per_weight
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.graph.op_table import OpRow
from pt2e_quant.graph.pattern import Op
from pt2e_quant.passes.algorithms.registry import OWN_NAMES, descriptions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accuracy_speed.json"
RESULTS_AVX2 = RESULTS.with_name("accuracy_speed_avx2.json")
PAIRS = ROOT / "docs" / "decisions" / "037-pairs-fit-into-16-bits.md"
SCHEMES = ROOT / "docs" / "schemes.md"
ALGORITHMS = ROOT / "docs" / "algorithms.md"
ALGORITHMS_BEGIN, ALGORITHMS_END = "<!-- algorithms -->", "<!-- end of algorithms -->"
SCHEMES_BEGIN, SCHEMES_END = (
    "<!-- schemes: python docs/generate.py -->",
    "<!-- end of schemes -->",
)
PARITY = ROOT / "docs" / "integer_reference.md"
FORMS_BEGIN, FORMS_END = "<!-- forms: python docs/generate.py -->", "<!-- end of forms -->"
PARITY_BEGIN, PARITY_END = (
    "<!-- parity: python docs/generate.py -->",
    "<!-- end of parity -->",
)
INTEGER_SCHEMES = (
    *("int8_dynamic", "int8_dynamic_per_tensor", "a16w8", "a16w4"),
    *("w8", "w4", "w2", "w4_g32", "w4_g64", "w4_g128", "w3_g128", "w2_g64", "a8w4_g32", "a4w4"),
)
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
        "`docs/generate.py` writes this page from the backend's op table. A test lowers and runs",
        "each entry of the table.",
        "",
        *([f"This backend is {backend.caution}.", ""] if backend.caution else []),
        "| recipe | what it does |",
        "| --- | --- |",
        *(f"| `{name}` | {text} |" for name, text in sorted(backend.recipes.items())),
        "",
        "| entry | kind | operators | quantized tensors | runs as | needs |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_row(row) for row in sorted(backend.table, key=lambda row: row.name)),
        "",
    ]
    if backend.policy is not None:
        lines += [
            "The policy keeps in float what could run; `quantizer.allowing(name)` overrules it. A",
            f"{'light' if backend.policy.rows else 'quantized'} operator needs all of these:",
            "",
            "| preference | what it needs |",
            "| --- | --- |",
            *(f"| `{name}` | {p.text} |" for name, p in backend.policy.preferences.items()),
            "",
        ]
    if backend.table.reasons:
        lines += ["Left in float, and why:", "", "| operator | reason |", "| --- | --- |"]
        lines += [f"| `{op}` | {why} |" for op, why in sorted(backend.table.reasons.items())]
        lines.append("")
    return "\n".join(lines)


def cpu_speeds() -> str:
    """The measured shape classes of integer operators on CPUs, for the end of the cpu page."""
    used = {kernel.op for kernel in REGISTRY}
    files = sorted((ROOT / "kernels").glob("*/measured/cpu_*.json"))
    rows = [file for file in files if file.parents[1].name in used]
    others = [file for file in files if file not in rows]
    return "\n".join(
        [
            "Speed over float32 by shape class; below 1.00 a class stays float:",
            "",
            *_speed_table(rows, "benchmarks.cpu_kernels"),
            "",
            "Integer operators of torch between two of oneDNN's that are not in the table, over",
            "the float operator and the quantize behind it:",
            "",
            *_speed_table(others, "benchmarks.cpu_elementwise"),
            "",
        ]
    )


def _speed_table(files: list[Path], script: str) -> list[str]:
    if not files:
        return [f"Not yet measured on any CPU (`python -m {script}`)."]
    lines = ["| kernel | CPU | shape class | ratio |", "| --- | --- | --- | --- |"]
    for file in files:
        kernel, cpu = file.parents[1].name, file.stem.removeprefix("cpu_")
        for name, ratio in sorted(json.loads(file.read_text()).items()):
            lines.append(f"| {kernel} | {cpu} | {name} | {ratio:.2f} |")
    return lines


def _row(row: OpRow) -> str:
    operators = sorted({name for op in row.find for name in _operators(op)})
    slots = [f"{slot.at}{'?' if slot.is_optional else ''}" for slot in row.slots]
    needs = "; ".join([*(c.text for c in row.constraints), *([row.note] if row.note else [])])
    cells = (
        row.name,
        row.kind.value,
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


def results_table(results: Path) -> str:
    """The table of a record of `accuracy_speed`; nothing where it has not been run."""
    if not results.exists():
        return ""
    rows: list[Mapping[str, Any]] = json.loads(results.read_text())["rows"]
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


def schemes_table() -> str:
    """The schemes by name, what they take, and what each backend makes of the name."""
    backends = [get(name) for name in sorted(OWN)]
    heads = ["name", "activations", "weights", "bits per weight"]
    heads += [backend.table.backend for backend in backends]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for name in (*INTEGER_SCHEMES, *FORMAT_SCHEMES):
        scheme = scheme_named(name)
        weight = scheme.weight
        assert weight is not None
        cells = [
            f"`{name}`",
            "float" if scheme.input is None else _described(scheme.input),
            _described(weight),
            f"{bits_per_weight(weight):.2f}",
            *(_support(backend, name) for backend in backends),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _support(backend: Backend, name: str) -> str:
    """Say "yes" where a backend has a recipe of the name, else the nearest one that it offers."""
    try:
        backend.quantizer(name)
    except ConfigError as error:
        nearest = re.search(r'the nearest (?:recipe )?it runs is "([^"]+)"', error.fix or "")
        return f"as `{nearest[1]}`" if nearest else ""
    return "yes"


def _described(scheme: TensorScheme) -> str:
    when = "dynamic " if scheme.is_dynamic else ""
    kind = str(scheme.dtype).removeprefix("torch.") if scheme.format is None else str(scheme.format)
    if scheme.format is None and scheme.range[1] - scheme.range[0] == 2:
        kind = "-1, 0, 1"
    elif scheme.format is None:
        low, high = scheme.range
        kind = re.sub(r"\d+", str((high - low).bit_length()), kind)
        kind += "" if scheme.symmetric else " affine"
    match scheme.granularity:
        case PerGroup(size):
            where = f"groups of {size}"
        case PerBlock(block):
            where = "blocks of " + " x ".join(map(str, block))
        case granularity:
            where = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(granularity).__name__).lower()
    scales = "" if scheme.scales == FLOAT32_SCALES else f", {scheme.scales}"
    return f"{when}{kind} {where}{scales}"


def algorithms_table() -> str:
    """The algorithms of this package."""
    lines = ["| name | what it does | stage | calibration data | for | paper |", "| --- " * 6 + "|"]
    for row in descriptions():
        if row.name in OWN_NAMES:
            cells = (f"`{row.name}`", row.what, row.stage, row.data, row.fits, row.paper)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _filled(text: str, begin: str, end: str, table: str) -> str:
    """A page's text with the part between two marks replaced."""
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def pages() -> dict[Path, str]:
    """Every generated page with what it should hold."""
    found = {ROOT / "docs" / "backends" / f"{name}.md": backend_page(get(name)) for name in OWN}
    found[ROOT / "docs" / "backends" / "cpu.md"] += "\n" + cpu_speeds()
    readme = ROOT / "README.md"
    found[readme] = _filled(readme.read_text(), BEGIN, END, results_table(RESULTS))
    found[PAIRS] = _filled(PAIRS.read_text(), BEGIN, END, results_table(RESULTS_AVX2))
    found[ROOT / "docs" / "development" / "architecture.svg"] = picture()
    found[ROOT / "docs" / "kernels.md"] = kernels_page(RESULTS.parent)
    text = _filled(PARITY.read_text(), FORMS_BEGIN, FORMS_END, forms_table())
    found[PARITY] = _filled(text, PARITY_BEGIN, PARITY_END, parity_tables(RESULTS.parent))
    found[SCHEMES] = _filled(SCHEMES.read_text(), SCHEMES_BEGIN, SCHEMES_END, schemes_table())
    found[ALGORITHMS] = _filled(
        ALGORITHMS.read_text(), ALGORITHMS_BEGIN, ALGORITHMS_END, algorithms_table()
    )
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
