"""Images in blocks become SpaceToDepth and DepthToSpace, in float and in integers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
import onnx
import onnx_ir as ir

import pt2e_quant as pq
from pt2e_quant.backends.onnx.rewrites.blocks_as_depth import blocks_as_depth

Move = Callable[[Tensor], Tensor]
C = 8


def parts(x: Tensor, side: int) -> Tensor:
    return x.view(x.shape[0], C, x.shape[2] // side, side, x.shape[3] // side, side)


def split_depth(x: Tensor, *order: int) -> Tensor:
    return x.view(x.shape[0], *order, x.shape[2], x.shape[3])


def as_image(x: Tensor, height: int, width: int) -> Tensor:
    return x.reshape(x.shape[0], 2, height * 2, width * 2)


TO_DEPTH: dict[str, Move] = {
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "pixel_unshuffle, no batch": lambda x: F.pixel_unshuffle(x[0], 2)[None],
    "pixel_unshuffle, video": lambda x: F.pixel_unshuffle(x[:, None], 2)[:, 0],
    "unshuffle": lambda x: parts(x, 2).permute(0, 1, 3, 5, 2, 4).flatten(1, 3),
    "patches": lambda x: (
        parts(x, 4).permute(0, 2, 4, 3, 5, 1).reshape(x.shape[0], -1, C * 16).mT[..., None]
    ),
    "blocks of pixels": lambda x: parts(x, 2).permute(0, 3, 5, 1, 2, 4).flatten(1, 3),
    "patches of channels": lambda x: (
        parts(x, 2).permute(0, 2, 4, 1, 3, 5).flatten(3).permute(0, 3, 1, 2)
    ),
}
TO_IMAGE: dict[str, Move] = {
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "shuffle": lambda x: as_image(
        split_depth(x, 2, 2, 2).permute(0, 1, 4, 2, 5, 3), x.shape[2], x.shape[3]
    ),
    "blocks of channels": lambda x: as_image(
        split_depth(x, 2, 2, 2).permute(0, 3, 4, 1, 5, 2), x.shape[2], x.shape[3]
    ),
    "patches of channels": lambda x: as_image(
        x.permute(0, 2, 3, 1)
        .reshape(x.shape[0], x.shape[2], x.shape[3], 2, 2, 2)
        .permute(0, 3, 1, 4, 2, 5),
        x.shape[2],
        x.shape[3],
    ),
    "patches": lambda x: as_image(
        x.permute(0, 2, 3, 1)
        .reshape(x.shape[0], x.shape[2], x.shape[3], 2, 2, 2)
        .permute(0, 5, 1, 3, 2, 4),
        x.shape[2],
        x.shape[3],
    ),
}
OTHERS: dict[str, Move] = {
    "columns first": lambda x: parts(x, 2).permute(0, 1, 5, 3, 2, 4).flatten(1, 3),
    "long rows": lambda x: parts(x, 8).permute(0, 2, 4, 1, 3, 5).flatten(3).permute(0, 3, 1, 2),
    "oblong": lambda x: (
        x.view(x.shape[0], C, x.shape[2] // 2, 2, x.shape[3] // 4, 4)
        .permute(0, 1, 3, 5, 2, 4)
        .flatten(1, 3)
    ),
}
DYNAMIC = {
    "static": None,
    "batch": {0: Dim("n", max=9)},
    "sizes": {0: Dim("n", max=9), 2: 8 * Dim("h", max=19), 3: 8 * Dim("w", max=19)},
}


class Moved(nn.Module):
    """A move of values between convolutions."""

    def __init__(self, move: Move) -> None:
        super().__init__()
        self.move, self.first, self.last = move, nn.Conv2d(3, C, 3, padding=1), nn.LazyConv2d(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.move(self.first(x)))
        return made


def lowered(move: Move, sizes: str, *, in_integers: bool):
    torch.manual_seed(0)
    model, x = Moved(move).eval(), torch.randn(2, 3, 16, 24)
    model(x)
    backend = pq.backends.get("onnx")
    artifact = pq.quantize(
        model,
        (x,),
        dynamic_shapes=[DYNAMIC[sizes]] if DYNAMIC[sizes] else None,
        calibration_data=[x],
        backend=backend.allowing_slower() if in_integers else backend,
        effort="fast",
        progress=False,
    )
    nodes = onnx.load_from_string(artifact.model).graph.node
    return model, artifact, x, [node.op_type for node in nodes]


@pytest.mark.parametrize(
    ("sizes", "in_integers"), [("static", False), ("batch", True), ("sizes", False)]
)
@pytest.mark.parametrize("name", [*TO_DEPTH, *(f"{n} to image" for n in TO_IMAGE)])
def test_blocks_when_moved_then_one_operator_and_values_as_the_model(name, sizes, in_integers):
    to_image = name.endswith(" to image")
    move = TO_IMAGE[name.removesuffix(" to image")] if to_image else TO_DEPTH[name]
    if name == "pixel_unshuffle, no batch" and sizes != "static":
        pytest.skip("it has no batch")
    model, artifact, x, types = lowered(move, sizes, in_integers=in_integers)
    assert types.count("DepthToSpace" if to_image else "SpaceToDepth") == 1
    assert pq.sqnr_db(model(x), artifact.run(x)) > 25
    if sizes == "sizes":
        other = torch.randn(3, 3, 32, 8)
        assert pq.sqnr_db(model(other), artifact.run(other)) > 15


@pytest.mark.parametrize("name", OTHERS)
def test_blocks_when_the_transpose_is_another_or_as_fast_then_it_stays(name):
    model, artifact, x, types = lowered(OTHERS[name], "batch", in_integers=False)
    assert not {"SpaceToDepth", "DepthToSpace"} & set(types)
    assert pq.sqnr_db(model(x), artifact.run(x)) > 25


def test_blocks_when_quantized_between_on_other_qparams_then_they_stay():
    def node(op, inputs, output, **options):
        return onnx.helper.make_node(op, inputs, [output], **options)

    held = [
        onnx.helper.make_tensor("six", onnx.TensorProto.INT64, [6], [1, 2, 2, 2, 2, 2]),
        onnx.helper.make_tensor("four", onnx.TensorProto.INT64, [4], [1, 8, 2, 2]),
        onnx.helper.make_tensor("scale", onnx.TensorProto.FLOAT, [], [0.5]),
        onnx.helper.make_tensor("zero", onnx.TensorProto.UINT8, [], [128]),
    ]
    nodes = [
        node("Reshape", ["x", "six"], "a"),
        node("QuantizeLinear", ["a", "scale", "zero"], "q"),
        node("DequantizeLinear", ["q", "scale", "zero"], "d"),
        node("Transpose", ["d"], "b", perm=[0, 1, 3, 5, 2, 4]),
        node("Reshape", ["b", "four"], "y"),
    ]
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 2, 4, 4])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 8, 2, 2])
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y], held))
    model = onnx.shape_inference.infer_shapes(model)
    assert blocks_as_depth(ir.from_proto(model).graph) == 0
