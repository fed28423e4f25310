"""The statistics of a whole model's observers, taken out of it and put back."""

from collections import OrderedDict
from typing import Any

from torch import nn

from pt2e_quant.core.errors import ConfigError

__all__ = ["get_observer_state_dict", "load_observer_state_dict"]

_NAME = "activation_post_process"


def get_observer_state_dict(mod: nn.Module) -> "OrderedDict[str, Any]":
    """The entries of the state dict that belong to observers."""
    state = mod.state_dict()
    found = OrderedDict((key, value) for key, value in state.items() if _NAME in key)
    # Versions of observers stand in it; load needs them.
    found._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]  # torch's own place for it
    return found


def load_observer_state_dict(mod: nn.Module, obs_dict: dict[str, Any]) -> None:
    """Load what `get_observer_state_dict` gave into the observers of a model.

    Raises:
        ConfigError: an entry is missing or belongs to no observer of the model.
    """
    versions = getattr(obs_dict, "_metadata", None) or {}
    state = dict(obs_dict)
    missing: list[str] = []
    errors: list[str] = []
    wanted: set[str] = set()
    for name, module in mod.named_modules():
        if _NAME not in name:
            continue
        prefix = name + "."
        module._load_from_state_dict(
            state, prefix, versions.get(name, {}), True, missing, [], errors
        )
        own = module.state_dict(prefix=prefix)
        wanted.update(own)
    # A buffer that is not persistent, or an eps that older states lack, is not asked for.
    absent = sorted({key for key in missing if key in wanted})
    unexpected = sorted(key for key in state if key not in wanted)
    problems = [f"missing: {', '.join(absent)}"] if absent else []
    problems += [f"unexpected: {', '.join(unexpected)}"] if unexpected else []
    problems += errors
    if problems:
        raise ConfigError(
            f"the observers' state does not fit this model: {'; '.join(problems)}",
            fix="prepare the model with the same quantizer that the state was taken under",
        )
