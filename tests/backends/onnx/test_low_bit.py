"""Weight-only and dynamic schemes: what runs, how near, how large, with ONNX Runtime's operators
and with those of the standard alone."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import onnx

import pt2e_quant as pq
from pt2e_quant.backends.onnx.artifact import OnnxArtifact
from pt2e_quant.backends.onnx.low_bit_rows import LOW_BIT_ROWS
from pt2e_quant.backends.onnx.recipes import RECIPES
from pt2e_quant.core.errors import ArtifactError, ConfigError
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.flow.calibrate.sample import sqnr_db

BACKEND = pq.backends.get("onnx")
NO_DATA = ["w4", "w4_g64", "w4_g128", "a8w4_g32", "w8", "int8_dynamic", "int8_dynamic_per_tensor"]
"""Recipes that need no data; those left out differ in the group size alone."""


class Model(nn.Module):
    """A table, linears on three and two dimensions, with and without bias, and shared inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 256)
        self.wide, self.narrow = nn.Linear(256, 384), nn.Linear(384, 256, bias=False)
        self.beside, self.head = nn.Linear(256, 256), nn.Linear(256, 32)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids)
        y = self.narrow(torch.relu(self.wide(x))) + self.beside(x)
        return y, self.head(y[:, 0])


class Tied(nn.Module):
    """A table that the head multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 128)
        self.middle = nn.Linear(128, 128)
        self.head = nn.Linear(128, 512, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.middle(self.table(ids))))


def ids(n: int, t: int, most: int = 200) -> Tensor:
    return torch.randint(0, most, (n, t), generator=torch.Generator().manual_seed(n * t))


def converted(model: nn.Module, quantizer: Any) -> torch.fx.GraphModule:
    shapes = {"ids": {0: torch.export.Dim("n", max=8), 1: torch.export.Dim("t", max=64)}}
    ep = torch.export.export(model.eval(), (ids(2, 5),), dynamic_shapes=shapes)
    return pq.convert_pt2e(pq.prepare_pt2e(ep, quantizer))


@cache
def lowered(recipe: str, portable: bool) -> tuple[nn.Module, torch.fx.GraphModule, OnnxArtifact]:
    torch.manual_seed(0)
    model = Model().eval()
    gm = converted(model, BACKEND.quantizer(recipe))
    artifact = BACKEND.lower(gm, (ids(2, 5),), portable=portable)  # type: ignore[call-arg]  # ours
    assert isinstance(artifact, OnnxArtifact)
    return model, gm, artifact


def proto(artifact: OnnxArtifact) -> onnx.ModelProto:
    return onnx.load_from_string(artifact.model)


def nodes(artifact: OnnxArtifact, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in proto(artifact).graph.node if node.op_type == op_type]


def attribute(node: onnx.NodeProto, name: str) -> int:
    return next(int(a.i) for a in node.attribute if a.name == name)


def stored_bits(artifact: OnnxArtifact, prefix: str, weights: int) -> float:
    """Bits per weight of all initializers of one weight: integers, scales, zero points."""
    found = [i for i in proto(artifact).graph.initializer if i.name.startswith(prefix)]
    assert found
    return 8 * sum(len(i.raw_data) for i in found) / weights


EXACT_DB, BLOCKS_DB = 100.0, 36.0
"""Float rounding alone; activations that the kernel rounds to int8 by blocks of 32 to 256."""


def least_db(recipe: str, portable: bool) -> float:
    if recipe.startswith("a8w4") or (recipe.startswith("w4") and portable):
        return BLOCKS_DB  # ONNX Runtime makes MatMulNBits of level 4 of portable blocks, too
    # A value on the border of two integers may be rounded either way, which is one step in 255.
    return 45.0 if recipe.startswith("int8_dynamic") else EXACT_DB


@pytest.mark.parametrize("portable", [False, True], ids=["kernels", "portable"])
@pytest.mark.parametrize("recipe", NO_DATA)
def test_recipe_when_run_at_other_sizes_then_as_the_graph_says(recipe: str, portable: bool) -> None:
    model, gm, artifact = lowered(recipe, portable)
    assert artifact.report.float_regions == []
    for n, t in ((1, 1), (3, 7), (8, 64)):
        x = ids(n, t)
        assert sqnr_db(gm(x), artifact.run(x)) > least_db(recipe, portable)
        assert sqnr_db(model(x), artifact.run(x)) > (14 if "w4" in recipe else 32)


@pytest.mark.parametrize("recipe", NO_DATA)
def test_recipe_when_lowered_then_every_linear_is_on_its_kernel(recipe: str) -> None:
    artifact = lowered(recipe, False)[2]
    counts = artifact.report.integer_ops
    if recipe == "w8":
        assert artifact.report.float_ops["MatMul"] + artifact.report.float_ops["Gemm"] == 4
        assert counts == {"Gather": 1}  # rows of the table
    elif "w4" in recipe:
        assert counts["MatMulNBits"] == 4
    elif recipe == "int8_dynamic":
        assert counts["MatMulIntegerToFloat"] == 4
    else:
        assert counts["DynamicQuantizeMatMul"] + counts["MatMulIntegerToFloat"] == 4


@pytest.mark.parametrize("recipe", NO_DATA)
def test_recipe_when_portable_then_operators_of_the_standard_alone(recipe: str) -> None:
    model = proto(lowered(recipe, True)[2])
    assert {node.domain for node in model.graph.node} == {""}
    assert [opset.domain for opset in model.opset_import] == [""]
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize(("recipe", "level"), [("w4_g64", 0), ("a8w4_g32", 4)])
def test_accuracy_level_when_activations_are_float_then_0_else_4(recipe: str, level: int) -> None:
    found = nodes(lowered(recipe, False)[2], "MatMulNBits")
    assert {attribute(node, "accuracy_level") for node in found} == {level}
    assert {attribute(node, "block_size") for node in found} == {64 if level == 0 else 32}


def test_rows_when_all_recipes_are_lowered_then_each_linear_row_is_proven() -> None:
    rules = {
        record.rule.partition("(row ")[2].rstrip(")")
        for recipe in NO_DATA
        for record in lowered(recipe, False)[2].report.provenance.tensors
    }
    elsewhere = {"conv1d_w8", "conv2d_w8", "conv3d_w8", "embedding_w4", "embedding_w8"}
    elsewhere |= {f"conv_transpose{rank}d_w8" for rank in (1, 2, 3)}
    assert {row.name for row in LOW_BIT_ROWS} - elsewhere <= rules


@pytest.mark.parametrize(("recipe", "most"), [("w4_g128", 4.3), ("w4_g64", 4.6), ("a8w4_g32", 5.2)])
@pytest.mark.parametrize("portable", [False, True], ids=["kernels", "portable"])
def test_file_when_four_bit_then_bits_per_weight_are_few(
    recipe: str, most: float, portable: bool
) -> None:
    artifact = lowered(recipe, portable)[2]
    for name, weights in (("wide", 256 * 384), ("narrow", 256 * 384), ("beside", 256 * 256)):
        names = {i.name for i in proto(artifact).graph.initializer}
        # Portable constants that the exporter named itself stand under their value's name.
        owned = any(n.startswith(f"{name}.weight_q") for n in names)
        assert owned or portable
        if owned:
            assert stored_bits(artifact, f"{name}.weight", weights) <= most


def test_file_when_four_bit_then_all_of_it_is_small() -> None:
    artifact = lowered("w4_g128", False)[2]
    linears = 2 * 256 * 384 + 256 * 256 + 32 * 256
    biases = 4 * (384 + 256 + 32)
    table = 200 * (256 + 8)
    constants = linears * 4.6 / 8 + biases + table
    described = artifact.size_bytes - sum(
        len(i.raw_data) for i in proto(artifact).graph.initializer
    )
    assert artifact.size_bytes - described <= constants
    assert described < 10_000


@pytest.mark.parametrize("symmetric", [True, False], ids=["int4", "uint4"])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
def test_groups_when_of_a_size_that_kernels_take_then_exact(group: int, symmetric: bool) -> None:
    torch.manual_seed(group)
    model = Model().eval()
    scheme = scheme_named(f"w4_g{group}", symmetric=symmetric)
    quantizer = BACKEND.quantizer("w4").set_global(scheme).set_module_name("narrow", None)
    gm = converted(model, quantizer)
    artifact = BACKEND.lower(gm, (ids(2, 5),))
    assert artifact.report.integer_ops["MatMulNBits"] == 3
    assert artifact.report.integer_ops["GatherBlockQuantized"] == 1
    assert sqnr_db(gm(ids(4, 9)), artifact.run(ids(4, 9))) > EXACT_DB
    has_zero_points = [len(n.input) > 3 and n.input[3] for n in nodes(artifact, "MatMulNBits")]  # type: ignore[arg-type]  # an OnnxArtifact
    assert all(has_zero_points) is not symmetric


def test_columns_when_no_block_divides_them_then_rows_are_padded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 9)).eval()
    x = torch.randn(3, 40)
    ep = torch.export.export(model, (x,))
    gm = pq.convert_pt2e(pq.prepare_pt2e(ep, BACKEND.quantizer("w4")))
    artifact = BACKEND.lower(gm, (x,))
    assert artifact.report.integer_ops == {"MatMulNBits": 2}
    assert sqnr_db(gm(x), artifact.run(x)) > EXACT_DB


@pytest.mark.parametrize("name", ["w8_g32", "w8_g128", "w8"])
def test_eight_bit_groups_when_lowered_then_dequantized_at_load(name: str) -> None:
    torch.manual_seed(0)
    gm = converted(Model(), BACKEND.quantizer("w8").set_global(scheme_named(name)))
    artifact = BACKEND.lower(gm, (ids(2, 5),))
    assert artifact.report.float_regions == []
    assert sqnr_db(gm(ids(4, 9)), artifact.run(ids(4, 9))) > EXACT_DB
    looked_up = artifact.report.integer_ops
    assert looked_up == ({"Gather": 1} if name == "w8" else {"GatherBlockQuantized": 1})


def test_convolutions_when_weight_only_then_the_file_shrinks_and_results_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.Flatten(2), nn.Conv1d(64, 64, 3)
    ).eval()
    x = torch.randn(2, 3, 12, 12)
    gm = pq.convert_pt2e(pq.prepare_pt2e(torch.export.export(model, (x,)), BACKEND.quantizer("w8")))
    artifact = BACKEND.lower(gm, (x,))
    assert sqnr_db(gm(x), artifact.run(x)) > EXACT_DB
    assert artifact.size_bytes < 0.4 * artifact.report.float_size_bytes
    rules = {record.rule for record in artifact.report.provenance.tensors}
    assert {"conv1d_w8", "conv2d_w8"} <= {rule.partition("(row ")[2].rstrip(")") for rule in rules}


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed_convolution_when_weight_only_then_the_file_shrinks_and_results_stay(
    rank: int, groups: int
) -> None:
    torch.manual_seed(0)
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    model = kind(64, 64, 5 if rank == 1 else 3, 2, 1, groups=groups).eval()
    x = torch.randn(2, 64, *[5, 4, 3][:rank])
    artifact = pq.quantize(model, (x,), backend="onnx", recipe="w8", progress=False)
    assert artifact.quantized is not None
    assert sqnr_db(artifact.quantized(x), artifact.run(x)) > EXACT_DB
    assert sqnr_db(model(x), artifact.run(x)) > 35
    assert artifact.size_bytes < 0.5 * artifact.report.float_size_bytes
    assert f"conv_transpose{rank}d_w8" in artifact.report.provenance.tensors[0].rule


@pytest.mark.parametrize("portable", [False, True], ids=["kernels", "portable"])
@pytest.mark.parametrize("recipe", ["w4_g32", "a8w4_g64", "w8", "int8_dynamic"])
def test_tied_table_when_lowered_then_its_integers_are_in_the_file_once(
    recipe: str, portable: bool
) -> None:
    torch.manual_seed(0)
    gm = converted(Tied(), BACKEND.quantizer(recipe))
    artifact = BACKEND.lower(gm, (ids(2, 5),), portable=portable)  # type: ignore[call-arg]  # ours
    assert isinstance(artifact, OnnxArtifact)
    size = 512 * 128  # a table that a linear computes with has 8 bits in every recipe
    large = [i for i in proto(artifact).graph.initializer if len(i.raw_data) >= size]
    assert len(large) == 1
    limit = least_db(recipe, portable)
    assert sqnr_db(gm(ids(3, 6)), artifact.run(ids(3, 6))) > limit


@pytest.mark.parametrize("portable", [False, True], ids=["kernels", "portable"])
@pytest.mark.parametrize("scheme", ["w4", "w4_g32"])
def test_tied_table_when_rules_ask_for_4_bits_then_in_the_file_once_too(
    scheme: str, portable: bool
) -> None:
    torch.manual_seed(0)
    quantizer = BACKEND.quantizer("w4").set_operator("embedding", scheme_named(scheme))
    gm = converted(Tied(), quantizer.set_operator("linear", scheme_named(scheme)))
    artifact = BACKEND.lower(gm, (ids(2, 5),), portable=portable)  # type: ignore[call-arg]  # ours
    assert isinstance(artifact, OnnxArtifact)
    sizes = [len(i.raw_data) for i in proto(artifact).graph.initializer]
    assert [n for n in sizes if n >= 512 * 128 // 2] == [512 * 128 // 2]
    assert sqnr_db(gm(ids(3, 6)), artifact.run(ids(3, 6))) > least_db(scheme, portable)


@pytest.mark.parametrize("recipe", ["w4_g128", "w4", "a8w4_g32", "int8_dynamic", "w8"])
def test_file_when_saved_and_loaded_then_the_same_results_and_records(
    recipe: str, tmp_path: Any
) -> None:
    artifact = lowered(recipe, False)[2]
    artifact.save(tmp_path / "model.onnx")
    loaded = BACKEND.load(tmp_path / "model.onnx")
    for a, b in zip(artifact.run(ids(3, 7)), loaded.run(ids(3, 7)), strict=True):
        assert torch.equal(a, b)
    before = artifact.report.provenance.tensor("wide.weight")
    after = loaded.report.provenance.tensor("wide.weight")
    assert (after.dtype, after.group_size) == (before.dtype, before.group_size)
    assert np.allclose(after.scale, before.scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("w4_g48", "w4_g32"),
        ("a8w8_g32", "int8_dynamic"),
        ("a8w3_g32", "a8w4_g32"),
        ("w3_g48", "w3_g32"),
        ("fp8", "fp8_weight_only"),
        ("fp8_e5m2_blocks", "fp8_e5m2_weight_only"),
        ("mxfp4", "mxfp4_weight_only"),
        ("nf4_g32", "nf4"),
        ("a16w3", "a16w4"),
        ("mxfp8", "mxfp8_weight_only"),
    ],
)
def test_scheme_when_no_recipe_has_it_then_the_nearest_is_named(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f'no kernel for scheme "{name}"') as error:
        BACKEND.quantizer(name)
    assert f'"{nearest}"' in str(error.value)
    assert nearest in RECIPES


def test_scheme_when_no_row_takes_it_then_the_record_says_what_would_fit() -> None:
    quantizer = BACKEND.quantizer("w4_g32").set_module_name("wide", scheme_named("a8w3_g32"))
    gm = converted(Model(), quantizer)
    left = [f for f in pq.provenance_of(gm).floats if f.module == "wide"]
    assert len(left) == 1
    assert "not int3" in left[0].reason
    assert "uint4" in left[0].reason


def test_portable_when_two_linears_share_a_weight_then_strict_refuses() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(torch.relu(self.a(x)))

    x = torch.randn(2, 3, 64)
    ep = torch.export.export(Twice().eval(), (x,))
    gm = pq.convert_pt2e(pq.prepare_pt2e(ep, BACKEND.quantizer("w4_g32")))
    assert BACKEND.lower(gm, (x,)).report.integer_ops == {"MatMulNBits": 2}
    with pytest.raises(ArtifactError, match="runs in float"):
        BACKEND.lower(gm, (x,), portable=True)  # type: ignore[call-arg]  # ours


class CachedAttention(nn.Module):
    """One head that writes its keys and values into a cache that goes in and comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, 64, bias=False)

    def forward(
        self, x: Tensor, at: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys = keys.index_copy(1, at, self.key(x))
        values = values.index_copy(1, at, self.value(x))
        scores = self.query(x) @ keys.transpose(1, 2) / 8
        seen = torch.arange(keys.shape[1])[None, :] <= at[:, None]
        weights = scores.masked_fill(~seen, -1e9).softmax(-1)
        return self.out(weights @ values), keys, values


@pytest.mark.parametrize("recipe", ["w4_g32", "a8w4_g32", "int8_dynamic"])
def test_cache_when_it_goes_in_and_comes_out_then_a_model_runs_token_by_token(recipe: str) -> None:
    torch.manual_seed(0)
    model = CachedAttention().eval()
    tokens = torch.randn(1, 6, 64)
    empty = torch.zeros(1, 8, 64)
    # Two tensors: torch.export takes one that stands twice in a call for one input.
    sample = (tokens[:, :3], torch.arange(3), empty, empty.clone())
    size = torch.export.Dim("t", max=8)
    shapes = {"x": {1: size}, "at": {0: size}, "keys": None, "values": None}
    ep = torch.export.export(model, sample, dynamic_shapes=shapes)
    gm = pq.convert_pt2e(pq.prepare_pt2e(ep, BACKEND.quantizer(recipe)))
    artifact = BACKEND.lower(gm, sample)
    steps = [(0, 3), (3, 4), (4, 5), (5, 6)]
    found, keys, values = [], empty, empty
    for start, end in steps:
        at = torch.arange(start, end)
        result, keys, values = artifact.run(tokens[:, start:end], at, keys, values)
        found.append(result)
    whole = model(tokens, torch.arange(6), empty, empty)[0]
    assert sqnr_db(whole, torch.cat(found, 1)) > (12 if "w4" in recipe else 32)
