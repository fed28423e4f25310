"""Programs to run passes on: exported, without guards, checked against the eager model."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pt2e_quant.core.schemes import BIAS_INT32, INT8_ACTIVATION, INT8_WEIGHT, Role, Scheme
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_captured, prepare_pt2e
from pt2e_quant.graph.op_table import OUT, OpRow, OpTable, Slot
from pt2e_quant.graph.ops import LINEAR
from pt2e_quant.graph.pattern import Op, Var
from pt2e_quant.graph.pipeline import GraphPass, PassRecord, PassResult, run_passes
from pt2e_quant.graph.show import show
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver
from pt2e_quant.passes.algorithms.algorithm import Algorithm, as_pass, take_statistics
from pt2e_quant.passes.cleanup.strip_guards import strip_guards


class Program:
    """A model exported for inference, and what passes made of it.

    Rounding of folded constants and reordered sums: at most 1e-5 of values around one.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        dynamic_shapes: Any = None,
        *,
        train: bool = False,
    ) -> None:
        self.model = model.train(train)
        self.args = tuple(args)
        self.state = copy.deepcopy(model.state_dict())
        program = torch.export.export(self.model, self.args, dynamic_shapes=dynamic_shapes)
        self.gm = program.module()
        self.records: list[PassRecord] = []
        strip_guards(self.gm)

    def apply(self, *passes: GraphPass, keeps_outputs: bool = True) -> "Program":
        """Run passes, verified between entries; outputs too but where passes are to move them."""
        sample = (self.args, {}) if keeps_outputs else None
        self.records += run_passes(self.gm, passes, verify=True, sample=sample)
        return self

    @property
    def text(self) -> str:
        return show(self.gm)

    def shows(self, text: str) -> "Program":
        assert self.text == dedent(text).lstrip("\n")
        return self

    @property
    def skips(self) -> list[str]:
        return [n.text for r in self.records for n in r.notes if n.skipped]

    @property
    def changed(self) -> bool:
        return any(r.changed for r in self.records)

    def matches(self, *others: Sequence[Any], rtol: float = 1e-5, atol: float = 1e-5) -> "Program":
        """Hold the program against the eager model on the sample and on other inputs."""
        for args in (self.args, *others):
            expected = copy.deepcopy(self.model)(*pytree.tree_map(torch.clone, args))
            found = copy.deepcopy(self.gm)(*pytree.tree_map(torch.clone, args))
            for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True):
                torch.testing.assert_close(b, a, rtol=rtol, atol=atol)
        return self

    def is_idempotent(self, *passes: GraphPass) -> "Program":
        """A second run changes nothing."""
        before = self.text
        for entry in passes:
            assert not entry(self.gm).changed, entry.name
        assert self.text == before
        return self

    def leaves_model_alone(self) -> "Program":
        """The user's tensors hold what they held."""
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, self.state[name]), name
        return self

    def targets(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for node in self.gm.graph.nodes:
            if node.op == "call_function":
                found[str(node.target)] = found.get(str(node.target), 0) + 1
        return found


@pytest.fixture
def program() -> Callable[..., Program]:
    torch.manual_seed(0)
    return Program


@pytest.fixture
def settled() -> Callable[[nn.Module, torch.Tensor], nn.Module]:
    """Gives batch norms statistics, weights and biases that are not trivial."""

    def settle(model: nn.Module, x: torch.Tensor) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias)
        model.train()
        with torch.no_grad():
            for _ in range(3):
                model(x + 0.5)
        return model.eval()

    return settle


@pytest.fixture
def calibrated() -> Callable[..., torch.fx.GraphModule]:
    """Prepares a model's linears for int8 with algorithms, and runs batches through it."""

    def prepare(
        model: nn.Module,
        batches: Sequence[torch.Tensor],
        *,
        outputs: bool = False,
        biases: bool = False,
        observer: type[nn.Module] = PredictedRangeObserver,
        algorithms: Sequence[Algorithm] = (),
    ) -> torch.fx.GraphModule:
        slots = [
            Slot(at="x", role=Role.INPUT, accepts=(INT8_ACTIVATION,)),
            Slot(at="w", role=Role.WEIGHT, accepts=(INT8_WEIGHT,)),
        ]
        if outputs:
            slots.append(Slot(at=OUT, role=Role.OUTPUT, accepts=(INT8_ACTIVATION,)))
        if biases:
            slots.append(
                Slot(at="b", role=Role.BIAS, accepts=(BIAS_INT32,), derived_from=("x", "w"))
            )
        find = (Op(LINEAR, Var("x"), Var("w"), Var("b"), name="linear"),)
        row = OpRow(name="linear", find=find, slots=tuple(slots), lowers_to="linear")
        scheme = Scheme(
            name="int8",
            input=INT8_ACTIVATION,
            output=INT8_ACTIVATION,
            weight=INT8_WEIGHT,
            bias=BIAS_INT32,
        )
        quantizer = TableQuantizer(
            OpTable(backend="Plain", rows=(row,)),
            scheme,
            observers=ObserverChoice(activation=observer),
            algorithms=algorithms,
        )
        gm = torch.export.export(model.eval(), (batches[0],)).module()
        prepared = prepare_captured(gm, quantizer, strict=True, observe_constants=True)
        return calibrate(prepared, [(b,) for b in batches], progress=False)

    return prepare


@pytest.fixture
def applied() -> Callable[[torch.fx.GraphModule, Algorithm], PassResult]:
    """Runs an algorithm on a calibrated graph, as convert does."""

    def apply(gm: torch.fx.GraphModule, algorithm: Algorithm) -> PassResult:
        return as_pass(algorithm, take_statistics(gm, [algorithm]))(gm)

    return apply


@pytest.fixture
def calibrated_in_four_bits(plain_backend: Any) -> Callable[..., torch.fx.GraphModule]:
    """Prepares a model with weights of 4 bits and runs one batch through it."""

    def prepare(model: nn.Module, x: torch.Tensor) -> torch.fx.GraphModule:
        weight = replace(INT8_WEIGHT, quant_min=-8, quant_max=7)
        scheme = Scheme(name="w4", input=INT8_ACTIVATION, output=INT8_ACTIVATION, weight=weight)
        quantizer = plain_backend.quantizer().set_global(scheme)
        program = torch.export.export(model.eval(), (x,))
        return calibrate(prepare_pt2e(program, quantizer), [(x,)], progress=False)

    return prepare
