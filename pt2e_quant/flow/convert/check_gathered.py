"""Refuse algorithms whose calibration data was none, or not finite."""

from pt2e_quant.core.errors import CalibrationError
from pt2e_quant.flow.prepare.prepared import PreparedState
from pt2e_quant.passes.algorithms.algorithm_graph import Gathered


def check_gathered(state: PreparedState, gathered: Gathered) -> None:
    """Refuse an algorithm that was asked for and was given no data, or none that is finite."""
    for (name, node, _), statistics in gathered.statistics.items():
        if name in state.asked_algorithms and not statistics.is_finite:
            raise CalibrationError(
                f"NaN or infinity in what {name} gathered of the calibration data",
                node=node,
                fix="find the batch or operator that makes it; algorithms need finite values",
            )
    seen = {key[0] for key, statistics in gathered.statistics.items() if statistics.seen}
    for name, node, _ in gathered.statistics:
        if name in state.asked_algorithms and name not in seen:
            raise CalibrationError(
                f"{name} needs calibration data, and its operators got none",
                node=node,
                fix="calibrate(prepared, batches) before convert_pt2e, also where the recipe "
                f"needs no data itself; or leave {name} out",
            )
