"""The arithmetic in which a prepared graph trains, and schedules by step."""

from collections.abc import Iterable
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.fx import GraphModule

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.core.errors import ConfigError, module_path, near
from pt2e_quant.core.integer_ops.profiles import Profile, profile_named
from pt2e_quant.flow.prepare.prepared import PREPARED_KEY, prepared_state
from pt2e_quant.observers.training.fake_quantize import disable_observer
from pt2e_quant.observers.training.learnable_fake_quantize import enable_range_learning
from pt2e_quant.passes.batch_norm.trained_batch_norm import freeze_bn_stats
from pt2e_quant.passes.reference.forms.site import Arithmetic
from pt2e_quant.passes.reference.integer_forward import IntegerForward, insert_integer_forwards
from pt2e_quant.passes.reference.integer_regions import with_arithmetic


class Numerics(StrEnum):
    """The arithmetic of a quantized operator in the forward pass of training."""

    FAKE_QUANT = "fake_quant"
    """In float, between fake-quantizes."""
    INTEGER = "integer"
    """In exact integers, as the integer reference of the converted graph; gradients are those of
    the float operator at the same values."""


def set_numerics(
    model: nn.Module,
    numerics: Numerics | str,
    *,
    nodes: Iterable[str] | None = None,
    profile: Profile | str | None = None,
    accumulator_bits: int | None = None,
) -> tuple[str, ...]:
    """Let operators of a prepared graph train in integers, or in fake-quantized float.

    A fake-quantize of a real value (an input, the result of a float operator) is one of them: it
    divides by the scale where the target does.

    Convert gives the same graph in either case. An operator without an integer form trains in
    float; so does one with a batch norm behind it until that keeps its statistics
    (`freeze_bn_stats`, `QatSchedule(freeze_bn_after=…)`), and one that reads a dropout while that
    drops; in `eval()` both compute in integers.

    Args:
        model: of `prepare_qat_pt2e`, or a module around it (DistributedDataParallel, compiled).
        numerics: "integer" or "fake_quant".
        nodes: names of nodes, or paths of the modules they come from, with wildcards; all if
            None.
        profile: how the target rounds, or its name, as `integer_reference` takes it; None keeps
            what the operators have, at first that function's default.
        accumulator_bits: 32, or 64 where sums of products may be longer than int32 holds; None
            keeps what the operators have, at first 32.

    Returns:
        The names of the operators whose arithmetic is now that.

    Raises:
        ConfigError: the model was not prepared for training, a name stands for no operator that
            has an integer form, no operator has one, no profile has that name, or accumulators
            have other bits.
    """
    chosen = _numerics_named(numerics)
    target = None if profile is None else profile_named(profile)
    if accumulator_bits is not None:
        Arithmetic(accumulator_bits=accumulator_bits)  # refuses others
    is_plain = nodes is None and target is None and accumulator_bits is None
    if is_plain and chosen is Numerics.FAKE_QUANT:
        found = {name: module for name, module, _ in numerics_switches(model)}
    else:
        found = _chosen(model, nodes)
    for module in found.values():
        module.is_on = chosen is Numerics.INTEGER
        module.region = with_arithmetic(module.region, target, accumulator_bits)
    return tuple(found)


def numerics_of(model: nn.Module) -> dict[str, Numerics]:
    """The arithmetic of each operator that has been given one with `set_numerics`, by its name.

    Args:
        model: of `prepare_qat_pt2e`, or a module around it.
    """
    return {
        name: Numerics.INTEGER if module.is_on else Numerics.FAKE_QUANT
        for name, module, _ in numerics_switches(model)
    }


def start_integers(mod: nn.Module) -> None:
    """Let an operator train in integers; for `model.apply`, other modules stay as they are."""
    if isinstance(mod, IntegerForward):
        mod.is_on = True


def _numerics_named(name: str) -> Numerics:
    if name not in set(Numerics):
        raise ConfigError(
            f'numerics "{name}" is unknown: {near(name, [n.value for n in Numerics])}'
        )
    return Numerics(name)


