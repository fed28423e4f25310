"""What a user gets wrong, each with the words that the error must have."""

import builtins
import sys

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import pt2e_quant as pq
from pt2e_quant.core.errors import (
    AnnotationError,
    ArtifactError,
    CalibrationError,
    ConfigError,
    InputError,
    MissingExtraError,
    near,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, ids, mask=None):
        return self.out(self.table(ids))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().eval()


def prepared_at(model, backend, batch=1, **options):
    ep = export(model, (torch.randn(batch, 4),), **options)
    return pq.prepare_pt2e(ep, backend.quantizer())


# Batches


@pytest.mark.parametrize(
    ("batch", "words", "fix"),
    [
        (torch.randn(1, 4, dtype=torch.float64), "dtype float64, .* float32", "torch.float32"),
        (torch.ones(1, 4, dtype=torch.int64), "dtype int64, .* float32", "torch.float32"),
        (torch.randn(4), r"shape \(4,\), expected 2 dimensions: \(1, 4\)", "batch dimension"),
        (torch.randn(1, 7), "size 7 in dimension 1, .* exactly 4", "dynamic_shapes="),
        (
            (torch.randn(1, 4), torch.randn(1, 4)),
            "2 positional inputs for a graph of 1",
            "inputs=0",
        ),
        ({"y": torch.randn(1, 4)}, r"unknown input \['y'\]: expected \(x\)", "inputs='y'"),
        ({}, r"missing input \['x'\]", "dict batch is keyword"),
        ([[1.0, 2.0]], "structure differs", "containers"),
        ("data", "must be a tensor, found str", None),
        (None, "must be a tensor, found NoneType", None),
    ],
)
def test_calibrate_when_a_batch_does_not_fit_then_refuses_before_the_forward(
    model, plain_backend, batch, words, fix
):
    prepared = prepared_at(model, plain_backend)
    prepared.forward = None  # nothing may be run
    with pytest.raises(InputError, match=f"calibration batch 0: .*{words}") as caught:
        pq.calibrate(prepared, [batch])
    assert fix is None or fix in caught.value.fix


def test_calibrate_when_batch_5_meets_batch_1_then_shows_the_line_to_paste(model, plain_backend):
    prepared = prepared_at(model, plain_backend)
    with pytest.raises(InputError, match=r"size 5 in dimension 0, .* exactly 1") as caught:
        pq.calibrate(prepared, [torch.randn(5, 4)])
    fix = caught.value.fix
    assert "dynamic_shapes={'x': {0: torch.export.Dim.AUTO}}" in fix
    assert "size 2 or more" in fix
    line = fix[fix.index("dynamic_shapes=") : fix.index(")") + 0]
    shapes = eval(line.removeprefix("dynamic_shapes="), {"torch": torch})
    wider = prepared_at(model, plain_backend, batch=2, dynamic_shapes=shapes)
    pq.calibrate(wider, [torch.randn(5, 4), torch.randn(1, 4)])


def test_calibrate_when_a_later_batch_is_wrong_then_names_it_by_its_number(model, plain_backend):
    prepared = prepared_at(model, plain_backend)
    with pytest.raises(InputError, match="calibration batch 2: "):
        pq.calibrate(prepared, [torch.randn(1, 4), torch.randn(1, 4), torch.randn(2, 4)])


def test_calibrate_when_sizes_are_outside_the_range_or_unequal_then_refuses(plain_backend):
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, y):
            return self.linear(x) + y

    b = Dim("b", min=1, max=8)
    ep = export(Add(), (torch.randn(2, 4), torch.randn(2, 4)), dynamic_shapes=({0: b}, {0: b}))
    prepared = pq.prepare_pt2e(ep, plain_backend.quantizer())
    with pytest.raises(InputError, match=r"size 9 in dimension 0, .* 1 to 8"):
        pq.calibrate(prepared, [(torch.randn(9, 4), torch.randn(9, 4))])
    with pytest.raises(InputError, match="size 3 in dimension 0, but another input has 2"):
        pq.calibrate(prepared, [(torch.randn(2, 4), torch.randn(3, 4))])


