"""Names to algorithms; third parties add theirs by the entry point group pt2e_quant.algorithms."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points

from pt2e_quant.core.effort import Effort
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.passes.algorithms.adaround import AdaRound
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Stage
from pt2e_quant.passes.algorithms.auto_round import AutoRound
from pt2e_quant.passes.algorithms.awq import Awq
from pt2e_quant.passes.algorithms.balance_channels import BalanceChannels
from pt2e_quant.passes.algorithms.batch_norm_reestimation import BatchNormReestimation
from pt2e_quant.passes.algorithms.bias_correction import (
    LEAST_SAMPLES,
    AnalyticBiasCorrection,
    BiasCorrection,
)
from pt2e_quant.passes.algorithms.block_gptq import BlockGptq
from pt2e_quant.passes.algorithms.choose_ranges import ChooseRanges
from pt2e_quant.passes.algorithms.confirm_weights import ConfirmWeights
from pt2e_quant.passes.algorithms.cross_layer_equalization import CrossLayerEqualization
from pt2e_quant.passes.algorithms.gptq import Gptq
from pt2e_quant.passes.algorithms.hqq import Hqq
from pt2e_quant.passes.algorithms.keep_float import KeepFloat
from pt2e_quant.passes.algorithms.low_rank import LowRank
from pt2e_quant.passes.algorithms.lwc import Lwc
from pt2e_quant.passes.algorithms.outlier_channel_splitting import OutlierChannelSplitting
from pt2e_quant.passes.algorithms.own_ranges import OwnRanges
from pt2e_quant.passes.algorithms.pair_sums import PairCodes, PairScales
from pt2e_quant.passes.algorithms.quarot import QuaRot
from pt2e_quant.passes.algorithms.run_time_scales import RunTimeScales
from pt2e_quant.passes.algorithms.saturation_limits import SaturationLimits
from pt2e_quant.passes.algorithms.scale_outputs import ScaleOutputs
from pt2e_quant.passes.algorithms.sequential_mse import SequentialMse
from pt2e_quant.passes.algorithms.smooth_quant import SmoothQuant

_GROUP = "pt2e_quant.algorithms"
_OWN: dict[str, type[Algorithm]] = {
    made.name: made
    for made in (
        AdaRound,
        AnalyticBiasCorrection,
        AutoRound,
        Awq,
        BalanceChannels,
        BatchNormReestimation,
        BiasCorrection,
        BlockGptq,
        CrossLayerEqualization,
        ChooseRanges,
        ConfirmWeights,
        Gptq,
        Hqq,
        KeepFloat,
        LowRank,
        Lwc,
        OutlierChannelSplitting,
        OwnRanges,
        PairCodes,
        PairScales,
        QuaRot,
        RunTimeScales,
        SaturationLimits,
        ScaleOutputs,
        SequentialMse,
        SmoothQuant,
    )
}
OWN_NAMES = tuple(sorted(_OWN))
"""Names of the algorithms of this package."""
_CAREFUL = BiasCorrection(least_samples=LEAST_SAMPLES)
_ADDED: dict[Effort, tuple[Algorithm, ...]] = {
    Effort.BALANCED: (BlockGptq(), _CAREFUL),
    Effort.BEST: (Gptq(), BatchNormReestimation(), _CAREFUL, ConfirmWeights()),
}
"""The algorithms that efforts add for weights and biases."""
_CHOSEN_ONCE = {Stage.SCALES: "scales", Stage.CODES: "integers"}


def names() -> tuple[str, ...]:
    """The algorithms there are, sorted."""
    return tuple(sorted({*_OWN, *(entry.name for entry in entry_points(group=_GROUP))}))


def algorithm_named(given: str | Algorithm) -> Algorithm:
    """The algorithm of a name, with the settings of its paper; an algorithm itself as it is.

    Raises:
        ConfigError: there is none; near names are offered.
    """
    if isinstance(given, Algorithm):
        return given
    found = _OWN.get(given)
    if found is None:
        for entry in entry_points(group=_GROUP, name=given):
            found = entry.load()
            break
        else:
            raise ConfigError(f'there is no algorithm "{given}": {near(given, names())}')
    made: object = found()
    if not isinstance(made, Algorithm):
        raise ConfigError(f'the entry point of algorithm "{given}" makes no Algorithm: {made!r}')
    return made


@dataclass(frozen=True, slots=True)
class Description:
    """One algorithm in words.

    Args:
        name: as `algorithms=[…]` takes it.
        what: what it does, one sentence.
        stage: when it runs.
        data: what it needs of calibration.
        fits: what it applies to.
        paper: where it is from.
    """

    name: str
    what: str
    stage: str
    data: str
    fits: str
    paper: str


def descriptions() -> tuple[Description, ...]:
    """All algorithms that there are, in the order of their stages."""
    found = sorted(map(algorithm_named, names()), key=lambda made: (made.stage, made.name))
    return tuple(map(_described, found))


def _described(algorithm: Algorithm) -> Description:
    data = "none"
    if algorithm.needs_calls:
        data = "a sample of its calls, run again in float and quantized"
    elif algorithm.needs_data:
        data = "statistics"
    return Description(
        algorithm.name,
        (type(algorithm).__doc__ or "").partition("\n")[0],
        algorithm.stage.name.lower(),
        data,
        algorithm.fits,
        algorithm.paper,
    )


def combined(there: Iterable[Algorithm], asked: Sequence[str | Algorithm]) -> tuple[Algorithm, ...]:
    """Algorithms with others added, in the order they run.

    One that is asked for replaces one of the same name, and one that chooses the integers of
    weights replaces a recipe's own choice of them. They run by stage.

    Raises:
        ConfigError: a name is unknown, or two of them choose the same thing.
    """
    chosen = {algorithm.name: algorithm for algorithm in there}
    chosen |= {made.name: made for made in map(algorithm_named, asked)}
    if any(a.stage is Stage.CODES and not a.is_left_to_data for a in chosen.values()):
        left = [n for n, a in chosen.items() if a.stage is Stage.CODES and a.is_left_to_data]
        chosen = {name: a for name, a in chosen.items() if name not in left}
    for stage, what in _CHOSEN_ONCE.items():
        rivals = [name for name, algorithm in chosen.items() if algorithm.stage is stage]
        if len(rivals) > 1:
            raise ConfigError(
                f"{' and '.join(rivals)} both choose the {what} of weights: the second would undo "
                "the first",
                fix=f'keep one: algorithms=["{rivals[0]}"]',
            )
    # Bias correction takes what the other corrections leave; they start from the float biases.
    return tuple(sorted(chosen.values(), key=lambda a: (a.stage, isinstance(a, BiasCorrection))))


def with_effort(
    own: Sequence[Algorithm], asked: Sequence[str | Algorithm], effort: Effort | None
) -> tuple[tuple[Algorithm, ...], tuple[str | Algorithm, ...]]:
    """The quantizer's algorithms and those asked for, after an effort added or left out some.

    Args:
        own: the quantizer's algorithms.
        asked: algorithms or their names.
        effort: FAST leaves out a recipe's choices of ranges, of the integers of weights, of layers
            to leave float and of biases, BALANCED asks for all of them, BEST brings what takes
            longer to choose integers and corrects errors, where nothing else that does was asked
            for, and has the change confirmed; None changes nothing.
    """
    if effort is None:
        return tuple(own), tuple(asked)
    kept = tuple(a for a in own if a.name != ChooseRanges.name and not a.is_left_to_data)
    if effort is Effort.FAST:
        return kept, tuple(asked)
    # It is a recipe's alone: who annotated for another quantizer may not expect it.
    left = (a for a in own if isinstance(a, KeepFloat) and a.is_left_to_data)
    kept = (*kept, *(replace(a, any_observer=True) for a in left))
    named = [algorithm_named(given) for given in asked]
    there = named if effort is Effort.BEST else [*named, *kept]
    taken, names = {a.stage for a in there}, {a.name for a in (*named, *kept)}
    # What is left of mean errors can be corrected behind any other correction.
    added = (
        a
        for a in _ADDED[effort]
        if (a.name not in names if isinstance(a, BiasCorrection) else a.stage not in taken)
    )
    return (*kept, *added), (*asked, ChooseRanges())
