"""Figures in sentences are those of the result files, as the tables are by `docs/generate.py`."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def rows(name):
    """The rows of a result file."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]


def row(name, **wanted):
    """The only row that has these values."""
    (found,) = [r for r in rows(name) if all(r.get(k) == v for k, v in wanted.items())]
    return found


def llm(runtime, program):
    """Distance, milliseconds a token and megabytes of a file of the language model."""
    found = row("llm", runtime=runtime, program=program)
    mega = found["size_bytes"] / 1e6
    return f"{found['sqnr_db']:.1f} dB, {found['decode_ms']:.2f} ms and {mega:.1f} MB"


def cpu(model, *programs):
    """Milliseconds of one thread, ours first and the others in brackets."""
    ours, *others = (
        f"{row('cpu', model=model, threads=1, program=program)['median_ms']:.1f}"
        for program in programs
    )
    return f"{ours} ({', '.join(others)})"


COMPILED = (
    "pt2e_quant cpu, compiled",
    "X86Inductor, torch.compile",
    "pt2e_quant on ONNX Runtime",
    "float, torch.compile",
)


def perplexity(program, runtime="executorch"):
    return f"{row('llm', runtime=runtime, program=program)['perplexity']:.2f}"


def sentences():
    """Page, and the words that it must have."""
    readme = ROOT / "README.md"
    yield readme, f"`a8w4_g32` on ExecuTorch {llm('executorch', 'pt2e_quant a8w4_g32')}"
    yield readme, f"8da4w has {llm('executorch', 'torchao 8da4w g32')}"
    yield readme, f"`a8w4_g128` on ONNX Runtime {llm('onnxruntime', 'pt2e_quant a8w4_g128')}"
    with_float_table = llm("onnxruntime", "MatMulNBits g128 int8, float table")
    yield readme, f"with int8 activations has {with_float_table}"
    # The last of the list has its own comma.
    small = llm("onnxruntime", "MatMulNBits g128 int8")
    yield readme, f"or {small} with its table in 4 bits too"
    step, prepare = (
        row("qat", question="training step"),
        row("qat", question="prepare_qat + convert"),
    )
    seconds = prepare["ours_s"]["total"], prepare["torchao_s"]["total"]
    yield readme, f"converted in {seconds[0]:.2f} s (torchao: {seconds[1]:.0f} s)"
    yield readme, f"a step takes {step['ratio']} times a float step ({step['torchao_ratio']})"
    for name, model in (
        ("ResNet-50", "resnet50"),
        ("MobileNetV2", "mobilenet_v2"),
        ("ViT-Small", "vit_small"),
        ("MiniLM", "minilm"),
    ):
        yield readme, f"{name} {cpu(model, *COMPILED)}"
    goals = ROOT / "docs" / "decisions" / "025-measured-against-goals.md"
    yield goals, f"`int8_dynamic` `.pte` is {perplexity('pt2e_quant int8_dynamic')}"
    yield goals, f"XNNPACKQuantizer's {perplexity('XNNPACKQuantizer dynamic')}"


SENTENCES = list(sentences())


@pytest.mark.parametrize(("page", "words"), SENTENCES, ids=[words for _, words in SENTENCES])
def test_figures_when_a_page_gives_one_then_it_is_that_of_its_result_file(page, words):
    text = re.sub(r"\s+", " ", page.read_text())
    assert words in text, f"{page.name} has other figures than benchmarks/results: {words}"


def test_pages_when_they_name_a_result_file_then_it_is_there():
    there = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")):
        named = set(re.findall(r"benchmarks/results/(\w+\.json)", page.read_text()))
        assert named <= there, page.name


EXAMPLES = {"guide.md", "errors.md", "glossary.md", "accuracy.md"}
"""Pages whose figures are settings, rules of thumb, or examples of what is printed."""


def test_pages_when_figures_are_of_no_result_file_then_say_they_are_single_runs():
    """Times, ratios and distances on pages that no table of results is behind."""
    measured = re.compile(r"\d(?:\.\d+)? ?(?:dB|us|µs|ms)\b")
    for page in ROOT.glob("docs/**/*.md"):
        text = page.read_text()
        if page.name == "kernels.md" or not measured.search(text):
            continue
        said = "single run" in text or "benchmarks/results" in text
        # The index of the decisions says it for all of them.
        assert said or page.name in EXAMPLES or page.parent.name == "decisions", page.name