@pytest.mark.parametrize("batches", [torch.randn(2, 4), {"x": torch.randn(1, 4)}, "data.npz"])
def test_calibrate_when_given_one_batch_instead_of_many_then_refuses(model, plain_backend, batches):
    with pytest.raises(InputError, match="must be an iterable of batches, found one"):
        pq.calibrate(prepared_at(model, plain_backend), batches)


def test_calibrate_when_batches_are_no_iterable_then_refuses(model, plain_backend):
    with pytest.raises(InputError, match="must be an iterable of batches, found one int"):
        pq.calibrate(prepared_at(model, plain_backend), 3)
    with pytest.raises(InputError, match="found one function") as caught:
        pq.calibrate(prepared_at(model, plain_backend), lambda: [])
    assert "function()" in caught.value.fix


def test_calibrate_when_the_data_is_empty_or_used_up_then_refuses(model, plain_backend):
    prepared = prepared_at(model, plain_backend)
    batches = (torch.randn(1, 4) for _ in range(2))
    list(batches)
    for empty in ([], batches):
        with pytest.raises(CalibrationError, match="the calibration data is empty") as caught:
            pq.calibrate(prepared, empty)
        assert "used up" in caught.value.fix


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_calibrate_when_data_has_nan_or_inf_then_names_node_and_batch(model, plain_backend, value):
    prepared = prepared_at(model, plain_backend)
    bad = torch.randn(1, 4)
    bad[0, 2] = value
    with pytest.raises(CalibrationError, match=r"calibration batch 1: .*(NaN|[Ii]nf)") as caught:
        pq.calibrate(prepared, [torch.randn(1, 4), bad])
    assert caught.value.node_name == "x"


def test_calibrate_when_the_model_makes_nan_then_names_the_node_and_its_line(plain_backend):
    class Log(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 2)

        def forward(self, x):
            return self.last(torch.log(x))

    prepared = pq.prepare_pt2e(export(Log(), (torch.ones(1, 4),)), plain_backend.quantizer())
    with pytest.raises(CalibrationError, match="calibration batch 0") as caught:
        pq.calibrate(prepared, [-torch.ones(1, 4)])
    assert caught.value.node_name == "log"
    assert "torch.log(x)" in str(caught.value)


def test_calibrate_when_a_weight_has_nan_then_names_its_module(model, plain_backend):
    with torch.no_grad():
        model.second.weight[0, 0] = float("nan")
    prepared = prepared_at(model, plain_backend)
    with pytest.raises(CalibrationError, match="NaN") as caught:
        pq.calibrate(prepared, [torch.randn(1, 4)])
    assert "second" in str(caught.value)


# Names


def test_quantize_when_a_name_is_unknown_then_offers_near_ones(model, plain_backend):
    with pytest.raises(ConfigError, match='no backend "plian": did you mean "plain"'):
        pq.quantize(model, (torch.randn(1, 4),), calibration_data=[], backend="plian")
    with pytest.raises(ConfigError, match='no recipe "int9": did you mean "int8"'):
        pq.quantize(
            model, (torch.randn(1, 4),), calibration_data=[], backend="plain", recipe="int9"
        )


@pytest.mark.parametrize(
    ("set_rule", "name", "offered"),
    [
        ("set_module_name", "secnd", '"second"'),
        ("set_module_type", "Linaer", "Linear"),
        ("set_operator", "aten.linaer", '"aten.linear"'),
        ("set_node", "linear_7", '"linear_1"'),
    ],
)
def test_prepare_when_a_rule_matches_nothing_then_offers_near_names(
    model, plain_backend, set_rule, name, offered
):
    quantizer = plain_backend.quantizer()
    getattr(quantizer, set_rule)(name, None)
    with pytest.raises(AnnotationError, match=f'matches "{name}": did you mean') as caught:
        pq.prepare_pt2e(export(model, (torch.randn(1, 4),)), quantizer)
    assert offered in str(caught.value)


def test_rule_when_its_regular_expression_is_malformed_then_refuses(plain_backend):
    with pytest.raises(ConfigError, match=r'bad regular expression "\(first"'):
        plain_backend.quantizer().set_module_name("re:(first", None)


