"""When observers stop, batch norms freeze, ranges are learned and integers start, by step."""

from typing import Any

from torch import nn

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.flow.qat.numerics import numerics_switches, start_integers
from pt2e_quant.observers.training.fake_quantize import disable_observer
from pt2e_quant.observers.training.learnable_fake_quantize import enable_range_learning
from pt2e_quant.passes.batch_norm.trained_batch_norm import freeze_bn_stats


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
        """What a checkpoint keeps: the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint: what was frozen then is frozen again."""
        self.steps = int(state["steps"])
        for after, action in self.due:
            if after is not None and after <= self.steps:
                self.model.apply(action)
