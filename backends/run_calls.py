"""One call of an artifact for a check: copies of the inputs in, named results out."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.compare_results import Results, name_results
from pt2e_quant.backends.sample_run import copied_leaves

BUFFER = "buffer "
"""The prefix of written buffers among the named results of a call."""


def run_artifact(artifact: Artifact, leaves: Sequence[Any]) -> Results:
    """The results of an artifact at one call, and the buffers that it shows."""
    found = list(artifact.run_leaves(copied_leaves(leaves)))
    state = artifact.state()
    return name_results(artifact.capture, copied_leaves(found) if state else found) | state_results(
        state
    )


def state_results(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Buffers as results of a call, copied."""
    return {f"{BUFFER}{name}": value.detach().clone() for name, value in state.items()}
