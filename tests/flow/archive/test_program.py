"""Programs through save and load: with state, dynamic sizes, tied weights, mutated buffers."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn
from torch.fx import GraphModule

import pt2e_quant as pq
from pt2e_quant.core.errors import (
    ArtifactError,
    CalibrationError,
    ConfigError,
    Pt2eQuantWarning,
    UnsupportedError,
)
from pt2e_quant.core.provenance import PROVENANCE_KEY, Provenance, provenance_of
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.specs import Q_ANNOTATION_KEY, DerivedQuantizationSpec, QuantizationAnnotation
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.calibrate.sample import SAMPLE_KEY, sample_of
from pt2e_quant.flow.prepare.prepared import observers_of
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.graph.pipeline import graph_pass
from pt2e_quant.graph.show import show
from pt2e_quant.observers.static.entropy import EntropyObserver
from pt2e_quant.observers.static.histogram import HistogramObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.static.mse import MSEObserver
from pt2e_quant.observers.static.percentile import PercentileObserver
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.pt2e.observers.recording import RecordingObserver


@pytest.fixture
def prepared(net, quantizer, images, batch_dim) -> GraphModule:
    program = torch.export.export(net, (images[0],), dynamic_shapes=batch_dim)
    return pq.prepare_pt2e(program, quantizer())


def outputs(gm: GraphModule, x: torch.Tensor) -> list[torch.Tensor]:
    return [v.clone() for v in gm(x).values()]


def assert_same(a: GraphModule, b: GraphModule, x: torch.Tensor) -> None:
    assert show(a) == show(b)
    state = b.state_dict()
    assert a.state_dict().keys() == state.keys()
    for name, value in a.state_dict().items():
        assert torch.equal(value, state[name]), name
        assert value.stride() == state[name].stride(), name
    for left, right in zip(outputs(a, x), outputs(b, x), strict=True):
        assert torch.equal(left, right)


def test_load_when_prepared_then_calibration_goes_on(prepared, images, tmp_path):
    pq.calibrate(prepared, images[:1], progress=False)
    pq.save(prepared, tmp_path / "half.ptq")
    loaded = pq.load(tmp_path / "half.ptq")
    for gm in (prepared, loaded):
        pq.calibrate(gm, images[1:], progress=False)
    for (_, a), (_, b) in zip(observers_of(prepared), observers_of(loaded), strict=True):
        assert type(a) is type(b)
        assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())
    assert_same(pq.convert_pt2e(prepared), pq.convert_pt2e(loaded), images[0])


@pytest.mark.parametrize(
    "observer",
    [MinMaxObserver, HistogramObserver, MSEObserver, EntropyObserver, PercentileObserver],
)
@pytest.mark.parametrize("seen", [0, 1])
def test_load_when_any_observer_then_the_qparams_of_one_run(
    observer, seen, net, quantizer, images, tmp_path
):
    quantizer = quantizer(observers=ObserverChoice(activation=observer))
    gm = pq.prepare_pt2e(torch.export.export(net, (images[0],)), quantizer)
    for x in images[:seen]:
        gm(x)
    pq.save(gm, tmp_path / "x.ptq")
    loaded = pq.load(tmp_path / "x.ptq", mmap=bool(seen))
    for x in images[seen:]:
        gm(x), loaded(x)
    for (_, a), (_, b) in zip(observers_of(gm), observers_of(loaded), strict=True):
        if a.seen:
            assert all(map(torch.equal, a.calculate_qparams(), b.calculate_qparams()))


def test_load_when_nothing_was_seen_then_convert_says_so(prepared, tmp_path):
    pq.save(prepared, tmp_path / "x.ptq")
    with pytest.raises(CalibrationError, match="saw no data"):
        pq.convert_pt2e(pq.load(tmp_path / "x.ptq"))


def test_load_when_annotated_then_slots_are_known(prepared, tmp_path):
    pq.save(prepared, tmp_path / "x.ptq")
    loaded = pq.load(tmp_path / "x.ptq")
    for a, b in zip(prepared.graph.nodes, loaded.graph.nodes, strict=True):
        left, right = (n.meta.get(Q_ANNOTATION_KEY) for n in (a, b))
        assert (left is None) == (right is None)
        if left is not None:
            assert isinstance(right, QuantizationAnnotation)
            assert (left.output_qspec is None) == (right.output_qspec is None)
            assert {n.name for n in right.input_qspec_map} <= {n.name for n in left.input_qspec_map}


@pytest.mark.parametrize("mmap", [False, True])
def test_load_when_converted_then_all_of_it_is_there(prepared, images, mmap, tmp_path):
    gm = pq.convert_pt2e(pq.calibrate(prepared, images, progress=False))
    gm.calls.fill_(7)
    pq.save(gm, tmp_path / "x.ptq")
    loaded = pq.load(tmp_path / "x.ptq", mmap=mmap)
    assert_same(gm, loaded, images[0])
    assert loaded.calls == gm.calls == 8  # the buffer is written still
    assert provenance_of(loaded) == provenance_of(gm)
    assert capture_of(loaded) == capture_of(gm)
    assert all(map(torch.equal, sample_of(gm).leaves, sample_of(loaded).leaves))
    pq.verify_canonical(loaded)
    again = export_again(loaded)
    assert str(again.range_constraints) == str(export_again(gm).range_constraints)
    assert again.module()(images[0][:3])["logits"].shape == (3, 10)
    with pytest.raises(pq.Pt2eQuantError, match="captured for 1 to 64"):
        loaded(images[0].repeat(20, 1, 1, 1))
    # Copied, pickled, saved again: a program as any other.
    assert_same(copy.deepcopy(loaded), loaded, images[1])
    pq.save(loaded, tmp_path / "x.ptq")
    assert_same(pq.load(tmp_path / "x.ptq"), loaded, images[1])
    assert_same(pickle.loads(pickle.dumps(loaded)), loaded, images[1])


def test_load_when_fake_values_are_symbolic_then_the_same_symbols(prepared, tmp_path):
    pq.save(prepared, tmp_path / "x.ptq")
    loaded = pq.load(tmp_path / "x.ptq")
    for a, b in zip(prepared.graph.nodes, loaded.graph.nodes, strict=True):
        for key in ("nn_module_stack", "stack_trace"):
            assert (key in a.meta) == (key in b.meta)
        if isinstance(a.meta.get("val"), torch.Tensor):
            left, right = a.meta["val"], b.meta["val"]
            assert [str(s) for s in left.shape] == [str(s) for s in right.shape]
            assert (left.dtype, left.device) == (right.dtype, right.device)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.second(torch.relu(self.first(x)))}


@pytest.mark.parametrize("stage", ["prepared", "unfolded", "converted"])
def test_load_when_weights_are_tied_then_stay_so_and_are_stored_once(stage, quantizer, tmp_path):
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    gm = pq.prepare_pt2e(torch.export.export(Tied().eval(), (x,)), quantizer())
    pq.calibrate(gm, [x], progress=False)
    if stage != "prepared":
        gm = pq.convert_pt2e(gm, fold_quantize=stage == "converted")
    pq.save(gm, tmp_path / "x.ptq", keep_sample=False)
    loaded = pq.load(tmp_path / "x.ptq")
    assert_same(gm, loaded, x)
    width = 1 if stage == "converted" else 4
    with safe_open(tmp_path / "x.ptq", "pt") as stored:
        large = [n for n in stored.keys() if stored.get_tensor(n).numel() == 64 * 64]
        assert len(large) == 1
    assert (tmp_path / "x.ptq").stat().st_size < 64 * 64 * width * 1.5 + 12_000
    held = [p for p in loaded.state_dict().values() if p.numel() == 64 * 64]
    assert len({p.data_ptr() for p in held}) == 1
    assert len({id(p) for _, p in loaded.named_parameters()}) == len(dict(gm.named_parameters()))


def test_save_when_four_bits_then_at_most_4_6_bits_a_weight(tmp_path, quantizer):
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            values = torch.randint(-8, 8, (512, 1024), generator=generator)
            self.register_buffer("weight_q", values.to(torch.int8))
            self.register_buffer("scale", torch.rand(512, 8, generator=generator))
            self.register_buffer("zero_point", torch.randint(-8, 8, (512, 8), generator=generator))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = torch.ops.quantized_decomposed.dequantize_per_channel_group(
                self.weight_q, self.scale, self.zero_point, -8, 7, torch.int8, 128, torch.float32
            )
            return nn.functional.linear(x, weight)

    class Nothing:
        def transform_for_annotation(self, model):
            return model

        def annotate(self, model):
            return model

        def validate(self, model):
            return None

    program = torch.export.export(Wide(), (torch.ones(1, 1024),))
    with pytest.warns(Pt2eQuantWarning, match="no tensor"):
        gm = pq.convert_pt2e(pq.prepare_pt2e(program, Nothing(), strict=False))
    held = sum(t.numel() * t.element_size() for t in gm.state_dict().values())
    assert held * 8 / (512 * 1024) <= 4.3
    pq.save(gm, tmp_path / "x.ptq", keep_sample=False)
    # Scales, zero points, graph, names and checksums included.
    assert (tmp_path / "x.ptq").stat().st_size * 8 / (512 * 1024) <= 4.6
    assert torch.equal(pq.load(tmp_path / "x.ptq")(torch.ones(1, 1024)), gm(torch.ones(1, 1024)))


def test_load_when_branches_then_bodies_are_there(quantizer, tmp_path):
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = torch.cond(x.sum() > 0, lambda v: self.a(v), lambda v: self.b(v), (x,))
            return {"y": y}

    x = torch.ones(2, 4)
    gm = pq.prepare_pt2e(torch.export.export(Branch().eval(), (x,)), quantizer())
    pq.save(gm, tmp_path / "x.ptq")
    loaded = pq.load(tmp_path / "x.ptq")
    for program in (gm, loaded):
        pq.calibrate(program, [x, -x], progress=False)
    gm, loaded = pq.convert_pt2e(gm), pq.convert_pt2e(loaded)
    # Names may differ: a graph keeps names reserved that it no longer has.
    for sample in (x, -x):
        assert torch.equal(gm(sample)["y"], loaded(sample)["y"])
    pq.save(gm, tmp_path / "x.ptq")
    assert_same(gm, pq.load(tmp_path / "x.ptq"), x)


def test_load_when_layouts_are_mixed_then_strides_and_views_are_kept(tmp_path, quantizer):
    class Layouts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            whole = torch.arange(24.0).reshape(4, 6)
            self.register_buffer("whole", whole)
            self.register_buffer("part", whole[1:3, ::2])
            self.register_buffer(
                "last", torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
            )
            self.register_buffer("short", torch.rand(3).bfloat16())
            self.register_buffer("empty", torch.zeros(0, 3))
            self.register_buffer("wave", torch.rand(3, dtype=torch.complex64))
            self.register_buffer("scratch", torch.ones(2), persistent=False)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            rest = self.whole.sum() + self.part.sum() + self.last.sum() + self.short.float().sum()
            rest = rest + self.wave.abs().sum() + self.empty.sum() + self.scratch.sum()
            return {"y": self.lin(x) + rest}

    x = torch.ones(2, 4)
    # Not folded: calibration would make one constant of them.
    program = torch.export.export(Layouts().eval(), (x,))
    gm = program.module()
    gm.meta[PROVENANCE_KEY] = Provenance()
    strip_guards(gm)
    pq.save(gm, tmp_path / "x.ptq")
    loaded = pq.load(tmp_path / "x.ptq")
    assert_same(gm, loaded, x)
    assert loaded.part.untyped_storage().data_ptr() == loaded.whole.untyped_storage().data_ptr()
    assert loaded.last.is_contiguous(memory_format=torch.channels_last)
    assert "scratch" in dict(loaded.named_buffers())
    assert "scratch" not in loaded.state_dict()


@settings(max_examples=15)
@given(shard_bytes=st.integers(1, 3000))
def test_load_when_sharded_then_equal_and_each_file_as_small_as_asked(
    shard_bytes, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("shards")
    gm = small_program()
    pq.save(gm, folder / "x.ptq", shard_bytes=shard_bytes)
    assert_same(gm, pq.load(folder / "x.ptq"), torch.ones(2, 8))
    files = list(folder.iterdir())
    largest = max(t.numel() * t.element_size() for t in gm.state_dict().values())
    for file in files:
        with safe_open(file, "pt") as stored:
            sizes = [stored.get_tensor(n).nbytes for n in stored.keys() if "." in n or True]
            if file.name != "x.ptq":
                assert sum(sizes) <= max(shard_bytes, largest)
    # The next save leaves no file of this one behind.
    pq.save(gm, folder / "x.ptq")
    assert [f.name for f in folder.iterdir()] == ["x.ptq"]


def small_program() -> GraphModule:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": self.b(torch.relu(self.a(x)))}

    torch.manual_seed(0)
    gm = torch.export.export(Plain().eval(), (torch.ones(2, 8),)).module()
    strip_guards(gm)
    gm.meta[PROVENANCE_KEY] = Provenance()
    return gm


def test_save_when_sample_is_not_kept_then_no_data_of_the_user_is_in_the_file(
    prepared, images, tmp_path
):
    pq.calibrate(prepared, images, progress=False)
    pq.save(prepared, tmp_path / "x.ptq", keep_sample=False)
    assert SAMPLE_KEY in prepared.meta
    assert SAMPLE_KEY not in pq.load(tmp_path / "x.ptq").meta


def test_save_when_no_program_of_ours_then_refused(tmp_path):
    with pytest.raises(ConfigError, match="save takes a program"):
        pq.save(torch.fx.symbolic_trace(nn.ReLU()), tmp_path / "x.ptq")
    with pytest.raises(ConfigError, match="shard_bytes must be positive"):
        pq.save(small_program(), tmp_path / "x.ptq", shard_bytes=0)


def test_save_when_an_observer_is_not_ours_then_named(prepared, tmp_path):
    class Own(RecordingObserver):
        pass

    node, _ = next(observers_of(prepared))
    setattr(prepared, str(node.target), Own(torch.int8))
    with pytest.raises(UnsupportedError, match="Own, which is not of this package"):
        pq.save(prepared, tmp_path / "x.ptq")
    assert not list(tmp_path.iterdir())


def test_save_when_a_pass_is_not_ours_then_named(net, quantizer, images, tmp_path):
    @graph_pass(needs=(), gives=())
    def my_pass(gm):
        raise AssertionError

    gm = pq.prepare_pt2e(torch.export.export(net, (images[0],)), quantizer(finishing=(my_pass,)))
    with pytest.raises(UnsupportedError, match="cannot hold the pass my_pass"):
        pq.save(gm, tmp_path / "x.ptq")


def test_save_when_a_derived_spec_has_a_function_of_the_user_then_named(
    net, quantizer, images, tmp_path
):
    class Deriving(type(quantizer())):
        def annotate(self, model):
            super().annotate(model)
            node = next(n for n in model.graph.nodes if n.name == "linear")
            bias = node.args[2]
            edges = [(node.args[0], node)]
            node.meta[Q_ANNOTATION_KEY].input_qspec_map[bias] = DerivedQuantizationSpec(
                derived_from=edges,
                derive_qparams_fn=lambda observers: observers[0].calculate_qparams(),
                dtype=torch.int32,
                quant_min=-(2**31),
                quant_max=2**31 - 1,
                qscheme=torch.per_tensor_symmetric,
            )
            return model

    made = quantizer()
    made.__class__ = Deriving
    gm = pq.prepare_pt2e(torch.export.export(net, (images[0],)), made)
    with pytest.raises(UnsupportedError, match=r"derive_qparams_fn.*cannot hold the function"):
        pq.save(gm, tmp_path / "x.ptq")


def test_load_when_an_operator_library_is_the_users_then_only_if_allowed(tmp_path):
    library = torch.library.Library("archive_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("archive_test::twice", lambda x: x * 1, lib=library)

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": torch.ops.archive_test.twice(x)}

    gm = torch.export.export(Twice(), (torch.ones(2),)).module()
    strip_guards(gm)
    gm.meta[PROVENANCE_KEY] = Provenance()
    pq.save(gm, tmp_path / "x.ptq")
    with pytest.raises(ArtifactError, match=r'namespaces=\("archive_test",\)'):
        pq.load(tmp_path / "x.ptq")
    loaded = pq.load(tmp_path / "x.ptq", namespaces=("archive_test",))
    assert loaded(torch.ones(2))["y"].tolist() == [2, 2]
    library._destroy()