def test_rule_when_a_scheme_is_given_by_its_name_then_refuses(plain_backend):
    with pytest.raises(ConfigError, match="None for float, found 'int8'"):
        plain_backend.quantizer().set_module_name("first", "int8")


def test_near_when_a_known_name_is_empty_then_does_not_offer_it():
    assert near("conv", ["", "0"]) == "known: 0"


# Graphs


def test_prepare_when_nothing_is_quantized_then_says_why(plain_backend):
    ep = export(nn.Sequential(nn.ReLU(), nn.Sigmoid()), (torch.randn(2, 2),))
    with pytest.raises(AnnotationError, match="no tensor of this graph is to be quantized") as e:
        pq.prepare_pt2e(ep, plain_backend.quantizer())
    assert all(f"1 x Plain has no int8 {name}" in str(e.value) for name in ("relu", "sigmoid"))


def test_prepare_when_a_program_is_decomposed_then_the_fix_says_so(plain_backend):
    program = export(nn.Conv2d(2, 3, 1), (torch.randn(1, 2, 3, 3),)).run_decompositions()
    with pytest.raises(AnnotationError, match=r"before run_decompositions\(\)"):
        pq.prepare_pt2e(program, plain_backend.quantizer())


def test_prepare_when_a_rule_keeps_everything_float_then_says_which(model, plain_backend):
    quantizer = plain_backend.quantizer().set_global(None)
    with pytest.raises(AnnotationError, match="global -> float"):
        pq.prepare_pt2e(export(model, (torch.randn(1, 4),)), quantizer)


def test_convert_when_not_calibrated_then_names_the_observers(model, plain_backend):
    with pytest.raises(CalibrationError, match=r"observers saw no data: \w+ on x") as caught:
        pq.convert_pt2e(prepared_at(model, plain_backend))
    assert "calibrate(prepared, batches)" in caught.value.fix


def test_steps_when_out_of_order_then_name_the_step_before(model, plain_backend):
    ep = export(model, (torch.randn(1, 4),))
    for step in (lambda gm: pq.calibrate(gm, [torch.randn(1, 4)]), pq.convert_pt2e):
        with pytest.raises(ConfigError, match="was not prepared by prepare_pt2e"):
            step(ep.module())
    with pytest.raises(pq.Pt2eQuantError, match="not in canonical form"):
        plain_backend.lower(prepared_at(model, plain_backend))


def test_prepare_when_the_model_was_not_exported_then_refuses_with_the_call(model, plain_backend):
    with pytest.raises(ConfigError, match="captured program, found Net") as caught:
        pq.prepare_pt2e(model, plain_backend.quantizer())
    assert "torch.export.export(model.eval()" in caught.value.fix
    with pytest.raises(ConfigError, match="`annotate` method, str has none"):
        pq.prepare_pt2e(export(model, (torch.randn(1, 4),)), "int8")


def test_prepare_when_the_graph_is_of_symbolic_trace_then_refuses(model, plain_backend):
    gm = torch.fx.symbolic_trace(model)
    with pytest.raises(InputError, match="carries no fake values") as caught:
        pq.prepare_pt2e(gm, plain_backend.quantizer())
    assert "not a symbolic_trace" in caught.value.fix


def test_quantize_when_torch_export_fails_then_shows_its_reason(plain_backend):
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            if x.sum() > 0:
                return self.linear(x)
            return x

    with pytest.raises(InputError, match=r"torch\.export cannot capture this model") as caught:
        pq.quantize(
            Branch(), (torch.randn(2, 4),), calibration_data=[torch.randn(2, 4)], backend="plain"
        )
    text = str(caught.value)
    assert "data-dependent" in text
    assert "if x.sum() > 0:" in text
    assert caught.value.__cause__ is not None
    assert len(text.splitlines()) < 30


