"""Write a backend: linear, conv2d and add in int8, by kernels that are Python functions.

docs/how_to/add_a_backend.md explains the parts.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import pt2e_quant as pq
from pt2e_quant.backends.edited_copy import edited_copy
from pt2e_quant.backends.module_artifact import ModuleArtifact
from pt2e_quant.backends.program_file import StoredProgram, read_program, write_program
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.backends.target.lower import Draft, Lowering, Options
from pt2e_quant.backends.target.recipe import Recipe, Recipes
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Role, Scheme
from pt2e_quant.flow.report.report import Report
from pt2e_quant.graph.op_table import OUT, Constraint, OpRow, OpTable, Slot
from pt2e_quant.graph.ops import ADD, CONV2D, LINEAR
from pt2e_quant.graph.pattern import Match, Op, Var, find_matches
from pt2e_quant.graph.pipeline import PassResult, Validation, graph_pass
from pt2e_quant.kernels.quantized_values import requantized

X, Y, W, B = Var("x"), Var("y"), Var("w"), Var("b")
WEIGHT = Slot(at="w", role=Role.WEIGHT, accepts=(INT8_WEIGHT,))
RESULT = Slot(at=OUT, role=Role.OUTPUT, accepts=(INT8_ACTIVATION,))
UNSCALED = Constraint(text="alpha == 1", holds=lambda match: match.arg("op", "alpha") == 1)


def entry(name: str, op: Op, inputs: str, *needs: Constraint) -> OpRow:
    """An op-table entry."""
    slots = [Slot(at=at, role=Role.INPUT, accepts=(INT8_ACTIVATION,)) for at in inputs]
    slots += [WEIGHT] if W in op.args else []
    return OpRow(name=name, find=(op,), slots=(*slots, RESULT), constraints=needs, lowers_to="toy")


TABLE = OpTable(
    backend="Toy",
    rows=(
        entry("linear", Op(LINEAR, X, W, B, name="op"), "x"),
        entry("conv2d", Op(CONV2D, X, W, B, name="op"), "x"),
        entry("add", Op(ADD, X, Y, name="op"), "xy", UNSCALED),
    ),
)
INT8 = Scheme(name="int8", input=INT8_ACTIVATION, output=INT8_ACTIVATION, weight=INT8_WEIGHT)
RECIPES = Recipes("Toy", (Recipe(name="int8", text="static int8, min-max ranges", scheme=INT8),))


def rounded(real: Tensor, scale: float, zero_point: int) -> Tensor:
    """Real numbers as int8."""
    return (real / scale).round().add(zero_point).clamp(-128, 127).to(torch.int8)


def toy_product(
    op: Any, x: Tensor, x_qp: Any, w: Tensor, w_scale: Tensor, bias: Tensor, more: Any, out: Any
) -> Tensor:
    """A linear or convolution of int8 tensors: float64 holds its integer sums exactly."""
    total = op((x.double() - x_qp[1]), w.double(), None, *more)
    shape = (-1, *[1] * (w.dim() - 2))
    total = total * (w_scale.view(shape) * x_qp[0])
    return rounded(total if bias is None else total + bias.view(shape), *out)


def toy_add(x: Tensor, x_qp: Any, y: Tensor, y_qp: Any, out: Any) -> Tensor:
    """A sum of int8 tensors."""
    return rounded((x.double() - x_qp[1]) * x_qp[0] + (y.double() - y_qp[1]) * y_qp[0], *out)


@graph_pass(needs=(), gives=())
def use_kernels(gm: GraphModule) -> PassResult:
    """Replace dequantize → operator → quantize by one kernel."""

    def fits(row: OpRow, match: Match) -> bool:
        operands = [match[slot.at] for slot in row.slots if slot.at != OUT]
        return (
            all(map(is_dequantize, operands))
            and row.refusal(match) is None
            and requantized(match.anchor) is not None
        )

    matches = find_matches(gm.graph, TABLE.patterns(), fits)
    for _, match in matches:
        x, op = match.node("x"), match.anchor
        out, quantizes = requantized(op)
        result = out.scale, out.zero_point
        with gm.graph.inserting_before(op):
            if "y" in match.values:
                y = match.node("y")
                arguments = (x.args[0], x.args[1:3], y.args[0], y.args[1:3], result)
                made = gm.graph.call_function(toy_add, arguments)
            else:
                weight, scale = match.node("w").args[:2]
                operands = (x.args[0], x.args[1:3], weight, scale, match["b"], op.args[3:], result)
                made = gm.graph.call_function(toy_product, (op.target, *operands))
        made.meta["val"] = quantizes[0].meta["val"]
        for quantize in quantizes:
            quantize.replace_all_uses_with(made)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return PassResult(changed=bool(matches))


def assemble(stored: StoredProgram, validation: Validation | None = None) -> ModuleArtifact:
    """The program of a stored canonical graph, with its report."""
    gm = edited_copy(stored.gm, (use_kernels,), validation=validation)
    report = Report(backend="Toy", provenance=provenance_of(gm), size_bytes=len(stored.data))
    calls = [n.target for n in gm.graph.nodes if n.target in (toy_product, toy_add)]
    report.integer_ops = {call.__name__: calls.count(call) for call in calls}
    return ModuleArtifact(gm, stored.data, capture_of(gm), report)


LOWERING = Lowering(
    name="toy",
    options=Options,
    emit=lambda job: Draft(artifact=assemble(write_program(job.gm, "toy"), job.validation)),
    load=lambda path: assemble(read_program(path, "toy", ".toy")),
)
TOY = Backend(name="toy", suffix=".toy", table=TABLE, recipes=RECIPES, lowering=lambda: LOWERING)


class Residual(nn.Module):
    """A block with a shortcut, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """float32[N, 3, H, W] to float32[N, 4]."""
        x = self.first(x)
        return self.last((x + self.second(x)).mean((2, 3)))


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    artifact = pq.quantize(Residual(), (x,), calibration_data=[x], backend=TOY)
    artifact.save("residual.toy")
    assert torch.equal(TOY.load("residual.toy").run(x), artifact.run(x))
    Path("residual.toy").unlink()
    print(artifact.report)
