"""Hugging Face transformers: `from_pretrained` that quantizes, `save_pretrained` that keeps codes.

A checkpoint holds the parts of each weight under its name (`….q_proj.weight.packed`, `….scale`) and
what they are in the files' metadata, as `save_files` does it; `config.json` has the scheme.
"""

import json
from typing import Any

import torch
from torch import nn

from pt2e_quant.core.errors import ConfigError, MissingExtraError
from pt2e_quant.core.schemes import Scheme
from pt2e_quant.tensors.files.save_files import KEY, to_plain_tensors
from pt2e_quant.tensors.form import form_from_text, scheme_from_json, scheme_to_json
from pt2e_quant.tensors.graphs.graph import quantized_weights
from pt2e_quant.tensors.kernels.choose_layout import best_layout
from pt2e_quant.tensors.plan import Filter, as_scheme, is_linear
from pt2e_quant.tensors.quantize import quantize_
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.values import empty_parts

METHOD = "pt2e_quant"
"""`quant_method` in a model's config.json."""


def register_hugging_face() -> type[Any]:
    """Teach transformers this package's method, once a process.

    Returns:
        The class of configurations: `from_pretrained(…, quantization_config=Config(scheme="w8"))`.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    try:
        from transformers.quantizers import auto
    except ImportError as error:
        raise MissingExtraError("hugging_face", "transformers") from error
    if METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = _config_class()
        auto.AUTO_QUANTIZER_MAPPING[METHOD] = _quantizer_class()  # type: ignore[assignment]
    found: type[Any] = auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD]
    return found


class Holder(nn.Module):
    """The parts of one weight while a checkpoint is loaded into them.

    Args:
        text: the weight's form.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.form = form_from_text(text)
        plain = QuantizedTensor(
            empty_parts(self.form, torch.device("meta")), self.form.with_layout("plain")
        )
        for name, part in plain.to_layout(self.form.layout).parts.items():
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    def tensor(self) -> QuantizedTensor:
        """The weight."""
        parts = {name: part.data for name, part in self._parameters.items() if part is not None}
        return QuantizedTensor(parts, self.form)


def hold_parts(model: nn.Module, forms: dict[str, str]) -> None:
    """Put holders in the places of the weights that a checkpoint keeps quantized.

    Raises:
        ConfigError: the model has no such weight.
    """
    for name, text in forms.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if leaf not in owner._parameters:
            raise ConfigError(f'this model has no parameter "{name}", which the checkpoint holds')
        del owner._parameters[leaf]
        owner.add_module(leaf, Holder(text))


def release_parts(model: nn.Module, layout: str) -> None:
    """Put quantized weights in the places of their holders."""
    for owner in list(model.modules()):
        for leaf, held in list(owner._modules.items()):
            if isinstance(held, Holder):
                del owner._modules[leaf]
                tensor = held.tensor()
                gathers = isinstance(owner, nn.Embedding)
                name = best_layout(tensor, gathers=gathers) if layout == "auto" else layout
                made = nn.Parameter(tensor.to_layout(name), requires_grad=False)
                owner.register_parameter(leaf, made)


def scheme_as_json(scheme: str | Scheme) -> str | dict[str, Any]:
    """A scheme for config.json: its name, or its parts."""
    if isinstance(scheme, str):
        as_scheme(scheme)  # refuses unknown names
        return scheme
    parts = {"weight": scheme.weight, "input": scheme.input, "output": scheme.output}
    made = {role: None if own is None else scheme_to_json(own) for role, own in parts.items()}
    return {"name": scheme.name, **made}


def scheme_of_json(found: str | dict[str, Any]) -> str | Scheme:
    """Return the scheme that `scheme_as_json` was given."""
    if isinstance(found, str):
        return found
    roles = {r: found[r] and scheme_from_json(found[r]) for r in ("weight", "input", "output")}
    return Scheme(name=found["name"], **roles)


def _config_class() -> type[Any]:
    """The configuration: its base class is transformers'."""
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class Pt2eQuantConfig(QuantizationConfigMixin):
        """Configuration of a quantized model.

        Args:
            scheme: a name, or a scheme that needs no calibration.
            modules_to_not_convert: paths that stay float; None for the output head.
            layout: as `quantize_` takes it.
        """

        def __init__(
            self,
            scheme: str | Scheme | dict[str, Any] = "w8",
            modules_to_not_convert: list[str] | None = None,
            layout: str = "auto",
            **rest: Any,
        ) -> None:
            self.quant_method = METHOD  # type: ignore[assignment]  # an enum of transformers' own
            self.scheme = scheme if isinstance(scheme, dict) else scheme_as_json(scheme)
            self.modules_to_not_convert = modules_to_not_convert
            self.layout = layout

    return Pt2eQuantConfig


def _quantizer_class() -> type[Any]:
    """The quantizer: its base class is transformers'."""
    from transformers.quantizers.base import HfQuantizer

    class Pt2eQuantizer(HfQuantizer):
        """Loads checkpoints of codes, or quantizes float ones once they are loaded."""

        requires_calibration = False

        def _process_model_before_weight_loading(
            self, model: Any, checkpoint_files: Any = None, **rest: Any
        ) -> Any:
            if self.pre_quantized:
                hold_parts(model, _forms_of(checkpoint_files or ()))
            return model

        def _process_model_after_weight_loading(self, model: Any, **rest: Any) -> Any:
            config: Any = self.quantization_config
            if self.pre_quantized:
                release_parts(model, config.layout)
                return model
            skipped = self.get_modules_to_not_convert(model, config.modules_to_not_convert)
            filter = _linears_outside(skipped)
            quantize_(model, scheme_of_json(config.scheme), filter, layout=config.layout)
            return model

        def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
            """Parts keep the dtypes that they were saved with."""
            return None if self.pre_quantized else super().get_new_dtype(converter, param, dtype)

        def get_state_dict_and_metadata(self, model: Any) -> Any:
            """Parts by name, and their forms."""
            plain, forms = to_plain_tensors(model.state_dict())
            return plain, {KEY: json.dumps({"forms": forms, "ties": {}})}

        def _dequantize(self, model: Any, dtype: Any = None) -> Any:
            for name, tensor in quantized_weights(model).items():
                path, _, leaf = name.rpartition(".")
                real = tensor.dequantize().detach().to(dtype or tensor.dtype)
                model.get_submodule(path)._parameters[leaf] = nn.Parameter(real)
            return model

        def is_serializable(self) -> bool:
            """Checkpoints keep codes."""
            return True

        @property
        def is_trainable(self) -> bool:
            """Adapters are trained over it."""
            return True

        @property
        def is_compileable(self) -> bool:
            """torch.compile takes it whole."""
            return True

    return Pt2eQuantizer


def _linears_outside(skipped: list[str]) -> Filter:
    def takes(module: nn.Module, path: str) -> bool:
        inside = any(path == s or path.startswith(f"{s}.") for s in skipped)
        return is_linear(module, path) and not inside

    return takes


def _forms_of(files: Any) -> dict[str, str]:
    from safetensors import safe_open

    forms: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            header = json.loads((opened.metadata() or {}).get(KEY, "{}"))
        forms |= header.get("forms", {})
    if not forms:
        raise ConfigError(
            "this checkpoint's files say nothing of quantized weights",
            fix="save it with save_pretrained of a quantized model",
        )
    return forms