def test_quantize_when_inputs_are_missing_or_given_twice_then_refuses(model, plain_backend):
    with pytest.raises(InputError, match="needs example inputs"):
        pq.quantize(model, calibration_data=[], backend="plain")
    ep = export(model, (torch.randn(1, 4),))
    with pytest.raises(InputError, match="has its inputs and dynamic shapes already"):
        pq.quantize(ep, (torch.randn(1, 4),), calibration_data=[], backend="plain")
    with pytest.raises(InputError, match="a tuple of inputs, found a Tensor"):
        pq.quantize(model, torch.randn(1, 4), calibration_data=[], backend="plain")
    with pytest.raises(
        (InputError, ConfigError), match=r"quantize takes a module or a program .* found str"
    ):
        pq.quantize("model.pt2", (torch.randn(1, 4),), calibration_data=[], backend="plain")


def test_calibrate_when_inputs_are_integers_then_checks_them_like_others(plain_backend):
    ep = export(Lookup(), (torch.zeros(1, 3, dtype=torch.int64),))
    prepared = pq.prepare_pt2e(ep, plain_backend.quantizer())
    with pytest.raises(InputError, match=r"dtype float32, .* int64"):
        pq.calibrate(prepared, [torch.zeros(1, 3)])
    with pytest.raises(InputError, match=r"unknown input \['mask'\]: expected \(ids\)"):
        pq.calibrate(prepared, [{"ids": torch.zeros(1, 3, dtype=torch.int64), "mask": 1}])


def test_artifact_when_inputs_do_not_fit_then_refuses_as_calibrate_does(model, plain_backend):
    artifact = pq.quantize(
        model, (torch.randn(1, 4),), calibration_data=[torch.randn(1, 4)], backend="plain"
    )
    with pytest.raises(InputError, match="size 2 in dimension 0"):
        artifact.run(torch.randn(2, 4))
    with pytest.raises(InputError, match="dtype float16"):
        artifact.run(torch.randn(1, 4).half())


# Files and extras


@pytest.mark.parametrize(
    ("backend", "package", "suffix"),
    [("onnx", "onnxruntime", ".onnx"), ("xnnpack", "executorch", ".pte")],
)
def test_backend_when_its_extra_is_missing_then_says_what_installs_it(
    model, tmp_path, monkeypatch, backend, package, suffix
):
    real_import = builtins.__import__
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named '{package}'", name=package)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setitem(sys.modules, package, None)
    target = pq.backends.get(backend)
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"")
    with pytest.raises(MissingExtraError, match=rf"pip install 'pt2e-quant\[{backend}\]'"):
        target.load(path)
    batches = iter([torch.randn(1, 4)])
    with pytest.raises(MissingExtraError, match=rf"pip install 'pt2e-quant\[{backend}\]'"):
        pq.quantize(model, (torch.randn(1, 4),), calibration_data=batches, backend=backend)
    assert len(list(batches)) == 1, "the long work was done before the error"


@pytest.mark.parametrize(
    ("backend", "package", "suffix"),
    [("onnx", "onnxruntime", ".onnx"), ("xnnpack", "executorch", ".pte")],
)
def test_load_when_a_file_is_damaged_or_foreign_then_refuses(tmp_path, backend, package, suffix):
    pytest.importorskip(package)
    target = pq.backends.get(backend)
    for content in (b"", b"hello" * 50):
        path = tmp_path / f"model{suffix}"
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=r"model\."):
            target.load(path)
    with pytest.raises(ArtifactError, match="gone"):
        target.load(tmp_path / f"gone{suffix}")


@pytest.mark.parametrize(
    ("backend", "package", "suffix"),
    [("onnx", "onnxruntime", ".onnx"), ("xnnpack", "executorch", ".pte")],
)
def test_save_when_it_cannot_write_then_says_where(model, tmp_path, backend, package, suffix):
    pytest.importorskip(package)
    batches = torch.randn(32, 1, 4)
    artifact = pq.quantize(
        model, (torch.randn(1, 4),), calibration_data=list(batches), backend=backend
    )
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none" / f"m{suffix}", tmp_path / "file" / f"m{suffix}", tmp_path):
        with pytest.raises(ArtifactError, match="cannot write"):
            artifact.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    whole = (tmp_path / f"m{suffix}", str(tmp_path / f"n{suffix}"))
    for path in whole:
        artifact.save(path)
    assert len({p.read_bytes() for p in tmp_path.glob(f"*{suffix}")}) == 1
