"""Loading an optimizer's state dict without torch's cast of states to their parameter's dtype."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


def load_exactly(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Give states the dtypes of a state dict, after `Optimizer.load_state_dict`.

    Args:
        optimizer: what the state dict was loaded into.
        state_dict: as it was loaded.
    """
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, param in zip(saved, params, strict=True):
        for name, value in state_dict["state"].get(key, {}).items():
            if isinstance(value, Tensor) and value.dtype != optimizer.state[param][name].dtype:
                device = torch.device("cpu") if name == "step" else param.device
                optimizer.state[param][name] = value.detach().to(device, copy=True)
