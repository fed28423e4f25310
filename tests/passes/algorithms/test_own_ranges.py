"""Small members of a concatenation that others read: a range of their own, or a reason."""

import re
from textwrap import dedent

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.graph.show import show
from pt2e_quant.passes.algorithms.own_ranges import OwnRanges

OWN = OwnRanges()
PADS = {"padded": 0.0, "padded high": 1.0}


class Joined(nn.Module):
    """Two convolutions whose results are joined; one of them is a result of the model as well."""

    def __init__(self, kind: str = "plain", size: float = 0.01) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.large, self.small = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.last = nn.Conv1d(8, 4, 1) if kind == "flattened" else nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            for parameter in self.small.parameters():
                parameter.mul_(size)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        large, small = self.large(x), self.small(x)
        if self.kind == "flattened":
            large, small = large.flatten(2), small.flatten(2)
        joined = torch.cat([large, small], 1)
        if self.kind == "read once":
            return (self.last(joined),)
        if self.kind in PADS:
            return self.last(joined), small, F.pad(small, (1, 1), value=PADS[self.kind])
        return self.last(joined), small


def images(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 3, 8, 8, generator=generator) for _ in range(count)]


def prepared(model: nn.Module, backend: str = "onnx") -> torch.fx.GraphModule:
    """Calibrated, with `own_ranges` as the one algorithm."""
    quantizer = pq.backends.get(backend).quantizer("int8")
    for algorithm in quantizer.algorithms:
        quantizer.remove_algorithm(algorithm.name)
    program = torch.export.export(model.eval(), (images(1)[0],))
    gm = pq.prepare_pt2e(program, quantizer, algorithms=[OWN])
    return pq.calibrate(gm, images(4), progress=False)


def worst_db(run, model: nn.Module) -> float:
    with torch.no_grad():
        return min(
            pq.sqnr_db(wanted, found)
            for x in images(4, seed=1)
            for wanted, found in zip(model(x), run(x), strict=True)
        )


def test_own_ranges_when_a_small_member_is_a_result_then_rounded_again_for_the_cat_alone(applied):
    gm = prepared(Joined())
    before = show(gm)
    assert applied(gm, OWN).changed
    old = """\
        cat: f32[1, 8, 8, 8] = cat([activation_post_process_3, activation_post_process_6], dim=1)
    """
    new = """\
        joined_range: f32[1, 4, 8, 8] = call_module joined_range(activation_post_process_6)
        cat: f32[1, 8, 8, 8] = cat([activation_post_process_3, joined_range], dim=1)
    """
    before = re.sub(r"statistics.*\n", "", before)
    assert dedent(old) in before
    assert show(gm) == before.replace(dedent(old), dedent(new))
    assert not applied(gm, OWN).changed


@pytest.mark.parametrize(
    ("kind", "size", "reason"),
    [("plain", 0.5, "the range that it shares is"), ("plain", 0.0, "it is constant")],
)
def test_own_ranges_when_members_are_alike_or_dead_then_declined(kind, size, reason, applied):
    result = applied(prepared(Joined(kind, size)), OWN)
    assert not result.changed
    assert reason in " ".join(note.text for note in result.notes if note.node == "conv2d_1")


def test_own_ranges_when_only_the_cat_reads_the_members_then_nothing_is_watched():
    quantizer = pq.backends.get("onnx").quantizer("int8")
    program = torch.export.export(Joined("read once").eval(), (images(1)[0],))
    gm = pq.prepare_pt2e(program, quantizer)
    names = [type(module).__name__ for module in gm.modules()]
    assert "ChannelStatistics" not in names


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("plain", "onnx"), ("flattened", "onnx"), ("padded", "onnx"), ("flattened", "xnnpack")],
)
def test_own_ranges_when_in_a_recipe_then_each_result_is_near(kind, backend, tmp_path):
    model, target = Joined(kind).eval(), pq.backends.get(backend)
    program = torch.export.export(model, (images(1)[0],))

    def converted(quantizer):
        gm = pq.prepare_pt2e(program, quantizer)
        return pq.convert_pt2e(pq.calibrate(gm, images(8), progress=False))

    plain = converted(target.quantizer("int8").remove_algorithm("own_ranges"))
    gm = converted(target.quantizer("int8"))
    assert worst_db(plain, model) < 15 < 30 < worst_db(gm, model)
    artifact = target.lower(gm)
    artifact.save(tmp_path / f"model{target.suffix}")
    assert worst_db(target.load(tmp_path / f"model{target.suffix}").run, model) > 30


def test_own_ranges_when_a_pad_adds_a_larger_number_then_it_is_not_clipped():
    model = Joined("padded high").eval()
    assert worst_db(pq.convert_pt2e(prepared(model)), model) > 30


class Mixed(nn.Module):
    """A tensor joined with a large one, and elsewhere with a small one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        large, middle, small = self.conv(x * 100), self.conv(x), self.conv(x * 0.01)
        joined = torch.cat([middle, small], 1)
        chosen = torch.where(middle > 0, middle, small)
        return torch.maximum(large, middle), self.last(joined), chosen, torch.minimum(middle, large)


def test_own_ranges_when_joined_twice_then_each_join_has_the_range_of_its_members():
    model, target = Mixed().eval(), pq.backends.get("onnx")
    program = torch.export.export(model, (images(1)[0],))

    def converted(quantizer):
        gm = pq.prepare_pt2e(program, quantizer)
        return pq.convert_pt2e(pq.calibrate(gm, images(8), progress=False))

    plain = converted(target.quantizer("int8").remove_algorithm("own_ranges"))
    gm = converted(target.quantizer("int8"))
    # Where the middle tensor is rounded to 0, the choice takes the small one.
    assert worst_db(plain, model) < 5 < 20 < worst_db(gm, model)
    assert worst_db(target.lower(gm).run, model) > 20


def test_own_ranges_when_converted_then_the_records_tell_both_ranges():
    gm = pq.convert_pt2e(prepared(Joined()))
    found = [record for record in provenance_of(gm).tensors if record.name == "conv2d_1"]
    own, joined = sorted(found, key=lambda record: record.scale)
    assert own.group != joined.group
    assert own.scale[0] * 8 < joined.scale[0]
    assert joined.uses == ["conv2d_1 -> cat"]
