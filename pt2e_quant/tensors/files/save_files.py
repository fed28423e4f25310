"""Quantized modules in safetensors files: codes and scales under the weights' names, and a header.

A weight `layer.weight` is kept as `layer.weight.packed` (or `.codes`), `layer.weight.scale`, and
so on; what they are is in the file's metadata, one line of JSON for each weight. Layouts of one
machine are unpacked first.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from pt2e_quant.core.arguments import check_module, check_type
from pt2e_quant.core.errors import ArtifactError, ConfigError
from pt2e_quant.tensors.form import form_from_text, form_to_text
from pt2e_quant.tensors.kernels.choose_layout import best_layout
from pt2e_quant.tensors.layouts.table import layout_named
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor, portable_form

KEY = "pt2e_quant.tensors"
"""The key of a file's metadata."""


def to_plain_tensors(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A state dict with the parts of quantized tensors in their places, and their forms by name."""
    plain: dict[str, Tensor] = {}
    forms: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, QuantizedTensor):
            plain[name] = value
            continue
        tensor = portable_form(value)
        forms[name] = form_to_text(tensor.form)
        plain |= {f"{name}.{part}": own.contiguous() for part, own in tensor.parts.items()}
    return plain, forms


def from_plain_tensors(plain: Mapping[str, Tensor], forms: Mapping[str, str]) -> dict[str, Tensor]:
    """The state dict that `to_plain_tensors` took apart.

    Raises:
        ConfigError: parts of a tensor are missing.
    """
    state = dict(plain)
    for name, text in forms.items():
        form = form_from_text(text)
        found = {key for key in plain if key.rpartition(".")[0] == name}
        if not found:
            raise ConfigError(f'the file has no parts of "{name}"')
        # In the order in which they were kept: codes first.
        parts = {key.rpartition(".")[2]: state.pop(key) for key in sorted(found, key=_order)}
        state[name] = QuantizedTensor(parts, form)
    return state


def _order(key: str) -> tuple[bool, str]:
    part = key.rpartition(".")[2]
    return part not in ("codes", "packed"), part


def save_module(module: nn.Module, path: str | Path) -> None:
    """Write the state of a module, quantized or not, to a safetensors file.

    Tied weights are kept once.

    Args:
        module: any.
        path: of the file.

    Raises:
        ConfigError: an argument is of another kind.
        ArtifactError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    _check(module, path)
    state = module.state_dict()
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        known = first.setdefault(id(parameter), name)
        if known != name and name in state:
            ties[name] = known
            del state[name]
    plain, forms = to_plain_tensors(state)
    header = {"forms": forms, "ties": ties}
    tensors = {k: v.contiguous() for k, v in plain.items()}
    try:
        save_file(tensors, path, {KEY: json.dumps(header)})
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path} cannot be written: {error}") from error


def _check(module: nn.Module, path: object) -> None:
    check_module("module", module)
    check_type("path", path, (str, Path), "the path of a file")


def load_module(module: nn.Module, path: str | Path, *, layout: str = "auto") -> None:
    """Load a file of `save_module` into a module of the same architecture, float or on meta.

    Args:
        module: its parameters are replaced.
        path: of the file.
        layout: of the weights, "auto" for the fastest on this machine.

    Raises:
        ConfigError: the file was not written by save_module, or does not fit the module; or an
            argument is of another kind.
        ArtifactError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    _check(module, path)
    if layout != "auto":
        layout_named(layout)
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(KEY, "null"))
            plain = {key: file.get_tensor(key) for key in file.keys()}  # no mapping
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"{path} is no safetensors file that can be read: {error}",
            fix="give the path that save_module wrote",
        ) from error
    if header is None:
        raise ConfigError(f"{path} was not written by save_module")
    state = from_plain_tensors(plain, header["forms"])
    parameters = dict(module.named_parameters(remove_duplicate=False))
    missing = sorted(set(parameters) - set(state) - set(header["ties"]))
    if missing:
        raise ConfigError(
            f"the file has no {', '.join(missing[:5])}", fix="load it into the same architecture"
        )
    gathered = {
        f"{path}.weight" for path, m in module.named_modules() if isinstance(m, nn.Embedding)
    }
    tied = gathered | {header["ties"][name] for name in gathered if name in header["ties"]}
    for name, value in state.items():
        if isinstance(value, QuantizedTensor):
            wanted = best_layout(value, gathers=name in tied) if layout == "auto" else layout
            state[name] = nn.Parameter(value.to_layout(wanted), requires_grad=False)
    for name, known in header["ties"].items():
        state[name] = state[known]
    with torch.no_grad():
        module.load_state_dict(state, assign=True)
    for name, known in header["ties"].items():
        owner, _, leaf = name.rpartition(".")
        source, _, own = known.rpartition(".")
        shared = module.get_submodule(source)._parameters[own]
        module.get_submodule(owner)._parameters[leaf] = shared
