"""A float operator between q/dq, and what the integer forms write for it."""

import torch
from torch import Tensor, nn
from torch.export import export
from torch.nn import functional

from pt2e_quant.core.integer_ops.profiles import DEFAULT
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor, is_dequantize, is_quantize
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize
from pt2e_quant.passes.reference.forms.site import Arithmetic
from pt2e_quant.passes.reference.write_integers import write_integers

LIMITS = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int16: (-32768, 32767)}


def qp(scale, zero_point, dtype=torch.int8):
    return (scale, zero_point, *LIMITS[dtype], dtype)


A, B, Y = qp(0.031, 5), qp(0.017, -9), qp(0.05, 3)


class Between(nn.Module):
    def __init__(self, operator, inputs, output) -> None:
        super().__init__()
        self.operator, self.inputs, self.output = operator, inputs, output

    def forward(self, *xs: Tensor) -> Tensor:
        reals = [DequantizePerTensor(x, *qp) for x, qp in zip(xs, self.inputs, strict=False)]
        y = self.operator(*reals, *xs[len(self.inputs) :])
        return y if self.output is None else QuantizePerTensor(y, *self.output)


class Slopes(Between):
    """A prelu between q/dq."""

    def __init__(self, weight: Tensor, inputs=A, output=Y) -> None:
        super().__init__(lambda x: functional.prelu(x, self.weight), [inputs], output)
        self.weight = nn.Parameter(weight)


def integers(shape, parameters, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(parameters[2], parameters[3] + 1, shape, generator=generator)
    return values.to(parameters[4])


def written(model, *inputs, profile=DEFAULT, bits=32, shapes=None):
    program = export(model.eval(), inputs, dynamic_shapes=shapes)
    before, after = program.module(), program.module()
    arithmetic = Arithmetic(profile, bits)
    records = run_passes(after, (strip_guards, duplicate_dequantize, write_integers(arithmetic)))
    notes = [note for record in records for note in record.notes]
    return before, after, notes


def steps_apart(model, *inputs, **options):
    """The greatest difference in output steps; the graph has no q/dq left."""
    before, after, notes = written(model, *inputs, **options)
    assert [n.text for n in notes if n.skipped] == []
    assert not [n for n in after.graph.nodes if is_quantize(n) or is_dequantize(n)]
    with torch.no_grad():
        expected, found = before(*inputs), after(*inputs)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    return (found.double() - expected.double()).abs().max().item()


IMAGE = (2, 4, 9, 7)
