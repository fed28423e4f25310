"""A quantization compiler for torch.export graphs.

- One call, from a model to an artifact: `quantize`.
- Step by step: `prepare`, `calibrate` or `calibrate_by_block`, `convert`, then a backend's `lower`;
  `prepare_qat` and `QatSchedule` to train; `set_numerics`, `numerics_of` and `Numerics` to train
  through integers, `out_dtype` with a gradient. `prepare_pt2e`, `prepare_qat_pt2e` and
  `convert_pt2e` are the same functions under the names that PT2E gives them. `export_causal_lm`
  exports a language model.
- Backends: `backends.get("xnnpack")` and its like make `Backend`s, which name recipes, make
  quantizers and lower to `Artifact`s.
- What to quantize and how: `Quantizer`, `ComposableQuantizer`, `IntegerQuantizer`, `QuantRule`,
  `RuleKind`; `Scheme`, `TensorScheme`, `Role` and `scheme_named`; `PerTensor`, `PerChannel`,
  `PerGroup`, `PerToken`, `PerBlock`.
- PT2E's annotations: `QuantizationAnnotation` and the specs (`QuantizationSpec`, `Shared…`,
  `Derived…`, `FixedQParamsQuantizationSpec`).
- Observers, by name: `MinMaxObserver`, `HistogramObserver`, …, `FakeQuantize`,
  `LearnableFakeQuantize`.
- Algorithms of post-training quantization: the files of `algorithms`.
- Eager modules: `quantize_` in place, `auto_quantize` by measured speed, `QuantizedTensor`, and the
  rest of `tensors`.
- Training in float8, int8 and with optimizer states of few bits: `training`.
- Files: `save` and `load`, `export_encodings` and `import_encodings`.
- What a chip of integers alone could not run: `audit`, an `Audit` of `FloatOperator`s. How far an
  artifact is from exact integers: `verify_parity`, a `Parity`.
- Where the time of a call goes, operator by operator: `profile`, a `Profile`. One file of HTML on
  an artifact: `write_page`; what its tensors hold: `tensor_values`; colours for Google's Model
  Explorer: `write_node_data`.
- Where accuracy goes: `compare` two forms of a model, a `Comparison` of `NodeError`s; `sensitivity`
  is what quantizing each group alone costs, a `Sensitivity`; `evaluate` takes a metric of any form;
  `tune` chooses a scheme for each group, a `Tuned` with its `RecipeFile` (`read_recipe`); `advise`
  gives `Advice`, with the line to add.
- What came of it: `Report`, `Provenance`, `provenance_of`, `sqnr_db`, `verify_canonical`,
  `integer_reference`.
- Errors: `Pt2eQuantError` is the base of all that `errors` lists; `Pt2eQuantWarning`.

Importing the package registers its operators with torch and nothing more: a name is imported from
its file when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pt2e_quant.core import operators as _operators  # noqa: F401  (registers them)

if TYPE_CHECKING:
    from pt2e_quant import backends as backends
    from pt2e_quant import tensors as tensors
    from pt2e_quant import training as training
    from pt2e_quant.analysis.advice import Advice as Advice
    from pt2e_quant.analysis.advice import advise as advise
    from pt2e_quant.analysis.compare import compare as compare
    from pt2e_quant.analysis.comparison import Comparison as Comparison
    from pt2e_quant.analysis.comparison import NodeError as NodeError
    from pt2e_quant.analysis.evaluate import evaluate as evaluate
    from pt2e_quant.analysis.graph_colours import write_node_data as write_node_data
    from pt2e_quant.analysis.group_costs import Sensitivity as Sensitivity
    from pt2e_quant.analysis.profile import profile as profile
    from pt2e_quant.analysis.sensitivity import sensitivity as sensitivity
    from pt2e_quant.analysis.tensor_values import tensor_values as tensor_values
    from pt2e_quant.analysis.tune import tune as tune
    from pt2e_quant.analysis.tuned import Tuned as Tuned
    from pt2e_quant.analysis.write_page import write_page as write_page
    from pt2e_quant.backends.artifact import Artifact as Artifact
    from pt2e_quant.backends.parity import verify_parity as verify_parity
    from pt2e_quant.backends.parity_table import Parity as Parity
    from pt2e_quant.backends.profile import Profile as Profile
    from pt2e_quant.backends.target.backend import Backend as Backend
    from pt2e_quant.backends.target.recipe_file import RecipeFile as RecipeFile
    from pt2e_quant.backends.target.recipe_file import read_recipe as read_recipe
    from pt2e_quant.core import errors as errors
    from pt2e_quant.core.canonical import verify_canonical as verify_canonical
    from pt2e_quant.core.errors import Pt2eQuantError as Pt2eQuantError
    from pt2e_quant.core.errors import Pt2eQuantWarning as Pt2eQuantWarning
    from pt2e_quant.core.granularity import PerBlock as PerBlock
    from pt2e_quant.core.granularity import PerChannel as PerChannel
    from pt2e_quant.core.granularity import PerGroup as PerGroup
    from pt2e_quant.core.granularity import PerTensor as PerTensor
    from pt2e_quant.core.granularity import PerToken as PerToken
    from pt2e_quant.core.integer_ops.products import out_dtype as out_dtype
    from pt2e_quant.core.provenance import FloatOperator as FloatOperator
    from pt2e_quant.core.provenance import Provenance as Provenance
    from pt2e_quant.core.provenance import provenance_of as provenance_of
    from pt2e_quant.core.scheme_names import scheme_named as scheme_named
    from pt2e_quant.core.schemes import Role as Role
    from pt2e_quant.core.schemes import Scheme as Scheme
    from pt2e_quant.core.schemes import TensorScheme as TensorScheme
    from pt2e_quant.core.specs import DerivedQuantizationSpec as DerivedQuantizationSpec
    from pt2e_quant.core.specs import FixedQParamsQuantizationSpec as FixedQParamsQuantizationSpec
    from pt2e_quant.core.specs import QuantizationAnnotation as QuantizationAnnotation
    from pt2e_quant.core.specs import QuantizationSpec as QuantizationSpec
    from pt2e_quant.core.specs import SharedQuantizationSpec as SharedQuantizationSpec
    from pt2e_quant.flow.annotate.integer_quantizer import IntegerQuantizer as IntegerQuantizer
    from pt2e_quant.flow.annotate.quantizer import ComposableQuantizer as ComposableQuantizer
    from pt2e_quant.flow.annotate.quantizer import Quantizer as Quantizer
    from pt2e_quant.flow.annotate.rules import QuantRule as QuantRule
    from pt2e_quant.flow.annotate.rules import RuleKind as RuleKind
    from pt2e_quant.flow.archive.program import load as load
    from pt2e_quant.flow.archive.program import save as save
    from pt2e_quant.flow.calibrate.calibrate import calibrate as calibrate
    from pt2e_quant.flow.calibrate.calibrate_by_block import (
        calibrate_by_block as calibrate_by_block,
    )
    from pt2e_quant.flow.calibrate.sample import sqnr_db as sqnr_db
    from pt2e_quant.flow.causal_lm import export_causal_lm as export_causal_lm
    from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e as convert_pt2e
    from pt2e_quant.flow.convert.integer_reference import (
        integer_reference as integer_reference,
    )
    from pt2e_quant.flow.encodings.export_file import export_encodings as export_encodings
    from pt2e_quant.flow.encodings.import_file import import_encodings as import_encodings
    from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e as prepare_pt2e
    from pt2e_quant.flow.qat.numerics import Numerics as Numerics
    from pt2e_quant.flow.qat.numerics import QatSchedule as QatSchedule
    from pt2e_quant.flow.qat.numerics import numerics_of as numerics_of
    from pt2e_quant.flow.qat.numerics import set_numerics as set_numerics
    from pt2e_quant.flow.qat.prepare_qat_pt2e import prepare_qat_pt2e as prepare_qat_pt2e
    from pt2e_quant.flow.report.audit import Audit as Audit
    from pt2e_quant.flow.report.audit import audit as audit
    from pt2e_quant.flow.report.report import Report as Report
    from pt2e_quant.observers.run_time.placeholder import PlaceholderObserver as PlaceholderObserver
    from pt2e_quant.observers.static.entropy import EntropyObserver as EntropyObserver
    from pt2e_quant.observers.static.fixed import FixedQParamsObserver as FixedQParamsObserver
    from pt2e_quant.observers.static.histogram import HistogramObserver as HistogramObserver
    from pt2e_quant.observers.static.minmax import MinMaxObserver as MinMaxObserver
    from pt2e_quant.observers.static.minmax import (
        PerChannelMinMaxObserver as PerChannelMinMaxObserver,
    )
    from pt2e_quant.observers.static.moving_average import (
        MovingAverageMinMaxObserver as MovingAverageMinMaxObserver,
    )
    from pt2e_quant.observers.static.moving_average import (
        MovingAveragePerChannelMinMaxObserver as MovingAveragePerChannelMinMaxObserver,
    )
    from pt2e_quant.observers.static.mse import MSEObserver as MSEObserver
    from pt2e_quant.observers.static.percentile import PercentileObserver as PercentileObserver
    from pt2e_quant.observers.training.fake_quantize import FakeQuantize as FakeQuantize
    from pt2e_quant.observers.training.fused_fake_quantize import (
        FusedMovingAvgObsFakeQuantize as FusedMovingAvgObsFakeQuantize,
    )
    from pt2e_quant.observers.training.learnable_fake_quantize import (
        LearnableFakeQuantize as LearnableFakeQuantize,
    )
    from pt2e_quant.observers.training.learned_step import LSQObserver as LSQObserver
    from pt2e_quant.observers.training.learned_step import (
        LSQPlusWeightObserver as LSQPlusWeightObserver,
    )
    from pt2e_quant.observers.weights.weight import WeightObserver as WeightObserver
    from pt2e_quant.one_call import quantize as quantize
    from pt2e_quant.passes import algorithms as algorithms
    from pt2e_quant.tensors.kernels.choose_fastest import auto_quantize as auto_quantize
    from pt2e_quant.tensors.quantize import quantize_ as quantize_
    from pt2e_quant.tensors.quantized_tensor import QuantizedTensor as QuantizedTensor

    convert = convert_pt2e
    prepare = prepare_pt2e
    prepare_qat = prepare_qat_pt2e

_FILES = {
    # one call, and its steps
    "quantize": "pt2e_quant.one_call",
    "calibrate": "pt2e_quant.flow.calibrate.calibrate",
    "calibrate_by_block": "pt2e_quant.flow.calibrate.calibrate_by_block",
    "convert": "pt2e_quant.flow.convert.convert_pt2e",
    "convert_pt2e": "pt2e_quant.flow.convert.convert_pt2e",
    "export_causal_lm": "pt2e_quant.flow.causal_lm",
    "prepare": "pt2e_quant.flow.prepare.prepare_pt2e",
    "prepare_pt2e": "pt2e_quant.flow.prepare.prepare_pt2e",
    "prepare_qat": "pt2e_quant.flow.qat.prepare_qat_pt2e",
    "prepare_qat_pt2e": "pt2e_quant.flow.qat.prepare_qat_pt2e",
    "QatSchedule": "pt2e_quant.flow.qat.numerics",
    "Numerics": "pt2e_quant.flow.qat.numerics",
    "numerics_of": "pt2e_quant.flow.qat.numerics",
    "set_numerics": "pt2e_quant.flow.qat.numerics",
    "out_dtype": "pt2e_quant.core.integer_ops.products",
    # backends
    "Artifact": "pt2e_quant.backends.artifact",
    "Backend": "pt2e_quant.backends.target.backend",
    # what to quantize, and how
    "ComposableQuantizer": "pt2e_quant.flow.annotate.quantizer",
    "IntegerQuantizer": "pt2e_quant.flow.annotate.integer_quantizer",
    "PerBlock": "pt2e_quant.core.granularity",
    "PerChannel": "pt2e_quant.core.granularity",
    "PerGroup": "pt2e_quant.core.granularity",
    "PerTensor": "pt2e_quant.core.granularity",
    "PerToken": "pt2e_quant.core.granularity",
    "QuantRule": "pt2e_quant.flow.annotate.rules",
    "Quantizer": "pt2e_quant.flow.annotate.quantizer",
    "Role": "pt2e_quant.core.schemes",
    "RuleKind": "pt2e_quant.flow.annotate.rules",
    "Scheme": "pt2e_quant.core.schemes",
    "TensorScheme": "pt2e_quant.core.schemes",
    "scheme_named": "pt2e_quant.core.scheme_names",
    # PT2E's annotations
    "DerivedQuantizationSpec": "pt2e_quant.core.specs",
    "FixedQParamsQuantizationSpec": "pt2e_quant.core.specs",
    "QuantizationAnnotation": "pt2e_quant.core.specs",
    "QuantizationSpec": "pt2e_quant.core.specs",
    "SharedQuantizationSpec": "pt2e_quant.core.specs",
    # observers
    "EntropyObserver": "pt2e_quant.observers.static.entropy",
    "FakeQuantize": "pt2e_quant.observers.training.fake_quantize",
    "FixedQParamsObserver": "pt2e_quant.observers.static.fixed",
    "FusedMovingAvgObsFakeQuantize": "pt2e_quant.observers.training.fused_fake_quantize",
    "HistogramObserver": "pt2e_quant.observers.static.histogram",
    "LSQObserver": "pt2e_quant.observers.training.learned_step",
    "LSQPlusWeightObserver": "pt2e_quant.observers.training.learned_step",
    "LearnableFakeQuantize": "pt2e_quant.observers.training.learnable_fake_quantize",
    "MSEObserver": "pt2e_quant.observers.static.mse",
    "MinMaxObserver": "pt2e_quant.observers.static.minmax",
    "MovingAverageMinMaxObserver": "pt2e_quant.observers.static.moving_average",
    "MovingAveragePerChannelMinMaxObserver": "pt2e_quant.observers.static.moving_average",
    "PerChannelMinMaxObserver": "pt2e_quant.observers.static.minmax",
    "PercentileObserver": "pt2e_quant.observers.static.percentile",
    "PlaceholderObserver": "pt2e_quant.observers.run_time.placeholder",
    "WeightObserver": "pt2e_quant.observers.weights.weight",
    # files
    "export_encodings": "pt2e_quant.flow.encodings.export_file",
    "import_encodings": "pt2e_quant.flow.encodings.import_file",
    "load": "pt2e_quant.flow.archive.program",
    "save": "pt2e_quant.flow.archive.program",
    # what came of it
    "Audit": "pt2e_quant.flow.report.audit",
    "FloatOperator": "pt2e_quant.core.provenance",
    "Provenance": "pt2e_quant.core.provenance",
    "Report": "pt2e_quant.flow.report.report",
    "audit": "pt2e_quant.flow.report.audit",
    "Comparison": "pt2e_quant.analysis.comparison",
    "NodeError": "pt2e_quant.analysis.comparison",
    "Sensitivity": "pt2e_quant.analysis.group_costs",
    "Advice": "pt2e_quant.analysis.advice",
    "advise": "pt2e_quant.analysis.advice",
    "compare": "pt2e_quant.analysis.compare",
    "evaluate": "pt2e_quant.analysis.evaluate",
    "sensitivity": "pt2e_quant.analysis.sensitivity",
    "Parity": "pt2e_quant.backends.parity_table",
    "verify_parity": "pt2e_quant.backends.parity",
    "Profile": "pt2e_quant.backends.profile",
    "profile": "pt2e_quant.analysis.profile",
    "tensor_values": "pt2e_quant.analysis.tensor_values",
    "tune": "pt2e_quant.analysis.tune",
    "Tuned": "pt2e_quant.analysis.tuned",
    "RecipeFile": "pt2e_quant.backends.target.recipe_file",
    "read_recipe": "pt2e_quant.backends.target.recipe_file",
    "write_node_data": "pt2e_quant.analysis.graph_colours",
    "write_page": "pt2e_quant.analysis.write_page",
    "provenance_of": "pt2e_quant.core.provenance",
    "sqnr_db": "pt2e_quant.flow.calibrate.sample",
    "integer_reference": "pt2e_quant.flow.convert.integer_reference",
    "verify_canonical": "pt2e_quant.core.canonical",
    # eager modules
    "QuantizedTensor": "pt2e_quant.tensors.quantized_tensor",
    "auto_quantize": "pt2e_quant.tensors.kernels.choose_fastest",
    "quantize_": "pt2e_quant.tensors.quantize",
    # errors
    "Pt2eQuantError": "pt2e_quant.core.errors",
    "Pt2eQuantWarning": "pt2e_quant.core.errors",
}
"""The file that each name is in."""

_SHORT = {
    "convert": "convert_pt2e",
    "prepare": "prepare_pt2e",
    "prepare_qat": "prepare_qat_pt2e",
}
"""Names without PT2E's suffix."""

_MODULES = {
    "algorithms": "pt2e_quant.passes.algorithms",
    "backends": "pt2e_quant.backends",
    "errors": "pt2e_quant.core.errors",
    "tensors": "pt2e_quant.tensors",
    "training": "pt2e_quant.training",
}
"""Names of folders and files."""

__all__ = [*_FILES, *_MODULES]

if not TYPE_CHECKING:  # A checker reports names that are not there.

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            found = import_module(_MODULES[name])
        elif name in _FILES:
            found = getattr(import_module(_FILES[name]), _SHORT.get(name, name))
        else:  # also what Python itself asks of a package
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
