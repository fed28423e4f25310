"""What constants take: per tensor, per weight, tied, twice, and not less than before."""

import warnings
import zipfile
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.core.errors import Pt2eQuantWarning, UnsupportedError
from pt2e_quant.core.provenance import Provenance, provenance_of
from pt2e_quant.core.schemes import INT8_WEIGHT
from pt2e_quant.flow.report.report import Report
from pt2e_quant.flow.report.size_ledger import (
    check_file_smaller,
    check_smaller,
    constant_bytes,
    take_ledger,
)
from pt2e_quant.pt2e import quantize_pt2e as drop_in


class Linears(nn.Module):
    def __init__(self, width: int = 64, *, tied: bool = False, alike: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(width, 64, bias=False), nn.Linear(64, width, bias=False)
        if tied:
            self.b.weight = self.a.weight
        if alike:
            self.b.weight.data = self.a.weight.data.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def prepared(model, quantizer, *, width=64, quant_max=127, prepare=pq.prepare_pt2e):
    made = quantizer()
    weight = replace(INT8_WEIGHT, quant_min=-quant_max, quant_max=quant_max)
    made.set_global(replace(made.scheme, name="narrow", weight=weight))
    x = torch.ones(2, width)
    gm = prepare(torch.export.export(model.eval(), (x,)), made)
    gm(x)
    return gm


@pytest.mark.parametrize(
    ("quant_max", "bits", "zero_points"), [(127, 8, 64 * 8), (7, 4, 8), (1, 2, 8)]
)
def test_ledger_when_converted_then_bytes_and_bits_of_each_weight(
    quantizer, quant_max, bits, zero_points
):
    gm = prepared(Linears(), quantizer, quant_max=quant_max)
    assert constant_bytes(gm) == 2 * 64 * 64 * 4
    pq.convert_pt2e(gm)
    a, b = provenance_of(gm).sizes
    assert (a.name, b.name) == ("a.weight", "b.weight")
    assert a.dtype == f"int{bits}"
    assert (a.elements, a.size_before, a.size_after) == (4096, 16384, 4096 * bits // 8)
    assert a.qparams == 64 * 4  # all zero points are zero: files hold none
    assert a.bits_per_element == 8 * (a.size_after + a.qparams) / 4096
    held = sum(t.numel() * t.element_size() for t in gm.state_dict().values())
    assert held == constant_bytes(gm)
    assert sum(r.size_after + r.qparams for r in (a, b)) == held - 2 * zero_points


def test_ledger_when_tied_then_one_row_with_two_readers(quantizer):
    gm = pq.convert_pt2e(prepared(Linears(tied=True), quantizer))
    (row,) = provenance_of(gm).sizes
    assert (row.readers, row.same_as) == (2, "")


def test_ledger_when_tied_and_quantized_in_two_ways_then_the_second_is_named(quantizer):
    made = quantizer()
    weight = replace(INT8_WEIGHT, quant_min=-7, quant_max=7)
    made.set_module_name("b", replace(made.scheme, name="narrow", weight=weight))
    x = torch.ones(2, 64)
    gm = pq.prepare_pt2e(torch.export.export(Linears(tied=True).eval(), (x,)), made)
    gm(x)
    first, second = take_ledger(pq.convert_pt2e(gm))
    assert first.name == second.name
    assert {first.dtype, second.dtype} == {"int8", "int4"}
    assert second.same_as == f"{first.name} ({first.dtype})"


def test_ledger_when_two_constants_are_alike_then_the_second_names_the_first(quantizer):
    gm = pq.convert_pt2e(prepared(Linears(alike=True), quantizer))
    first, second = provenance_of(gm).sizes
    assert (first.same_as, second.same_as) == ("", "a.weight")
    text = str(Report(backend="Toy", provenance=provenance_of(gm)))
    assert "the same values as a.weight" in text
    assert "stored twice" in text


def test_ledger_when_calls_write_buffers_then_they_are_no_duplicates(quantizer):
    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)
            self.register_buffer("keys", torch.zeros(64, 64))
            self.register_buffer("values", torch.zeros(64, 64))
            self.register_buffer("table", torch.zeros(64, 64))

        def forward(self, x):
            self.keys.add_(1)
            self.values.add_(2)
            return self.fc(x) @ (self.keys + self.values + self.table)

    gm = pq.convert_pt2e(prepared(Caches(), quantizer))
    assert [r.name for r in take_ledger(gm) if r.same_as] == []
    assert {"keys", "values", "table"} <= {r.name for r in take_ledger(gm)}


def test_ledger_when_left_float_then_unchanged(net, quantizer, images):
    gm = pq.prepare_pt2e(torch.export.export(net, (images[0],)), quantizer())
    gm(images[0])
    pq.convert_pt2e(gm)
    rows = {r.name: r for r in provenance_of(gm).sizes}
    assert rows["head.bias"].size_before == rows["head.bias"].size_after == 40
    assert rows["head.bias"].readers == 0
    assert rows["head.weight"].dtype == "int8"
    assert not any(n.endswith(("_scale", "_zero_point", "_q")) for n in rows)


def test_ledger_when_inside_control_flow_then_the_constants_outside(quantizer):
    class Branch(Linears):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, self.a, self.b, (x,))

    gm = prepared(Branch(), quantizer)
    gm(-torch.ones(2, 64))
    pq.convert_pt2e(gm)
    assert sum(r.size_after + r.qparams for r in take_ledger(gm)) == constant_bytes(gm)


