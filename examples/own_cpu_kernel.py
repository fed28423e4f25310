"""Bring a kernel of your own: a global average pool that the CPU backend runs on integers.

Run `python examples/own_cpu_kernel.py`. The package leaves average pools in float. Here an operator
that sums uint8 is declared once, as a row of an op table with what builds its call; quantizer,
lowering, report and profiler then know it like the package's own.
"""

import torch
from torch import Tensor, nn
from torch.fx import Node

import pt2e_quant as pq
from pt2e_quant.core.schemes import UINT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import Constraint, OpRow, Slot
from pt2e_quant.graph.ops import argument
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantized_values import affine_of
from pt2e_quant.kernels.site import Site


@torch.library.custom_op("example::pool_uint8", mutates_args=())
def pool_uint8(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Mean over H and W of uint8[N, C, H, W], as float32[N, C, 1, 1]."""
    total = x.sum((2, 3), dtype=torch.int32, keepdim=True)  # exact: up to 2 ** 23 places
    return (total / (x.shape[2] * x.shape[3]) - zero_point) * scale


@pool_uint8.register_fake
def fake(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Shape and dtype, for export and torch.compile."""
    return x.new_empty((*x.shape[:2], 1, 1), dtype=torch.float32)


def build(site: Site) -> Node:
    """The call: the integers behind the dequantize, and their qparams."""
    affine = affine_of(site.match["x"])
    pool = site.match.anchor
    return site.editor.call(
        torch.ops.example.pool_uint8.default,
        site.integers("x"),
        affine.scale,
        affine.zero_point,
        like=pool,
        before=site.place,
        val=pool.meta["val"],
    )


def pools_all(match: Match) -> bool:
    """Whether one value a channel is asked for."""
    return list(argument(match.anchor, "output_size")) == [1, 1]


def cost(node: Node) -> Cost:
    """One addition for each integer."""
    x = node.args[0].meta["val"]
    return Cost(bytes=moved_bytes(x, node.meta["val"]), operations=x.numel())


POOL = Kernel(
    row=OpRow(
        name="global_average_pool",
        find=(Op(ops.ADAPTIVE_AVG_POOL2D, Var("x"), name="op"),),
        slots=(Slot(at="x", role=Role.INPUT, accepts=(UINT8_ACTIVATION,)),),
        constraints=(Constraint(text="an output of one by one", holds=pools_all),),
        lowers_to="example::pool_uint8",
    ),
    device=Device.CPU,
    op="pool_uint8",
    build=build,
    shape_class=lambda match: "any",
    cost=cost,
)


def main() -> None:
    """Quantize, lower and profile a small CNN with the kernel in use."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)).eval()
    x = torch.randn(1, 3, 32, 32)

    backend = pq.backends.get("cpu").with_kernels(POOL)
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), backend.quantizer())
    pq.calibrate(prepared, [(x,)], progress=False)
    artifact = backend.lower(pq.convert_pt2e(prepared))

    print(artifact.report.integer_ops)
    print(artifact.profile(x))
    assert artifact.report.integer_ops["example.pool_uint8"] == 1
    with torch.no_grad():
        print("largest difference from float:", (artifact.run(x) - model(x)).abs().max().item())


if __name__ == "__main__":
    main()
