"""The picture of the architecture page: the data flow from model to artifact, with folders.

`python docs/generate.py` writes it. It is narrow, so that its text can be read on a phone, and has
a background of its own, so that it looks the same in light and dark mode.
"""

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

__all__ = ["picture"]

WIDTH, LEFT, BOX_WIDTH = 520, 20, 420
BOX_HEIGHT, GAP = 74, 44
TEXT, SOFT, LINE, FILL, ACCENT = "#1f2937", "#4b5563", "#64748b", "#ffffff", "#3949ab"
FONT = "font-family='Helvetica, Arial, sans-serif'"
MONO = "font-family='Menlo, Consolas, monospace'"


class Step(NamedTuple):
    """A box: what happens, where its code is, and what it hands to the next."""

    title: str
    what: str
    folder: str
    result: str


STEPS = (
    Step("Capture", "record the call, sizes, written buffers", "core/capture", "captured graph"),
    Step(
        "Annotate",
        "rules and the op table put specs on nodes",
        "flow/annotate",
        "annotated graph",
    ),
    Step(
        "Prepare",
        "form qparam groups, insert observers",
        "flow/prepare, observers",
        "prepared graph",
    ),
    Step(
        "Calibrate or train",
        "observers see data; fake-quantizes train",
        "flow/calibrate, flow/qat",
        "statistics",
    ),
    Step(
        "Improve",
        "algorithms change weights and ranges",
        "passes/algorithms",
        "weights and qparams",
    ),
    Step(
        "Convert",
        "write q/dq, store weights as integers",
        "flow/convert, core/qdq",
        "canonical q/dq graph",
    ),
    Step(
        "Lower",
        "place integer regions, rewrite, write the program",
        "backends/target, backends/<name>",
        "program",
    ),
    Step("Gate", "run the artifact against the q/dq graph", "backends/gate", "artifact"),
)
ARTIFACTS = (
    (".pte", "ExecuTorch"),
    (".onnx", "ONNX Runtime"),
    (".qpt2", "torch, CPU"),
    (".qcuda", "torch, GPU"),
)


def picture() -> str:
    """The picture as SVG."""
    top = 20 + 40 + GAP
    bottom = top + len(STEPS) * (BOX_HEIGHT + GAP)
    height = bottom + 62 + 20
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img' "
        "aria-labelledby='title'>",
        "<title id='title'>Data flow: capture, annotate, prepare, calibrate, convert, lower, "
        "artifact</title>",
        "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        f"markerHeight='7' orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='{LINE}'/></marker>",
        "</defs>",
        f"<rect width='{WIDTH}' height='{height}' rx='12' fill='#f5f7fb'/>",
        *_record(top, bottom - GAP),
        *_source(),
        *_arrow(60, "torch.export: ExportedProgram"),
    ]
    for number, step in enumerate(STEPS):
        y = top + number * (BOX_HEIGHT + GAP)
        parts += [*_box(y, step), *_arrow(y + BOX_HEIGHT, step.result)]
    parts += [*_artifacts(bottom), "</svg>"]
    return "\n".join(parts) + "\n"


def _source() -> Iterator[str]:
    yield f"<rect x='{LEFT}' y='20' width='{BOX_WIDTH}' height='40' rx='8' fill='{ACCENT}'/>"
    yield _text(LEFT + BOX_WIDTH / 2, 46, "float model: nn.Module", 17, "#ffffff", "middle")


def _box(y: float, step: Step) -> Iterator[str]:
    yield (
        f"<rect x='{LEFT}' y='{y}' width='{BOX_WIDTH}' height='{BOX_HEIGHT}' rx='8' "
        f"fill='{FILL}' stroke='{LINE}'/>"
    )
    yield _text(LEFT + 14, y + 24, step.title, 17, TEXT, weight="bold")
    yield _text(LEFT + 14, y + 44, step.what, 15, TEXT)
    yield _text(LEFT + 14, y + 64, step.folder, 14, ACCENT, font=MONO)


def _arrow(y: float, label: str) -> Iterator[str]:
    x = LEFT + 40
    yield (
        f"<line x1='{x}' y1='{y}' x2='{x}' y2='{y + GAP - 2}' stroke='{LINE}' stroke-width='2' "
        "marker-end='url(#head)'/>"
    )
    yield _text(x + 14, y + GAP / 2 + 5, label, 14, SOFT)


def _record(top: float, bottom: float) -> Iterator[str]:
    """The bar beside all steps: the record that follows a tensor."""
    x, middle = LEFT + BOX_WIDTH + 20, (top + bottom) / 2
    yield f"<rect x='{x}' y='{top}' width='40' height='{bottom - top}' rx='8' fill='#dfe4f5'/>"
    yield (
        f"<text x='{x + 20}' y='{middle + 5}' font-size='15' fill='{TEXT}' "
        f"text-anchor='middle' {FONT} "
        f"transform='rotate(90 {x + 20} {middle})'>record of each tensor: core/provenance</text>"
    )


def _artifacts(y: float) -> Iterator[str]:
    width = (BOX_WIDTH + 60 - 3 * 8) / 4
    for number, (suffix, runtime) in enumerate(ARTIFACTS):
        x = LEFT + number * (width + 8)
        yield f"<rect x='{x}' y='{y}' width='{width}' height='62' rx='8' fill='{ACCENT}'/>"
        yield _text(x + width / 2, y + 26, suffix, 17, "#ffffff", "middle", font=MONO)
        yield _text(x + width / 2, y + 48, runtime, 14, "#ffffff", "middle")


def _text(
    x: float,
    y: float,
    words: str,
    size: int,
    color: str,
    anchor: str = "start",
    *,
    weight: str = "normal",
    font: str = FONT,
) -> str:
    return (
        f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{color}' text-anchor='{anchor}' "
        f"font-weight='{weight}' {font}>{escape(words)}</text>"
    )