def test_report_when_printed_or_stored_then_the_ledger_is_in_it(quantizer):
    gm = pq.convert_pt2e(prepared(Linears(), quantizer, quant_max=7))
    table = provenance_of(gm)
    text = str(Report(backend="Toy", provenance=table))
    assert "32,768 -> 4,608 bytes, 4.50 bits per quantized weight" in text
    assert "int4" in text
    assert Provenance.from_json(table.to_json()) == table


class KeptFloat(nn.Module):
    """A weight that is quantized for one reader and read in float by another."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + x @ self.weight


def test_convert_when_it_does_not_shrink_then_refused_and_the_drop_in_warns(quantizer):
    gm = prepared(KeptFloat(), quantizer, width=128)
    with pytest.raises(UnsupportedError, match=r"grew from 65,536 to [^$]*kept in float: weight"):
        pq.convert_pt2e(gm)
    gm = prepared(KeptFloat(), quantizer, width=128, prepare=drop_in.prepare_pt2e)
    with pytest.warns(Pt2eQuantWarning, match="grew from 65,536"):
        drop_in.convert_pt2e(gm)


def test_convert_when_a_small_graph_does_not_shrink_then_it_is_a_note(quantizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm = pq.convert_pt2e(prepared(KeptFloat(64), quantizer))
    assert "grew from 16,384 to" in provenance_of(gm).notes[-1]


def test_check_when_sizes_are_equal_then_it_does_not_say_that_they_grew(quantizer):
    gm = pq.convert_pt2e(prepared(Linears(), quantizer))
    after = sum(r.size_after + r.qparams for r in provenance_of(gm).sizes)
    check_smaller(gm, after, is_strict=True)
    assert f"constants take {after:,} bytes as before" in provenance_of(gm).notes[-1]


def test_convert_when_there_is_little_to_shrink_then_nothing_is_said(quantizer):
    small = nn.Sequential(nn.Linear(2, 8, bias=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pq.convert_pt2e(prepared(small, quantizer, width=2))


@pytest.mark.parametrize(
    ("width", "file_bytes", "is_refused"),
    [
        (256, 30_000, False),
        (256, 131_071, False),
        (256, 131_072, True),
    ],
)
def test_check_file_when_no_smaller_than_float_then_refused(
    quantizer, width, file_bytes, is_refused
):
    gm = pq.convert_pt2e(prepared(Linears(width), quantizer, width=width))
    report = Report(backend="Toy", provenance=provenance_of(gm), size_bytes=file_bytes)
    if not is_refused:
        check_file_smaller(report, is_strict=True)
        assert (report.float_size_bytes, report.notes) == (512 * width, [])
        return
    with pytest.raises(UnsupportedError, match=f"Toy file has {file_bytes:,} bytes"):
        check_file_smaller(report, is_strict=True)
    check_file_smaller(report, is_strict=False)
    assert "no less than the float constants" in report.notes[0]


def test_check_file_when_the_program_is_long_then_it_is_not_held_against_the_scheme(quantizer):
    gm = pq.convert_pt2e(prepared(Linears(256), quantizer, width=256))
    report = Report(backend="Toy", provenance=provenance_of(gm), size_bytes=140_000)
    report.float_ops = {"sigmoid": 100}
    check_file_smaller(report, is_strict=True)
    report.size_bytes = 131_072 + 100 * 1024
    with pytest.raises(UnsupportedError, match="Toy file has"):
        check_file_smaller(report, is_strict=True)


def test_check_file_when_little_was_to_shrink_then_nothing_is_said(quantizer):
    gm = pq.convert_pt2e(prepared(Linears(), quantizer))
    report = Report(backend="Toy", provenance=provenance_of(gm), size_bytes=10**9)
    check_file_smaller(report, is_strict=True)


def test_convert_when_small_weights_grow_beside_large_float_ones_then_it_is_a_note(quantizer):
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = KeptFloat(16), nn.Parameter(torch.randn(400, 64))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.small(x), torch.where(x.sum() > 0, self.large, 0.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm = pq.convert_pt2e(prepared(Beside(), quantizer, width=16))
    assert "grew from 103,424 to" in provenance_of(gm).notes[-1]


def tensors_of_archive(path):
    """Bytes of the tensors in a file of torch.export.save, those of nothing but zeros left out."""
    with zipfile.ZipFile(path) as archive:
        held = [i.filename for i in archive.infolist() if "/data/weights/weight_" in i.filename]
        return sum(len(data) for name in held if any(data := archive.read(name)))


def tensors_of_onnx(path):
    """Bytes of the initializers, those of activations' qparams and of shapes left out."""
    held = pytest.importorskip("onnx").load(path).graph.initializer
    sizes = [pytest.importorskip("onnx").numpy_helper.to_array(tensor).nbytes for tensor in held]
    return sum(size for size in sizes if size > 16)


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [("onnx", "int8_weight_only"), ("cpu", "int8_weight_only"), ("cpu", "int4_weight_only")],
)
def test_ledger_when_an_artifact_is_saved_then_the_bytes_of_its_file(backend, recipe, tmp_path):
    model, x = Linears(width=128).eval(), torch.randn(8, 128)
    artifact = pq.quantize(model, (x,), backend=backend, recipe=recipe, progress=False)
    sizes = artifact.report.provenance.sizes
    ledger = sum(r.size_after + r.qparams for r in sizes)
    assert {r.readers for r in sizes} == {1}
    path = tmp_path / ("model.onnx" if backend == "onnx" else "model.pt2")
    artifact.save(path)
    stored = tensors_of_onnx(path) if backend == "onnx" else tensors_of_archive(path)
    assert ledger == stored
    assert ledger < artifact.size_bytes