def _chosen(model: nn.Module, nodes: Iterable[str] | None) -> dict[str, IntegerForward]:
    known = numerics_switches(model, inserts=True)
    if nodes is None:
        return {name: module for name, module, _ in known}
    found: dict[str, IntegerForward] = {}
    for pattern in [nodes] if isinstance(nodes, str) else nodes:
        matched = {
            name: module
            for name, module, path in known
            if fnmatchcase(name, pattern) or (path and fnmatchcase(path, pattern))
        }
        if not matched:
            names = [n for name, _, path in known for n in (name, path)]
            raise ConfigError(
                f'"{pattern}" is no operator with an integer form: {near(pattern, names)}'
            )
        found |= matched
    return found


def numerics_switches(
    model: nn.Module, *, inserts: bool = False
) -> list[tuple[str, IntegerForward, str]]:
    """Name, switch and module path of each operator with an integer form, in graph order.

    Args:
        model: of `prepare_qat_pt2e`, or a module around it.
        inserts: put the switches into a graph that has none yet, all of them off.

    Raises:
        ConfigError: the model was not prepared for training, or it is to have switches and no
            operator has an integer form.
    """
    gm = _prepared(model)
    if inserts and not any(isinstance(m, IntegerForward) for m in gm.children()):
        if not insert_integer_forwards(gm):
            raise ConfigError(
                "no operator of this graph has an integer form",
                fix="quantize operators with static, per-tensor activations",
            )
        recompile(gm)
    called = ((n, gm.get_submodule(str(n.target))) for n in gm.graph.nodes if n.op == "call_module")
    return [(m.name, m, module_path(n)) for n, m in called if isinstance(m, IntegerForward)]


def _prepared(model: nn.Module) -> GraphModule:
    """The prepared graph in a module.

    Raises:
        ConfigError: there is none, or it is not for training through integers.
    """
    for module in model.modules():
        if isinstance(module, GraphModule) and PREPARED_KEY in module.meta:
            state = prepared_state(module)
            if state.is_qat and not state.as_torchao:
                return module
    raise ConfigError(
        "there is no graph here that was prepared for training",
        fix="prepared = pq.prepare_qat_pt2e(torch.export.export(model, inputs), quantizer)",
    )


class QatSchedule:
    """Freezes parts of a prepared model as training goes on; call `step` after each batch.

    Statistics that move to the end leave the last weights to ranges and means they have not seen
    (R. Krishnamoorthi, arXiv:1806.08342, section 3.2.2). With frozen batch norms training computes
    what inference will.

    Args:
        model: of `prepare_qat_pt2e`, or a module around it (DistributedDataParallel, compiled).
        freeze_observers_after: steps after which ranges stay; None never.
        freeze_bn_after: steps after which batch norms keep their statistics; None never.
        learn_ranges_after: steps after which LearnableFakeQuantize trains its scale; None never.
            At least one, for its first values; make the optimizer after that step.
        integer_after: steps after which the forward pass is in integers, see `set_numerics`; None
            never. Freeze batch norms by then: until they are, what they follow trains in float.

    Raises:
        ConfigError: a number of steps is negative, or ranges are to be learned from no data.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        freeze_observers_after: int | None = None,
        freeze_bn_after: int | None = None,
        learn_ranges_after: int | None = None,
        integer_after: int | None = None,
    ) -> None:
        for steps in (freeze_observers_after, freeze_bn_after, integer_after):
            if steps is not None and steps < 0:
                raise ConfigError(f"a number of steps cannot be {steps}")
        if learn_ranges_after is not None and learn_ranges_after < 1:
            raise ConfigError("ranges are learned from the values that a first step gives them")
        self.model = model
        self.due = (
            (freeze_observers_after, disable_observer),
            (freeze_bn_after, freeze_bn_stats),
            (learn_ranges_after, enable_range_learning),
            (integer_after, start_integers),
        )
        if integer_after is not None:
            # Now, before the graph is compiled: what is due later only switches.
            numerics_switches(model, inserts=True)
        self.steps = 0
        self._apply(self.steps)

    def step(self) -> None:
        """Count a training step, and freeze what is due after it."""
        self.steps += 1
        self._apply(self.steps)

    def _apply(self, steps: int) -> None:
        for after, action in self.due:
            if after == steps:
                self.model.apply(action)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint: what was frozen then is frozen again."""
        self.steps = int(state["steps"])
        for after, action in self.due:
            if after is not None and after <= self.steps:
                self.model.apply(action)
